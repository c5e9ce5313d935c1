"""Three kernels of the package liger_kernel, taken as they are."""

import torch
import triton
from liger_kernel.ops.layer_norm import _layer_norm_forward_kernel
from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel
from liger_kernel.ops.swiglu import _swiglu_forward_kernel_tiled
from liger_kernel.ops.utils import calculate_settings

import twinop


def row_samples(inputs):
    def samples(dtype, size):
        if size:  # ONNX's LayerNormalization takes no empty rows
            yield (torch.randn(3, size).to(dtype), *(torch.randn(size).to(dtype) for _ in range(inputs - 1)))

    return samples


@twinop.triton_op(
    "liger_rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor",
    body=lambda x, weight, *, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
    samples=row_samples(2),
)
def liger_rms_norm(x, weight, *, eps):
    n_rows, n_cols = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    block, num_warps = calculate_settings(n_cols)
    _rms_norm_forward_kernel[(n_rows,)](
        y, y.stride(0), x, x.stride(0), weight, weight.stride(0), rstd, rstd.stride(0), n_cols, eps, 0.0,
        casting_mode=0, elementwise_affine=True, BLOCK_SIZE=block, num_warps=num_warps,
    )  # fmt: skip
    return y


def layer_norm_body(x, weight, bias, *, eps):
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, mean.squeeze(-1), rstd.squeeze(-1)


@twinop.triton_op(
    "liger_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-5)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    body=layer_norm_body,
    samples=row_samples(3),
)
def liger_layer_norm(x, weight, bias, *, eps):
    n_rows, n_cols = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block, num_warps = calculate_settings(n_cols)
    _layer_norm_forward_kernel[(n_rows,)](
        y, y.stride(0), x, x.stride(0), weight, weight.stride(0), bias, bias.stride(0),
        mean, mean.stride(0), rstd, rstd.stride(0), n_cols, eps, BLOCK_SIZE=block, num_warps=num_warps,
    )  # fmt: skip
    return y, mean, rstd


def swiglu_samples(dtype, size):
    yield torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype)


@twinop.triton_op(
    "liger_swiglu(Tensor gate, Tensor up) -> Tensor",
    body=lambda gate, up: torch.nn.functional.silu(gate) * up,
    samples=swiglu_samples,
)
def liger_swiglu(gate, up):
    n_rows, n_cols = gate.shape
    y = torch.empty_like(gate)
    grid = (n_rows, triton.cdiv(n_cols, 1024))
    _swiglu_forward_kernel_tiled[grid](gate, up, y, gate.stride(0), 1.0, n_cols, BLOCK_SIZE=1024, num_warps=4)
    return y
