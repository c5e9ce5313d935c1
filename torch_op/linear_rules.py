"""`linear` and its relatives in torch: their derivatives, and what they run on CPU tensors.

The products are torch's own; the derivatives of activations are our kernels. The value before an activation
is computed again, with one more product, because the op does not keep it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twinop.libraries.declare import CPU_FUNCTIONS, DERIVATIVES, SECOND_DERIVATIVES

from .registry import functions

_Maybe = Tensor | None
_SLICE = 1 << 23  # elements of a weight of integers that are dense at a time
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _normed(x: Tensor, rms_eps: float = 0, **_: float) -> Tensor:
    return functions["rms_norm"](x, None, -1, rms_eps) if rms_eps > 0 else x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    nk = weight if layout == "nk" else weight.mT
    if weight.dim() == 2:
        return F.linear(x, nk, bias)
    y = x.flatten(1, -2) @ nk.mT  # vmap over weights too: a product for each example
    return (y if bias is None else y + bias.unsqueeze(1)).unflatten(1, x.shape[1:-1])


def _activated(y: Tensor, residual: _Maybe, activation: str) -> Tensor:
    return _ACTIVATIONS[activation](y if residual is None else y + residual)


def _gated(y: Tensor, activation: str) -> Tensor:
    gate, others = y.chunk(2, -1)
    return _ACTIVATIONS[activation](gate) * others


def _on_cpu(
    x: Tensor, weight: Tensor, bias: _Maybe, residual: _Maybe, activation: str, layout: str, **options: Any
) -> Tensor:
    return _activated(_product(_normed(x, **options), weight, bias, layout), residual, activation)


def _swiglu_on_cpu(
    x: Tensor, weight: Tensor, bias: _Maybe, activation: str, layout: str, **options: Any
) -> Tensor:
    return _gated(_product(_normed(x, **options), weight, bias, layout), activation)


def dequantised(weight: Tensor, scale: Tensor, zero: Tensor | None, k: int, bits: int, block: int) -> Tensor:
    """Returns the weight [n, k] of `linear_q` in the dtype of `scale`."""

    def integers(values: Tensor) -> Tensor:
        return (values if bits == 8 else torch.stack([values & 15, values >> 4], -1)).flatten(1)

    def of_columns(values: Tensor) -> Tensor:
        return values.repeat_interleave(block, 1)[:, :k]

    middle = 2 ** (bits - 1) if zero is None else of_columns(integers(zero))
    return (integers(weight)[:, :k].to(scale.dtype) - middle) * of_columns(scale)


def _float8_on_cpu(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    residual: _Maybe,
    activation: str,
) -> Tensor:
    """Computes `linear_fp8` in fp32, and rounds the result to the dtype of the bias."""
    sums = F.linear(x.float(), weight.float()) * x_scale.unsqueeze(-1) * weight_scale
    return _activated(sums + bias, residual, activation).to(bias.dtype)


def _w8_product(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, rms_eps: float) -> Tensor:
    return F.linear(_normed(x, rms_eps), weight) * weight_scale + bias


def _quantised_product(
    x: Tensor, weight: Tensor, scale: Tensor, zero: _Maybe, bias: _Maybe, bits: int, block: int
) -> Tensor:
    """Multiplies by the weight of `linear_q`, of which only a slice of rows is dense at a time."""
    rows, k = max(1, _SLICE // max(1, x.shape[-1])), x.shape[-1]
    parts = [[None] * -(-len(weight) // rows) if each is None else each.split(rows) for each in (zero, bias)]
    slices = zip(weight.split(rows), scale.split(rows), *parts, strict=True)
    return torch.cat([F.linear(x, dequantised(w, s, z, k, bits, block), b) for w, s, z, b in slices], -1)


def _activation_backward(grad: Tensor, before: Callable[[], Tensor], y: Tensor, activation: str) -> Tensor:
    """Returns the gradient of the value before an activation, which `before` computes; y is behind it."""
    if activation == "none":
        return grad
    if activation == "relu":
        return functions["relu_backward"](grad, y)
    if activation == "silu":
        return functions["silu_backward"](grad, before())
    return functions["gelu_backward"](grad, before(), "tanh" if activation == "gelu_tanh" else "none")


def _product_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layout: str, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias, given that of the product."""
    rows, columns = _normed(x, rms_eps).reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    is_nk = layout == "nk"
    of_x = grad @ (weight if is_nk else weight.mT)
    return (
        functions["rms_norm_backward"](of_x, x, eps=rms_eps)[0] if rms_eps > 0 else of_x,
        columns.mT @ rows if is_nk else rows.mT @ columns,
        None if bias is None else columns.sum(0),
    )


def _linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    activation: str,
    layout: str,
    rms_eps: float,
) -> tuple[Tensor | None, ...]:
    def before() -> Tensor:
        return functions["linear"](x, weight, bias, residual, "none", layout, rms_eps=rms_eps)

    inner = _activation_backward(grad, before, y, activation)
    return *_product_backward(inner, x, weight, bias, layout, rms_eps), inner


def _linear_swiglu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: _Maybe, activation: str, layout: str, rms_eps: float
) -> tuple[Tensor | None, ...]:
    packed = functions["linear"](x, weight, bias, None, "none", layout, rms_eps=rms_eps)
    if activation == "silu":
        inner = functions["swiglu_packed_backward"](grad, packed)
    else:
        gate, others = packed.chunk(2, -1)
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        active = functions["gelu"](gate, approximate)
        inner = torch.cat([functions["gelu_backward"](grad * others, gate, approximate), grad * active], -1)
    return _product_backward(inner, x, weight, bias, layout, rms_eps)


CPU_FUNCTIONS["linear"] = _on_cpu
CPU_FUNCTIONS["linear_swiglu"] = _swiglu_on_cpu
CPU_FUNCTIONS["linear_fp8"] = _float8_on_cpu
CPU_FUNCTIONS["linear_w8"] = lambda x, weight, scale, bias, residual, activation, rms_eps, few_rows: (
    _activated(_w8_product(x, weight, scale, bias, rms_eps), residual, activation)
)
CPU_FUNCTIONS["linear_w8_swiglu"] = lambda x, weight, scale, bias, activation, rms_eps, few_rows: _gated(
    _w8_product(x, weight, scale, bias, rms_eps), activation
)
for table in (CPU_FUNCTIONS, SECOND_DERIVATIVES):  # which torch differentiates
    table["linear_q"] = lambda x, weight, scale, zero, bias, residual, bits, block, activation, invariant: (
        _activated(_quantised_product(x, weight, scale, zero, bias, bits, block), residual, activation)
    )
    table["linear_q_swiglu"] = lambda x, weight, scale, zero, bias, bits, block, activation, invariant: (
        _gated(_quantised_product(x, weight, scale, zero, bias, bits, block), activation)
    )
DERIVATIVES["linear"] = _linear_backward
DERIVATIVES["linear_swiglu"] = _linear_swiglu_backward
