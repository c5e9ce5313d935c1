"""What every op means, in fp64, and how far from that a result may be.

An error is counted in units of the last place: |result - exact| / (eps of the dtype * magnitude). The
magnitude is |exact|, or where the inputs cancel, as in x - mean, that of what cancels. A new record without
an entry fails `test_every_op_has_a_reference`. `ulps.py` measures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Results = Tensor | tuple[Tensor, ...]

# A value that is rounded once has an error of half a unit; what fp32 adds to that is small in 16 bits.
ONE_ROUNDING = 0.51


@dataclass(frozen=True)
class Reference:
    """
    Attributes:
        compute: the op on fp64 tensors. Differentiable, so that it says what the backward op means as well.
        ulps: largest error by dtype: kernels, whichever device.
        body_ulps: the same for the function body in ONNX Runtime, whose errors are absolute below 1.
        gradient_ulps: of a gradient, against the largest of its kind; by dtype.
        magnitude: of each output, where |exact| is not what an error is measured by.
        stored: compute takes `stored`, the dtype in which the op rounds an intermediate result.
    """

    compute: Callable[..., Results]
    ulps: dict[str, float]
    body_ulps: float = 8
    gradient_ulps: float = 16
    magnitude: Callable[..., Results] | None = None
    stored: bool = False


def ulps(float32: float, float64: float | None = None, half: float = ONE_ROUNDING) -> dict[str, float]:
    return {"float32": float32, "float64": float64 or float32, "float16": half, "bfloat16": half}


def narrow(number: float) -> float:
    """ONNX's float attributes are fp32, and so are twinop's."""
    return float(np.float32(number))


# ---------------------------------------------------------------------------- ops


def _relu(x: Tensor, variant: str = "auto") -> Tensor:
    return torch.where(x < 0, torch.zeros_like(x), x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        # As a sigmoid: 1 + tanh(u) would cancel where u is negative.
        return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    argument = x * -(0.5**0.5)
    # The far tail of erfc multiplies the argument's rounding by x^2: taken off again.
    with np.errstate(invalid="ignore"):  # infinities
        lost = (
            -x.detach().numpy().astype(np.longdouble) / np.sqrt(np.longdouble(2)) - argument.detach().numpy()
        )
    slope = -2 / torch.pi**0.5 * torch.exp(-(argument**2))
    rest = torch.from_numpy(np.asarray(lost, dtype=np.float64)).to(x.dtype).nan_to_num(0, 0, 0)
    return x * 0.5 * (torch.erfc(argument) + (slope * rest).detach())


# Below it a factor such as sigmoid(x) has lost digits, or is 0, where the kernel computes in fp32.
TINY = torch.finfo(torch.float32).tiny


def _gelu_magnitude(x: Tensor, approximate: str = "none") -> Tensor:
    return _gelu(x, approximate).abs() + TINY * x.abs()


def _silu_magnitude(x: Tensor) -> Tensor:
    return F.silu(x).abs() + TINY * x.abs()


def _swiglu_magnitude(x: Tensor, gate: Tensor) -> Tensor:
    return _silu_magnitude(gate) * x.abs() + TINY * x.abs()


def _swiglu_packed_magnitude(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return _swiglu_magnitude(value, gate)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * x


def _swiglu_packed(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return _swiglu(value, gate)


def _softmax(x: Tensor, dim: int = -1) -> Tensor:
    return x.softmax(dim)


def _softmax_magnitude(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) turns the absolute error of x - max into a relative one."""
    if x.numel() == 0:
        return x
    return x.softmax(dim) * (1 + (x.amax(dim, keepdim=True) - x).nan_to_num(0, 0, 0))


def _behind(x: Tensor, axis: int) -> list[int]:
    return list(range(axis % max(x.dim(), 1) - x.dim(), 0))


def _mean(x: Tensor, dims: list[int]) -> Tensor:
    return x.mean(dims, keepdim=True) if dims and x.numel() else x


def _layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    dims = _behind(x, axis)
    centred = x - _mean(x, dims)
    return _affine(centred / (_mean(centred**2, dims) + narrow(eps)).sqrt(), weight, bias)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * weight
    return y if bias is None else y + bias


def _layer_norm_magnitude(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    """The mean's error is one of the row's size; the rest is relative."""
    dims = _behind(x, axis)
    centred = x - _mean(x, dims)
    size = centred.abs() + _mean(x**2, dims).sqrt()
    normal = size / (_mean(centred**2, dims) + narrow(eps)).sqrt()
    return _affine(normal, None if weight is None else weight.abs(), None if bias is None else bias.abs())


def _rms_norm(
    x: Tensor, weight: Tensor | None = None, axis: int = -1, eps: float = 1e-6, offset: int = 0
) -> Tensor:
    normal = x / (_mean(x**2, _behind(x, axis)) + narrow(eps)).sqrt()
    return normal if weight is None else normal * (offset + weight)


def _rms_norm_magnitude(
    x: Tensor, weight: Tensor | None = None, axis: int = -1, eps: float = 1e-6, offset: int = 0
) -> Tensor:
    return _rms_norm(x.abs(), None if weight is None else weight.abs(), axis, eps, offset)


def _rounded(x: Tensor, stored: torch.dtype) -> Tensor:
    """Rounded, with the derivative of the unrounded."""
    return x + (x.to(stored).to(x.dtype) - x).nan_to_num(0, 0, 0).detach()


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    stored: torch.dtype,
) -> tuple[Tensor, Tensor]:
    total = _rounded(x + residual, stored)
    return _layer_norm(total, weight, bias, -1, eps), total


