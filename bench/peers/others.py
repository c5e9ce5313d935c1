"""Peers from Liger, quack and flashinfer, which are imported when they are called."""

from torch import Tensor

# ------------------------------------------------------------------------------- Liger


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


# ------------------------------------------------------------------------------- quack, flashinfer


def quack_softmax(x: Tensor) -> Tensor:
    from quack.softmax import softmax

    return softmax(x)


def quack_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=1e-6)


def quack_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=1e-6, prenorm=True)


def flashinfer_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, weight, eps=1e-6)


def flashinfer_silu_and_mul(x: Tensor) -> Tensor:
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(x)
