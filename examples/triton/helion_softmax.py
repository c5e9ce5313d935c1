"""Softmax of a sum, in Helion, which writes the Triton code: one kernel for rows of any length."""

import helion
import helion.language as hl
import torch

import twinop


@helion.kernel(config=helion.Config(block_sizes=[1, 1024, 1024, 1024]), static_shapes=False)
def add_softmax_kernel(x, residual):
    m, n = x.size()
    y = torch.empty_like(x)
    for rows in hl.tile(m):
        largest = hl.full([rows], float("-inf"), dtype=torch.float32)
        for cols in hl.tile(n):
            both = x[rows, cols].to(torch.float32) + residual[rows, cols].to(torch.float32)
            largest = torch.maximum(largest, both.amax(1))
        total = hl.zeros([rows], dtype=torch.float32)
        for cols in hl.tile(n):
            both = x[rows, cols].to(torch.float32) + residual[rows, cols].to(torch.float32)
            total += torch.exp(both - largest[:, None]).sum(1)
        for cols in hl.tile(n):
            both = x[rows, cols].to(torch.float32) + residual[rows, cols].to(torch.float32)
            y[rows, cols] = (torch.exp(both - largest[:, None]) / total[:, None]).to(x.dtype)
    return y


def samples(dtype, size):
    for rows in (1, 3):  # Helion writes other code for sizes of 1
        yield torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)


@twinop.triton_op(
    "add_softmax(Tensor x, Tensor residual) -> Tensor",
    body=lambda x, residual: torch.softmax(x + residual, dim=-1),
    samples=samples,
    input_shapes="residual = x",
)
def add_softmax(x, residual):
    return add_softmax_kernel(x, residual)
