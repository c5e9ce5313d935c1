"""Derivatives of norms that formulas of a record do not express: of a batch's scale, of a table's rows."""

import torch
from torch import Tensor

from twinop.libraries.declare import DERIVATIVES

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


DERIVATIVES["ada_layer_norm"] = _ada_layer_norm_backward
DERIVATIVES["embed_layer_norm"] = _embed_layer_norm_backward