def _add_layer_norm_magnitude(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _layer_norm_magnitude(total, weight, bias, -1, eps), total.abs()


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    offset: int = 0,
    *,
    stored: torch.dtype,
) -> tuple[Tensor, Tensor]:
    total = _rounded(x + residual, stored)
    return _affine(_rms_norm(total, weight, -1, eps, offset), None, bias), total


def _add_rms_norm_magnitude(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    normal = _rms_norm_magnitude(total, weight, -1, eps, offset)
    return _affine(normal, None, None if bias is None else bias.abs()), total.abs()


def _matmul(a: Tensor, b: Tensor, variant: str = "tiled", tile: int = 0) -> Tensor:
    return a @ b


def _matmul_magnitude(a: Tensor, b: Tensor, variant: str = "tiled", tile: int = 0) -> Tensor:
    return a.abs() @ b.abs()


def _pad_affine(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 0.1,
    sign: str = "plus",
    pads: tuple[int, ...] = (0, 1),
) -> Tensor:
    y = narrow(scale) * x if weight is None else narrow(scale) * x * weight
    if bias is not None:
        y = y + bias if sign == "plus" else y - bias
    return F.pad(y, list(pads))


def _pad_affine_magnitude(x: Tensor, weight: Any = None, bias: Any = None, **attributes: Any) -> Tensor:
    size = {"weight": weight, "bias": bias}
    size = {name: None if t is None else t.abs() for name, t in size.items()}
    return _pad_affine(x.abs(), **size, **attributes | {"sign": "plus"})


def _double_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * x, x.sum(-1)


REFERENCES: dict[str, Reference] = {
    "relu": Reference(_relu, ulps(0, 0, 0), body_ulps=0, gradient_ulps=0),
    "gelu": Reference(_gelu, ulps(6.5, 8, half=0.6), magnitude=_gelu_magnitude),
    "silu": Reference(F.silu, ulps(3, 4), magnitude=_silu_magnitude),
    "sigmoid": Reference(torch.sigmoid, ulps(2, 3)),
    "tanh": Reference(torch.tanh, ulps(2, 3)),
    "softplus": Reference(_softplus, ulps(2, 3)),
    "exp": Reference(torch.exp, ulps(2, 3)),
    "log": Reference(torch.log, ulps(2, 3)),
    "square": Reference(torch.square, ulps(ONE_ROUNDING), body_ulps=1),
    "add": Reference(torch.add, ulps(ONE_ROUNDING), body_ulps=1),
    "mul": Reference(torch.mul, ulps(ONE_ROUNDING), body_ulps=1),
    "pow": Reference(torch.pow, ulps(4, 4)),
    "swiglu": Reference(_swiglu, ulps(4, 5), magnitude=_swiglu_magnitude),
    "swiglu_packed": Reference(_swiglu_packed, ulps(4, 5), magnitude=_swiglu_packed_magnitude),
    "softmax": Reference(_softmax, ulps(4), magnitude=_softmax_magnitude),
    # Rows of thousands of equal values, whose roundings all go one way; others stay below 3. Bodies: ONNX
    # Runtime adds rows up in order.
    "layer_norm": Reference(_layer_norm, ulps(16), body_ulps=32, magnitude=_layer_norm_magnitude),
    "rms_norm": Reference(_rms_norm, ulps(16), body_ulps=32, magnitude=_rms_norm_magnitude),
    "add_layer_norm": Reference(
        _add_layer_norm, ulps(16), body_ulps=32, magnitude=_add_layer_norm_magnitude, stored=True
    ),
    "add_rms_norm": Reference(
        _add_rms_norm, ulps(16), body_ulps=32, magnitude=_add_rms_norm_magnitude, stored=True
    ),
    # A sum's bound is a unit for each of its terms, here up to 257; random ones reach few.
    "matmul": Reference(_matmul, ulps(8), magnitude=_matmul_magnitude),
    # Its gradient's formula computes in 16 bits, also that of an fp32 weight.
    "pad_affine": Reference(_pad_affine, ulps(2, 2), gradient_ulps=2**16, magnitude=_pad_affine_magnitude),
    "double_and_sum": Reference(
        _double_and_sum, ulps(4), magnitude=lambda x: (2 * x.abs(), x.abs().sum(-1)), body_ulps=257
    ),
}
