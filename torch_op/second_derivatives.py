"""Second derivatives of twinop's ops: the backward ops in torch's operators, which torch differentiates.

The parameters of a function are what it needs of the backward op's inputs and attributes, by name. It returns
the op's output, or a dict of outputs by name where there are several. Other libraries declare theirs in the
records of backward ops, or with `twinop.second_derivative`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twinop.libraries.declare import SECOND_DERIVATIVES

aten = torch.ops.aten


def _silu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)  # aten.silu_backward has no derivative
    return grad_y * s * (1 + x * (1 - s))


def _swiglu_backward(grad_y: Tensor, x: Tensor, gate: Tensor) -> dict[str, Tensor]:
    return {"grad_x": grad_y * F.silu(gate), "grad_gate": _silu_backward(grad_y * x, gate)}


def _swiglu_packed_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return torch.cat((_silu_backward(grad_y * value, gate), grad_y * F.silu(gate)), -1)


def _norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    grad_sum: Any,
    axis: int,
    eps: float,
    offset: int = 0,
    centred: bool = False,
) -> dict[str, Tensor]:
    """The gradients of what is there of x, weight and bias."""
    dims = list(range(axis % max(x.dim(), 1) - x.dim(), 0))

    def forward(given: dict[str, Tensor]) -> Tensor:
        x = given["grad_x"]
        x = x - x.mean(dims, keepdim=True) if centred else x
        y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
        y = y if weight is None else y * (offset + given["grad_weight"])
        return y + given.get("grad_bias", 0)

    given = {"grad_x": x, "grad_weight": weight, "grad_bias": bias}
    present = {name: value for name, value in given.items() if value is not None}
    _, pull = torch.func.vjp(forward, present)  # type: ignore[misc]
    (gradients,) = pull(grad_y)
    return gradients if grad_sum is None else gradients | {"grad_x": gradients["grad_x"] + grad_sum}


SECOND_DERIVATIVES |= {
    "relu_backward": lambda grad_y, y: aten.threshold_backward(grad_y, y, 0),
    "gelu_backward": lambda grad_y, x, approximate: aten.gelu_backward(grad_y, x, approximate=approximate),
    "silu_backward": _silu_backward,
    "sigmoid_backward": lambda grad_y, y: aten.sigmoid_backward(grad_y, y),
    "tanh_backward": lambda grad_y, y: aten.tanh_backward(grad_y, y),
    "softplus_backward": lambda grad_y, x: grad_y * torch.sigmoid(x),
    "exp_backward": lambda grad_y, y: grad_y * y,
    "log_backward": lambda grad_y, x: grad_y / x,
    "square_backward": lambda grad_y, x: 2 * grad_y * x,
    "swiglu_backward": _swiglu_backward,
    "swiglu_packed_backward": _swiglu_packed_backward,
    "softmax_backward": lambda grad_y, y, dim: y * (grad_y - (grad_y * y).sum(dim, keepdim=True)),
    "layer_norm_backward": lambda grad_y, x, weight, bias, grad_sum, axis, eps: _norm_backward(
        grad_y, x, weight, bias, grad_sum, axis, eps, centred=True
    ),
    "rms_norm_backward": lambda grad_y, x, weight, bias, grad_sum, axis, eps, offset: _norm_backward(
        grad_y, x, weight, bias, grad_sum, axis, eps, offset
    ),
}
