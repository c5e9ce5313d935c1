"""The derivative of `attention_packed`, in torch's operators: the weights are computed again."""

import torch
from torch import Tensor

from twinop.declare import DERIVATIVES

from .rules import sum_to


def _backward(
    grad: Tensor, qkv: Tensor, bias: Tensor | None, heads: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor | None]:
    wide = qkv.dtype if qkv.dtype == torch.float64 else torch.float32
    q, k, v = qkv.to(wide).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    scale = scale or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    grad_y = grad.to(wide).unflatten(-1, (heads, -1)).transpose(1, 2)
    grad_weights = grad_y @ v.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    parts = torch.stack((grad_scores @ k * scale, grad_scores.mT @ q * scale, weights.mT @ grad_y))
    grad_qkv = parts.permute(1, 3, 0, 2, 4).flatten(2).to(qkv.dtype)
    return grad_qkv, None if bias is None else sum_to(grad_scores, bias.shape).to(bias.dtype)


def register_attention_rules() -> None:
    """Registers the derivative."""
    DERIVATIVES["attention_packed"] = _backward
