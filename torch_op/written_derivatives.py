"""Derivatives of norms and attention that formulas of a record do not express; attention on CPU tensors."""

import torch
from torch import Tensor

from twinop.errors import RecordError
from twinop.libraries.declare import CPU_FUNCTIONS, DERIVATIVES

from .registry import functions
from .rules import sum_to


def _ada_layer_norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, y: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    between = tuple(range(1, x.dim() - 1))  # the dimensions that share scale and shift
    normal = functions["layer_norm"](x.to(scale.dtype), None, None, -1, eps)
    scaled = grad * (1 + scale.reshape(scale.shape[0], *[1] * len(between), scale.shape[-1]))
    grad_x, _, _ = functions["layer_norm_backward"](scaled.to(x.dtype), x, None, None, None, -1, eps)

    def sum_of_batch(each: Tensor) -> Tensor:
        each = each.to(scale.dtype)
        return each.sum(between) if between else each

    return grad_x, sum_of_batch(grad * normal), sum_of_batch(grad)


def _embed_layer_norm_backward(
    grad_y: Tensor,
    grad_sum: Tensor,
    table: Tensor,
    ids: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    sum: Tensor,
    eps: float,
) -> tuple[Tensor | None, ...]:
    grad, grad_weight, grad_bias = functions["layer_norm_backward"](
        grad_y, sum, weight, bias, grad_sum, -1, eps
    )
    wide = grad if grad.dtype == torch.float64 else grad.float()  # many terms may meet in one row
    entries = table.shape[0]
    has_row = ((ids >= -entries) & (ids < entries)).unsqueeze(-1)  # else the result is NaN
    of_ids = torch.where(has_row, wide, 0).flatten(0, 1)
    of_table = torch.zeros_like(table, dtype=wide.dtype)
    of_table = of_table.index_add(0, ids.flatten() % entries, of_ids).to(table.dtype)
    of_rows = sum_to(wide, rows.shape).to(rows.dtype)
    return of_table, None, of_rows, grad_weight, grad_bias if bias is not None else None


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


def _attention_on_cpu(qkv: Tensor, bias: Tensor | None, *, heads: int, scale: float, causal: bool) -> Tensor:
    sizes = {"sequences": qkv.shape[0], "heads": heads, "queries": qkv.shape[1]}
    for given, (name, size) in zip([] if bias is None else bias.shape, sizes.items(), strict=False):
        if given not in (1, size):
            raise RecordError(f"bias is for {given} {name}; expected 1, for all, or {size}")
    *_, v, weights = _by_head(qkv, bias, heads, scale, causal)
    return (weights @ v).transpose(1, 2).flatten(2)


def _attention_backward(
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


CPU_FUNCTIONS["attention_packed"] = _attention_on_cpu
DERIVATIVES["attention_packed"] = _attention_backward
DERIVATIVES["ada_layer_norm"] = _ada_layer_norm_backward
DERIVATIVES["embed_layer_norm"] = _embed_layer_norm_backward
