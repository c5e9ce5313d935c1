"""Libraries that are measured where they happen to be installed: apex, quack, flashinfer."""

from torch import Tensor


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], 1e-5)


def apex_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, x.shape[-1:], 1e-6)


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
