"""`attention_packed` in torch: what it runs on CPU tensors, and its derivative, in torch's operators."""

import torch
from torch import Tensor

from twinop.errors import RecordError
from twinop.libraries.declare import CPU_FUNCTIONS, DERIVATIVES

from .rules import sum_to


def _by_head(
    qkv: Tensor, bias: Tensor | None, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q times the scale, k and v, [B, H, S, D], and the weights."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    q = q * (scale or q.shape[-1] ** -0.5)
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return q, k, v, scores.softmax(-1)


def _on_cpu(qkv: Tensor, bias: Tensor | None, *, heads: int, scale: float, causal: bool) -> Tensor:
    sizes = {"sequences": qkv.shape[0], "heads": heads, "queries": qkv.shape[1]}
    for given, (name, size) in zip([] if bias is None else bias.shape, sizes.items(), strict=False):
        if given not in (1, size):
            raise RecordError(f"bias is for {given} {name}; expected 1, for all, or {size}")
    *_, v, weights = _by_head(qkv, bias, heads, scale, causal)
    return (weights @ v).transpose(1, 2).flatten(2)


def _backward(
    grad: Tensor, qkv: Tensor, bias: Tensor | None, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor | None]:
    wide = qkv.dtype if qkv.dtype == torch.float64 else torch.float32
    q, k, v, weights = _by_head(qkv.to(wide), bias, heads, scale, causal)
    grad_y = grad.to(wide).unflatten(-1, (heads, -1)).transpose(1, 2)
    grad_weights = grad_y @ v.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    grad_q = grad_scores @ k * (scale or q.shape[-1] ** -0.5)
    parts = torch.stack((grad_q, grad_scores.mT @ q, weights.mT @ grad_y))
    grad_qkv = parts.permute(1, 3, 0, 2, 4).flatten(2).to(qkv.dtype)
    return grad_qkv, None if bias is None else sum_to(grad_scores, bias.shape).to(bias.dtype)


CPU_FUNCTIONS["attention_packed"] = _on_cpu
DERIVATIVES["attention_packed"] = _backward
