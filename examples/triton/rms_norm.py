"""RMS normalisation over the last dimension, for tensors of any rank."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n_cols
    x = tl.load(x_ptr + row * n_cols + columns, mask=mask, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * n_cols + columns, x * scale * weight, mask=mask)


def samples(dtype, size):
    yield torch.randn(2, 3, size).to(dtype), torch.randn(size).to(dtype)


@twinop.triton_op(
    "rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor",
    body=lambda x, weight, *, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
    samples=samples,
)
def rms_norm(x, weight, *, eps):
    n_cols = x.shape[-1]
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(n_cols)
    rms_norm_kernel[(x.numel() // n_cols,)](
        x, weight, y, n_cols, eps, BLOCK=BLOCK, num_warps=min(max(BLOCK // 256, 1), 16)
    )
    return y
