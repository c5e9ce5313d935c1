"""The smallest op: x * x."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * x, mask=offsets < n)


@twinop.triton_op("square(Tensor x) -> Tensor", body=torch.square, backward=lambda grad, x: 2 * grad * x)
def square(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
