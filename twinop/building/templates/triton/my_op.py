"""The op my_op: x * x, element by element. Its kernel is written in Triton."""

import torch
import triton
import triton.language as tl

import twinop

library_path = twinop.library_beside(__file__)


@triton.jit
def my_op_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    tl.store(y_ptr + offsets, x * x, mask=offsets < n)


# body: what the op means. backward: the gradient of x.
@twinop.triton_op("my_op(Tensor x) -> Tensor", body=torch.square, backward=lambda grad, x: 2 * grad * x)
def my_op(x):
    y = torch.empty_like(x)
    my_op_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
