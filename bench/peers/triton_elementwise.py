"""Elementwise kernels in Triton, as its first tutorial (vector addition) writes them."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _square(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, x * x, mask=mask)


@triton.jit
def _gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)), mask=mask)


@triton.jit
def _gelu_tanh(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + offsets, x * tl.sigmoid(2 * inner), mask=mask)  # (1 + tanh(u)) / 2 = sigmoid(2u)


@triton.jit
def _swiglu(x_ptr, gate_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, gate * tl.sigmoid(gate) * x, mask=mask)


def _launch(kernel, *inputs: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(inputs[0])
    n = y.numel()
    kernel[(triton.cdiv(n, BLOCK),)](*inputs, y, n, BLOCK=BLOCK)
    return y


def square(x: torch.Tensor) -> torch.Tensor:
    return _launch(_square, x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return _launch(_gelu, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _launch(_gelu_tanh, x)


def swiglu(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return _launch(_swiglu, x, gate)
