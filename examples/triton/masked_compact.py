"""The elements of x where a mask is true, x[mask]: an output whose size comes from the data."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def count_kernel(mask_ptr, found_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(mask_ptr + offsets, mask=offsets < n, other=0)
    tl.store(found_ptr + block, tl.sum((mask != 0).to(tl.int64)))


@triton.jit
def compact_kernel(x_ptr, mask_ptr, found_ptr, y_ptr, count_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int64)
    for first in range(0, block, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        before += tl.load(found_ptr + blocks, mask=blocks < block, other=0)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(mask_ptr + offsets, mask=offsets < n, other=0) != 0
    places = tl.sum(before) + tl.cumsum(mask.to(tl.int64)) - 1
    tl.store(y_ptr + places, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    if block == tl.num_programs(0) - 1:
        tl.store(count_ptr, tl.sum(before) + tl.sum(mask.to(tl.int64)))


def backward(grad, x, mask):
    return torch.zeros_like(x).masked_scatter(mask, grad), None


def samples(dtype, size):
    for share in (0.5, 0.0, 1.0):
        yield torch.randn(3, size).to(dtype), torch.rand(3, size) < share


@twinop.triton_op(
    "masked_compact(Tensor x, Tensor mask) -> Tensor",
    body=lambda x, mask: x[mask],
    backward=backward,
    dtypes=("float32 mask=bool", "float16 mask=bool", "bfloat16 mask=bool"),
    input_shapes="mask = x",
    sizes="n <= numel(x)",
    shapes="y = [n]",
    samples=samples,
)
def masked_compact(x, mask):
    n = x.numel()
    blocks = triton.cdiv(n, 1024)
    y = x.new_empty(n)  # as large as it can be
    found = torch.empty(blocks, dtype=torch.int64, device=x.device)
    count = torch.zeros(1, dtype=torch.int64, device=x.device)
    count_kernel[(blocks,)](mask, found, n, BLOCK=1024)
    compact_kernel[(blocks,)](x, mask, found, y, count, n, BLOCK=1024)
    return y, count
