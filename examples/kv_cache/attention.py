"""An attention with keys turned by their positions: `forward` trains it, `step` generates with a cache.

`step` sums products in float64 and rounds once: the order of the sums, which torch and ONNX Runtime choose
themselves, is lost in the rounding, and both give the same bits.
"""

import torch
import torch.nn.functional as F
from kv_cache import append_kv, tables
from torch import Tensor, nn


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x [batch, tokens, heads, size] by the angles of its tokens [..., tokens, size / 2]."""
    a, b = x.chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for name, table in zip(("cos", "sin"), tables(longest, width // heads), strict=True):
            self.register_buffer(name, table)

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)

    def forward(self, x: Tensor) -> Tensor:
        """Attends to whole sequences, as in training. There is no cache."""
        q, k, v = self.split(self.qkv(x))
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
        """Attends from new tokens [batch, tokens, width] to the cache, into which it writes them first."""
        q, k, v = self.split(product(x, self.qkv.weight.T))
        append_kv(k_cache, v_cache, k, v, self.cos, self.sin, position)
        rows = position[:, None] + torch.arange(x.shape[1], device=x.device)
        q = turned(q, self.cos[rows], self.sin[rows])
        seen = torch.arange(k_cache.shape[1], device=x.device) <= rows[:, None, :, None]
        scores = product(q.transpose(1, 2), k_cache.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
        weights = scores.double().masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
        y = product(weights, v_cache.transpose(1, 2)).transpose(1, 2).flatten(2)
        return product(y, self.out.weight.T)


class Step(nn.Module):
    """What is exported. It returns the caches: in the file they are outputs of their own."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        return self.attention.step(x, k_cache, v_cache, position), k_cache, v_cache
