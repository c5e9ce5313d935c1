"""torch.nn modules over the ops, with the constructors and the state of torch.nn's own.

Each is a subclass of its counterpart in torch.nn: same arguments, same parameters, same `state_dict`, and
`isinstance` still says what it is. `inplace=True` is accepted and computed out of place.
"""

from typing import Any

import torch
from torch import nn

from .registry import functions


class CustomReLU(nn.Module):
    """ReLU through `custom_domain::relu`: y = max(x, 0), NaN stays NaN.

    Shape: any; output as the input. Dtypes: float32, float16, bfloat16, float64.

    Args:
        variant: the CUDA kernel: "auto" (fastest), or "scalar" and "vec4" to study; all give the same bits.
    """

    variant = "auto"

    def __init__(self, variant: str = "auto") -> None:
        super().__init__()
        self.variant = variant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["relu"](x, self.variant)

    def extra_repr(self) -> str:
        return "" if self.variant == "auto" else f"variant={self.variant!r}"


class CustomGELU(nn.GELU):
    """GELU, exact ("none") or by tanh ("tanh")."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["gelu"](x, self.approximate)


class CustomSiLU(nn.SiLU):
    """SiLU (swish): x * sigmoid(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["silu"](x)


class CustomSigmoid(nn.Sigmoid):
    """1 / (1 + exp(-x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["sigmoid"](x)


class CustomTanh(nn.Tanh):
    """tanh(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["tanh"](x)


class CustomSoftplus(nn.Softplus):
    """log(1 + exp(x)), everywhere: torch's threshold, from which it returns x, is not needed.

    Raises:
        ValueError: beta is not 1.
    """

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        if beta != 1:
            raise ValueError(f"CustomSoftplus: beta is {beta}, expected 1; write softplus(beta * x) / beta")
        super().__init__(beta, threshold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["softplus"](x)


class CustomSoftmax(nn.Softmax):
    """Softmax over `dim`, the last dimension unless given (nn.Softmax guesses one from the rank)."""

    dim: int

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["softmax"](x, self.dim)


class CustomLayerNorm(nn.LayerNorm):
    """Layer normalization over the last `len(normalized_shape)` dimensions.

    The weights may be float32 beside float16 or bfloat16 activations.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = _first_axis(self, x)
        return functions["layer_norm"](x, self.weight, self.bias, axis, self.eps)


class CustomRMSNorm(nn.RMSNorm):
    """RMS normalization over the last `len(normalized_shape)` dimensions.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight), rounded once, at the end. (Llama also rounds
    before it multiplies by the weight.)

    Args:
        eps: None as in torch: the machine epsilon of the type that computes (float32 for 16-bit inputs).
        offset: 0, or 1 for Gemma's convention, where the weight starts at zero.
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
        axis = _first_axis(self, x)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return functions["rms_norm"](x, self.weight, axis, eps, self.offset)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


def _first_axis(norm: nn.LayerNorm | nn.RMSNorm, x: torch.Tensor) -> int:
    """The axis, from the end, where the normalized dimensions begin."""
    axis = -len(norm.normalized_shape)
    # With a weight the op compares the shapes itself.
    if norm.weight is None and tuple(x.shape[axis:]) != tuple(norm.normalized_shape):
        raise RuntimeError(
            f"{type(norm).__name__}: the input has shape {list(x.shape)}, expected one that ends in "
            f"normalized_shape = {list(norm.normalized_shape)}"
        )
    return axis


class CustomSwiGLU(nn.Module):
    """silu(gate) * x; with one argument, of 2n columns: the gate is the first n."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return functions["swiglu_packed"](x) if gate is None else functions["swiglu"](x, gate)


class CustomGatedMLP(nn.Module):
    """Llama's MLP: down_proj(silu(gate_proj(x)) * up_proj(x)), with its names.

    Args:
        hidden_size: columns of the input and the output.
        intermediate_size: columns between.
        bias: whether the projections have one.
    """

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
