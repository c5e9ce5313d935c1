"""Peers in Triton, as its tutorials write them: elementwise, fused softmax, layer norm."""

import torch
import triton
import triton.language as tl

# ------------------------------------------------------------------------------- a program per block

BLOCK = 1024


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


def _launch(kernel, x: torch.Tensor) -> torch.Tensor:
    y, n = torch.empty_like(x), x.numel()
    kernel[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK)
    return y


def gelu(x: torch.Tensor) -> torch.Tensor:
    return _launch(_gelu, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _launch(_gelu_tanh, x)


# ------------------------------------------------------------------------------- a program per row


@triton.jit
def _softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * n + columns, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def _layer_norm(x_ptr, weight_ptr, bias_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=mask, other=0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / n, 0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    weight = tl.load(weight_ptr + columns, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * n + columns, centred * rstd * weight + bias, mask=mask)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=mask, other=0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n + eps)
    weight = tl.load(weight_ptr + columns, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * n + columns, x * rstd * weight, mask=mask)


def _settings(columns: int) -> dict[str, int]:
    """Returns one block for the whole row, and more warps for longer rows."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 4), 32)}


def softmax(x: torch.Tensor) -> torch.Tensor:
    y, (rows, columns) = torch.empty_like(x), x.shape
    _softmax[(rows,)](x, y, columns, **_settings(columns))
    return y


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y, (rows, columns) = torch.empty_like(x), x.shape
    _layer_norm[(rows,)](x, weight, bias, y, columns, 1e-5, **_settings(columns))
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, (rows, columns) = torch.empty_like(x), x.shape
    _rms_norm[(rows,)](x, weight, y, columns, 1e-6, **_settings(columns))
    return y
