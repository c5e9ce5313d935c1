"""Rows written into a cache, in its own memory: `Tensor(a!)`."""

import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def put_kernel(cache_ptr, rows_ptr, position_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(position_ptr + row)
    values = tl.load(rows_ptr + row * n_cols + columns, mask=columns < n_cols)
    tl.store(cache_ptr + to * n_cols + columns, values, mask=columns < n_cols)


def samples(dtype, size):
    for rows in (1, 3):
        position = torch.randperm(8)[:rows]
        yield torch.randn(8, size).to(dtype), torch.randn(rows, size).to(dtype), position


@twinop.triton_op(
    "put_rows(Tensor(a!) cache, Tensor rows, Tensor position) -> ()",
    body=lambda cache, rows, position: cache.index_copy(0, position, rows),
    backward=lambda grad, position: (grad.index_fill(0, position, 0), grad.index_select(0, position), None),
    dtypes=("float32 position=int64", "float16 position=int64"),
    input_shapes="rows = [position[0], cache[1]]; position = [position[0]]",
    samples=samples,
)
def put_rows(cache, rows, position):
    n_rows, n_cols = rows.shape
    put_kernel[(n_rows, triton.cdiv(n_cols, 256))](cache, rows, position, n_cols, BLOCK=256)
