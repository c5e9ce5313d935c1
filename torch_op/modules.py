"""torch.nn modules that compute with twinop's ops.

Most are subclasses of their counterparts in torch.nn, with the same arguments, parameters and `state_dict`.
`inplace=True` is accepted and computed out of place.
"""

from typing import Any

import torch
import torch.fx
from torch import nn

from .registry import functions


class CustomReLU(nn.ReLU):
    """Computes y = max(x, 0) in the shape and dtype of x, which is a floating one. NaN stays NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["relu"](x)


class CustomGELU(nn.GELU):
    """Computes GELU, exactly (`approximate="none"`) or in its tanh form ("tanh")."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["gelu"](x, self.approximate)


class CustomSiLU(nn.SiLU):
    """Computes SiLU (swish), x * sigmoid(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["silu"](x)


class CustomSigmoid(nn.Sigmoid):
    """Computes 1 / (1 + exp(-x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["sigmoid"](x)


class CustomTanh(nn.Tanh):
    """Computes tanh(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["tanh"](x)


class CustomSoftplus(nn.Softplus):
    """Computes log(1 + exp(x)) for every x. torch returns x above its threshold. beta must be 1."""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        if beta != 1:
            raise ValueError(f"CustomSoftplus: beta is {beta}, expected 1; write softplus(beta * x) / beta")
        super().__init__(beta, threshold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["softplus"](x)


class CustomSoftmax(nn.Softmax):
    """Computes softmax along `dim`, by default the last dimension (nn.Softmax guesses one)."""

    dim: int

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["softmax"](x, self.dim)


class CustomLayerNorm(nn.LayerNorm):
    """Normalizes over the last `len(normalized_shape)` dimensions.

    Weights may be float32 with float16 or bfloat16 activations.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = _first_axis(x, self.normalized_shape, type(self).__name__ if self.weight is None else "")
        return functions["layer_norm"](x, self.weight, self.bias, axis, self.eps)


class CustomRMSNorm(nn.RMSNorm):
    """Normalizes by the root mean square over the last `len(normalized_shape)` dimensions.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight) is rounded once, at the end. (Llama also rounds before
    it multiplies by the weight.)

    Args:
        eps: None means the machine epsilon of the compute type (float32 for 16-bit inputs), as in torch.
        offset: 0, or 1 for Gemma's convention, in which the weight starts at zero.
    """

    offset = 0

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        offset: int = 0,
    ) -> None:
        if offset not in (0, 1):
            raise ValueError(f"CustomRMSNorm: offset is {offset}, expected 0 (Llama) or 1 (Gemma)")
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.offset = offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = _first_axis(x, self.normalized_shape, type(self).__name__ if self.weight is None else "")
        eps = self.eps
        if eps is None:
            eps = _default_eps(x)
        return functions["rms_norm"](x, self.weight, axis, eps, self.offset)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


@torch.fx.wrap  # the traces of torch.fx have this call, not the comparison
def _default_eps(x: torch.Tensor) -> float:
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


@torch.fx.wrap
def _first_axis(x: torch.Tensor, normalized_shape: tuple[int, ...], unchecked: str) -> int:
    """The first normalized dimension, counted from the end. `unchecked` names a norm without a weight."""
    axis = -len(normalized_shape)
    if unchecked and tuple(x.shape[axis:]) != tuple(normalized_shape):
        raise RuntimeError(
            f"{unchecked}: the input has shape {list(x.shape)}, expected one that ends in "
            f"normalized_shape = {list(normalized_shape)}"
        )
    return axis


class CustomSwiGLU(nn.Module):
    """Computes silu(gate) * x. A single argument of 2n columns holds the gate in its first n columns."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return functions["swiglu_packed"](x) if gate is None else functions["swiglu"](x, gate)


class CustomGatedMLP(nn.Module):
    """Computes Llama's MLP, down_proj(silu(gate_proj(x)) * up_proj(x))."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functions["swiglu"](self.up_proj(x), self.gate_proj(x)))
