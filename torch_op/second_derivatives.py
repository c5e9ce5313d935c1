"""Second derivatives of twinop's ops: the derivatives of the backward ops, in torch's operators.

A formula gives the gradient of one input of a backward op. It is a function whose first parameter, `op`, has
the ops as attributes. Its other parameters are what it needs, by name: inputs, outputs and attributes of the
backward op, and the incoming gradient `grad` (`grad_<output>` where the op has several outputs). Each formula
is evaluated only if its gradient is wanted.

First derivatives are in the records (kernels/ops). A library that is not twinop's declares the derivatives of
its backward ops there as well.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinop.record import DOMAIN, Record

Compute = Callable[..., Tensor]


@dataclass(frozen=True)
class Formula:
    """A derivative by one input.

    Attributes:
        parameters: the names of what `compute` takes after `op`.
    """

    parameters: tuple[str, ...]
    compute: Compute


_formulas: dict[str, dict[str, Formula]] = {}


def formulas_of(record: Record) -> Mapping[str, Formula]:
    """Returns the formulas of a backward op by input; none for the ops of other libraries."""
    return _formulas.get(record.name, {}) if record.domain == DOMAIN else {}


def _register(name: str, of: str, parameters: tuple[str, ...], compute: Compute) -> None:
    _formulas.setdefault(name, {})[of] = Formula(parameters, compute)


def _derivative(compute: Compute) -> Compute:
    """Registers `silu_backward_by_x` as the derivative of `silu_backward` by its input `x`."""
    name, _, of = compute.__name__.partition("_by_")
    _register(name, of, tuple(inspect.signature(compute).parameters)[1:], compute)
    return compute


def _self_adjoint(name: str, *others: str) -> None:
    """Registers the derivative by `grad_y` of an op that is linear in it and its own adjoint: the op itself.

    Args:
        others: the op's arguments after `grad_y`.
    """

    def compute(op: Any, grad: Tensor, *values: Any) -> Tensor:
        return getattr(op, name)(grad, *values)

    _register(name, "grad_y", ("grad", *others), compute)


# ---------------------------------------------------------------------------- elementwise ops

for _name, _argument in {
    "relu": "y",
    "silu": "x",
    "sigmoid": "y",
    "tanh": "y",
    "softplus": "x",
    "exp": "y",
    "log": "x",
    "square": "x",
}.items():
    _self_adjoint(f"{_name}_backward", _argument)
_self_adjoint("gelu_backward", "x", "approximate")


def _times_silu_slope(factor: Tensor, x: Tensor) -> Tensor:
    """`factor` times the first derivative of silu."""
    s = torch.sigmoid(x)
    return factor * s * (1 + x * (1 - s))


def _times_silu_curve(factor: Tensor, x: Tensor) -> Tensor:
    """`factor` times the second derivative of silu."""
    s = torch.sigmoid(x)
    return factor * s * (1 - s) * (2 + x * (1 - 2 * s))


@_derivative
def silu_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor, x: Tensor) -> Tensor:
    return _times_silu_curve(grad * grad_y, x)


@_derivative
def sigmoid_backward_by_y(op: Any, grad: Tensor, grad_y: Tensor, y: Tensor) -> Tensor:
    return grad * grad_y * (1 - 2 * y)


@_derivative
def tanh_backward_by_y(op: Any, grad: Tensor, grad_y: Tensor, y: Tensor) -> Tensor:
    return -2 * grad * grad_y * y


@_derivative
def softplus_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad * grad_y * s * (1 - s)


@_derivative
def exp_backward_by_y(op: Any, grad: Tensor, grad_y: Tensor) -> Tensor:
    return grad * grad_y


@_derivative
def log_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor, x: Tensor) -> Tensor:
    return -grad * grad_y / (x * x)


@_derivative
def square_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor) -> Tensor:
    return 2 * grad * grad_y


@_derivative
def gelu_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor, x: Tensor, approximate: str) -> Tensor:
    """gelu''(x) = pdf(x) (2 - x^2).

    In the tanh form, gelu(x) = x s with s = sigmoid(v), and its second derivative is
    s (1 - s) (2 v' + x v'' + x v'^2 (1 - 2 s)).
    """
    if approximate == "none":
        return grad * grad_y * (torch.exp(-0.5 * x * x) * 0.3989422804014327 * (2 - x * x))
    s = torch.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    return (
        grad * grad_y * (s * (1 - s) * (2 * slope + x * (0.42812889763560153 * x + slope**2 * (1 - 2 * s))))
    )


@_derivative
def swiglu_backward_by_grad_y(
    op: Any, grad_grad_x: Tensor, grad_grad_gate: Tensor, x: Tensor, gate: Tensor
) -> Tensor:
    return grad_grad_x * torch.nn.functional.silu(gate) + _times_silu_slope(grad_grad_gate * x, gate)


@_derivative
def swiglu_backward_by_x(op: Any, grad_grad_gate: Tensor, grad_y: Tensor, gate: Tensor) -> Tensor:
    return _times_silu_slope(grad_grad_gate * grad_y, gate)


@_derivative
def swiglu_backward_by_gate(
    op: Any, grad_grad_x: Tensor, grad_grad_gate: Tensor, grad_y: Tensor, x: Tensor, gate: Tensor
) -> Tensor:
    by_slope = _times_silu_slope(grad_grad_x * grad_y, gate)
    return by_slope + _times_silu_curve(grad_grad_gate * grad_y * x, gate)


# Of the 2n columns of a packed tensor, the first n are the gate and the others x.


@_derivative
def swiglu_packed_backward_by_grad_y(op: Any, grad: Tensor, x: Tensor) -> Tensor:
    (grad_gate, grad_value), (gate, value) = grad.chunk(2, -1), x.chunk(2, -1)
    return grad_value * torch.nn.functional.silu(gate) + _times_silu_slope(grad_gate * value, gate)


@_derivative
def swiglu_packed_backward_by_x(op: Any, grad: Tensor, grad_y: Tensor, x: Tensor) -> Tensor:
    (grad_gate, grad_value), (gate, value) = grad.chunk(2, -1), x.chunk(2, -1)
    by_slope = _times_silu_slope(grad_value * grad_y, gate)
    by_gate = by_slope + _times_silu_curve(grad_gate * grad_y * value, gate)
    return torch.cat((by_gate, _times_silu_slope(grad_gate * grad_y, gate)), -1)


# ---------------------------------------------------------------------------- row-wise ops

_self_adjoint("softmax_backward", "y", "dim")


@_derivative
def softmax_backward_by_y(op: Any, grad: Tensor, grad_y: Tensor, y: Tensor, dim: int) -> Tensor:
    by_grad = grad * (grad_y * y).sum(dim, keepdim=True)
    return grad * grad_y - by_grad - grad_y * (grad * y).sum(dim, keepdim=True)


class _Norm:
    """A norm of the rows of `x`, without weight and bias.

    `pull(v)` is dL/dx for dL/dh = v, where h is the normalised row: rstd (v - [mean(v)] - h mean(v h)). The
    map is symmetric, and dh = pull(dx). So with g = grad_y * factor, and with the gradients u, w and b that
    come in for grad_x, grad_weight and grad_bias:

        <u, pull(g)> by grad_y: factor pull(u);  by weight: the sum over the rows of grad_y pull(u)
        <u, pull(g)> by x: -rstd (h mean(u pull(g)) + pull(u) mean(g h) + pull(g) mean(u h))
        <w, grad_y h> by grad_y: w h;  by x: pull(grad_y w)
    """

    name: str
    attributes: tuple[str, ...]

    def __init__(self, op: Any, x: Tensor, attributes: tuple[Any, ...]) -> None:
        self.op, self.x, self.values = op, x, attributes
        self.axis, self.eps = attributes[:2]

    def row_mean(self, v: Tensor) -> Tensor:
        rank = self.x.dim()
        return v.mean(list(range(self.axis % max(rank, 1) - rank, 0)), keepdim=True)

    def pull(self, v: Tensor) -> Tensor:
        backward = getattr(self.op, f"{self.name}_backward")
        return backward(v.to(self.x.dtype), self.x, None, None, None, *self.values)[0]

    def normalized(self) -> Tensor:
        raise NotImplementedError

    def mean_square(self) -> Tensor:
        """Of what is normalised."""
        raise NotImplementedError

    def factor(self, weight: Tensor) -> Tensor:
        """What a normalised row is multiplied by."""
        raise NotImplementedError


class _LayerNorm(_Norm):
    name = "layer_norm"
    attributes = ("axis", "eps")

    def normalized(self) -> Tensor:
        return self.op.layer_norm(self.x, None, None, *self.values)

    def mean_square(self) -> Tensor:
        return self.row_mean((self.x - self.row_mean(self.x)).square())

    def factor(self, weight: Tensor) -> Tensor:
        return weight


class _RmsNorm(_Norm):
    name = "rms_norm"
    attributes = ("axis", "eps", "offset")

    def normalized(self) -> Tensor:
        return self.op.rms_norm(self.x, None, *self.values)

    def mean_square(self) -> Tensor:
        return self.row_mean(self.x.square())

    def factor(self, weight: Tensor) -> Tensor:
        return self.values[2] + weight


def _register_norm(norm: type[_Norm]) -> None:
    def by_grad_y(
        op: Any, u: Tensor, w: Tensor, b: Tensor, x: Any, weight: Any, bias: Any, *values: Any
    ) -> Tensor:
        row = norm(op, x, values)
        result = row.pull(u) * (1 if weight is None else row.factor(weight))
        result = result + (0 if weight is None else w * row.normalized())
        return result + (0 if bias is None else b)

    def by_x(op: Any, u: Tensor, w: Tensor, grad_y: Tensor, x: Tensor, weight: Any, *values: Any) -> Tensor:
        row = norm(op, x, values)
        g = grad_y if weight is None else grad_y * row.factor(weight)
        h, pulled = row.normalized(), row.pull(g)
        curve = (
            h * row.row_mean(u * pulled) + row.pull(u) * row.row_mean(g * h) + pulled * row.row_mean(u * h)
        )
        rstd = torch.rsqrt(row.mean_square() + row.eps)
        return (0 if weight is None else row.pull(grad_y * w)) - rstd * curve

    def by_weight(op: Any, u: Tensor, grad_y: Tensor, x: Tensor, weight: Tensor, *values: Any) -> Tensor:
        return (grad_y * norm(op, x, values).pull(u)).sum_to_size(weight.shape)

    def by_grad_sum(op: Any, u: Tensor) -> Tensor:
        return u

    name, attributes = f"{norm.name}_backward", norm.attributes
    u, w, b = "grad_grad_x", "grad_grad_weight", "grad_grad_bias"
    _register(name, "grad_y", (u, w, b, "x", "weight", "bias", *attributes), by_grad_y)
    _register(name, "x", (u, w, "grad_y", "x", "weight", *attributes), by_x)
    _register(name, "weight", (u, "grad_y", "x", "weight", *attributes), by_weight)
    _register(name, "grad_sum", (u,), by_grad_sum)


_register_norm(_LayerNorm)
_register_norm(_RmsNorm)
