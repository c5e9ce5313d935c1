"""Liger-Kernel's functions (Triton), with the gradients in tensors of their own where it offers that."""

from liger_kernel.ops import (
    LigerFusedAddRMSNormFunction,
    LigerLayerNormFunction,
    LigerRMSNormFunction,
    LigerSiLUMulFunction,
    LigerSoftmaxFunction,
)
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    return LigerSoftmaxFunction.apply(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return LigerSiLUMulFunction.apply(gate, x)


def swiglu_packed(x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # Liger >= 0.8

    return LigerFusedGateUpSiLUMulFunction.apply(x, False)
