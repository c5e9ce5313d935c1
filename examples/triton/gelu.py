"""GELU with the error function, and its backward as a second kernel."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + offsets, y, mask=offsets < n)


@triton.jit
def gelu_backward_kernel(grad_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    tl.store(out_ptr + offsets, grad * (cdf + x * pdf), mask=offsets < n)


@twinop.triton_op(
    "gelu_backward(Tensor grad_y, Tensor x) -> Tensor", body=torch.ops.aten.gelu_backward.default
)
def gelu_backward(grad_y, x):
    grad_x = torch.empty_like(x)
    gelu_backward_kernel[(triton.cdiv(x.numel(), 1024),)](grad_y, x, grad_x, x.numel(), BLOCK=1024)
    return grad_x


@twinop.triton_op("gelu(Tensor x) -> Tensor", body=torch.nn.functional.gelu, backward=gelu_backward)
def gelu(x):
    y = torch.empty_like(x)
    gelu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
