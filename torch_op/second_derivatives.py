"""Second derivatives of twinop's ops: the backward ops in torch's operators, which torch differentiates.

A function has the name of a backward op. Its parameters are what it needs of the op's inputs and attributes,
by name. It returns the op's output, or a dict of outputs by name where there are several. It runs only when
the backward op itself is differentiated.

First derivatives are in the records (kernels/ops). Other libraries declare the derivatives of their backward
ops there as well, or with `twinop.second_derivative`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twinop.declare import SECOND_DERIVATIVES
from twinop.op_spec import OpSpec

aten = torch.ops.aten


def in_torch(record: OpSpec) -> Callable[..., Any] | None:
    """Returns the function of a backward op; None for other ops, and for those without one."""
    return SECOND_DERIVATIVES.get(record.key)


def _differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    SECOND_DERIVATIVES[function.__name__] = function
    return function


# ---------------------------------------------------------------------------- elementwise ops


@_differentiable
def relu_backward(grad_y: Tensor, y: Tensor) -> Tensor:
    return aten.threshold_backward(grad_y, y, 0)


@_differentiable
def gelu_backward(grad_y: Tensor, x: Tensor, approximate: str) -> Tensor:
    return aten.gelu_backward(grad_y, x, approximate=approximate)


@_differentiable
def silu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)  # aten.silu_backward has no derivative
    return grad_y * s * (1 + x * (1 - s))


@_differentiable
def sigmoid_backward(grad_y: Tensor, y: Tensor) -> Tensor:
    return aten.sigmoid_backward(grad_y, y)


@_differentiable
def tanh_backward(grad_y: Tensor, y: Tensor) -> Tensor:
    return aten.tanh_backward(grad_y, y)


@_differentiable
def softplus_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    return grad_y * torch.sigmoid(x)


@_differentiable
def exp_backward(grad_y: Tensor, y: Tensor) -> Tensor:
    return grad_y * y


@_differentiable
def log_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    return grad_y / x


@_differentiable
def square_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    return 2 * grad_y * x


@_differentiable
def swiglu_backward(grad_y: Tensor, x: Tensor, gate: Tensor) -> dict[str, Tensor]:
    return {"grad_x": grad_y * F.silu(gate), "grad_gate": silu_backward(grad_y * x, gate)}


@_differentiable
def swiglu_packed_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return torch.cat((silu_backward(grad_y * value, gate), grad_y * F.silu(gate)), -1)


# ---------------------------------------------------------------------------- row-wise ops


@_differentiable
def softmax_backward(grad_y: Tensor, y: Tensor, dim: int) -> Tensor:
    return y * (grad_y - (grad_y * y).sum(dim, keepdim=True))


@_differentiable
def layer_norm_backward(
    grad_y: Tensor, x: Tensor, weight: Any, bias: Any, grad_sum: Any, axis: int, eps: float
) -> dict[str, Tensor]:
    def norm(x: Tensor, weight: Tensor | float) -> Tensor:
        centred = x - _row_mean(x, axis)
        return centred * torch.rsqrt(_row_mean(centred.square(), axis) + eps) * weight

    return _norm_backward(norm, grad_y, x, weight, bias, grad_sum)


@_differentiable
def rms_norm_backward(
    grad_y: Tensor, x: Tensor, weight: Any, bias: Any, grad_sum: Any, axis: int, eps: float, offset: int
) -> dict[str, Tensor]:
    def norm(x: Tensor, weight: Tensor | float) -> Tensor:
        factor = weight if isinstance(weight, float) else offset + weight
        return x * torch.rsqrt(_row_mean(x.square(), axis) + eps) * factor

    return _norm_backward(norm, grad_y, x, weight, bias, grad_sum)


def _row_mean(x: Tensor, axis: int) -> Tensor:
    return x.mean(list(range(axis % max(x.dim(), 1) - x.dim(), 0)), keepdim=True)


def _norm_backward(
    norm: Callable[..., Tensor], grad_y: Tensor, x: Tensor, weight: Any, bias: Any, grad_sum: Any
) -> dict[str, Tensor]:
    """The gradients of what is there of x, weight and bias."""
    given = {"grad_x": x, "grad_weight": weight, "grad_bias": bias}

    def forward(given: dict[str, Tensor]) -> Tensor:
        return norm(given["grad_x"], given.get("grad_weight", 1.0)) + given.get("grad_bias", 0)

    present = {name: value for name, value in given.items() if value is not None}
    _, pull = torch.func.vjp(forward, present)  # type: ignore[misc]
    (gradients,) = pull(grad_y)
    return gradients if grad_sum is None else gradients | {"grad_x": gradients["grad_x"] + grad_sum}
