"""Errors in units of the last place, for tests of the maths alone."""

import torch
from torch import Tensor


def units(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The size of the last place of numbers of a type."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny))[1]
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def errors(result: Tensor, exact: Tensor, dtype: torch.dtype, unit: Tensor | None = None) -> Tensor:
    """In units of the last place; infinite where one is NaN and the other is not."""
    result = result.cpu().double()
    error = (result - exact).abs() / (units(exact, dtype) if unit is None else unit)
    overflow = result.isinf() & (exact.abs() >= torch.finfo(dtype).max) & (result.sign() == exact.sign())
    same = (result == exact) | (result.isnan() & exact.isnan()) | overflow
    return error.nan_to_num(torch.inf).masked_fill(same, 0)
