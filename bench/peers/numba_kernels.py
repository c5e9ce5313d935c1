"""Kernels in numba.cuda: one thread per element. It reads torch's tensors in place, but knows no bfloat16."""

import numpy as np
import torch

if not hasattr(np, "row_stack"):  # gone in NumPy 2.5; numba-cuda of before that names it when imported
    np.row_stack = np.vstack

from numba import cuda

THREADS = 256


@cuda.jit
def _square(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * x[i]


def square(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bfloat16:
        raise TypeError("numba has no bfloat16 arrays")
    y = torch.empty_like(x)
    blocks = (x.numel() + THREADS - 1) // THREADS
    stream = cuda.external_stream(torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0
    arrays = [cuda.as_cuda_array(t.detach(), sync=False) if t.is_cuda else t.numpy() for t in (x, y)]
    _square[blocks, THREADS, stream](*arrays)
    return y
