"""Peers from Liger, which is imported when they are called."""

from torch import Tensor


def liger_softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # The last argument keeps the gradients out of the inputs' memory.
    return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)


def liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)


def liger_swiglu(x: Tensor, gate: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, x)


def liger_swiglu_packed(x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # Liger >= 0.8

    return LigerFusedGateUpSiLUMulFunction.apply(x, False)
