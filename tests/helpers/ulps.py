"""How far results are from the references, in units of the last place."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import op_bodies  # noqa: F401 (the test ops' bodies)
import torch
from references import ONE_ROUNDING, Results, reference_of
from rounding import RoundingOps
from torch import Tensor

from twinop import torch_op
from twinop.export.body_in_torch import evaluate_body
from twinop.record import Record

Inputs = Mapping[str, Tensor | None]

BODY_ROUNDINGS = 8
"""How many times the rounding errors of its body an op without an entry in REFERENCES may be wrong by."""


def as_tuple(results: Results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@cache
def _record(name: str) -> Record:
    return torch_op.records()[name]


def compute(
    name: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], stored: torch.dtype
) -> tuple[Tensor, ...]:
    """Computes what the op means in the dtype of the inputs; differentiable.

    Args:
        stored: the dtype of the op's own call, in which it rounds intermediate results that it stores.
    """
    reference = reference_of(name)
    if reference.compute is not None:
        return as_tuple(reference.compute(*inputs, **attributes))
    return evaluate_body(_record(name), inputs, attributes, stored)


def _widened(inputs: Inputs, dtype: torch.dtype) -> tuple[list[Tensor | None], torch.dtype]:
    """The inputs in another dtype on the CPU, and the dtype that they had."""
    first = next(t for t in inputs.values() if t is not None)
    return [None if t is None else t.cpu().to(dtype) for t in inputs.values()], first.dtype


def exact(
    name: str, inputs: Inputs, attributes: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Computes the op's results in fp64 (or another type)."""
    wide, stored = _widened(inputs, dtype)
    return compute(name, wide, attributes, stored)


def magnitudes(name: str, inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Computes what the errors of the results are measured by."""
    reference = reference_of(name)
    wide, stored = _widened(inputs, torch.float64)
    if reference.magnitude is not None:
        return as_tuple(reference.magnitude(*wide, **attributes))
    results = [result.abs() for result in compute(name, wide, attributes, stored)]
    if reference.ulps is not None:
        return tuple(results)
    bounds = evaluate_body(_record(name), wide, attributes, stored, RoundingOps)
    computed = torch.float64 if stored == torch.float64 else torch.float32
    share = BODY_ROUNDINGS / ONE_ROUNDING * torch.finfo(computed).eps / torch.finfo(stored).eps
    return tuple(
        result.nan_to_num(0) + (share * bound.error).nan_to_num(0)
        for result, bound in zip(results, bounds, strict=True)
    )


def errors_in_ulps(
    name: str,
    inputs: Inputs,
    attributes: Mapping[str, Any],
    results: Sequence[Tensor],
    smallest: float = 0.0,
) -> list[float]:
    """The largest error of each result of a call; infinite where one is NaN or infinite that should not be.

    Where fp32 arithmetic, in which most kernels compute, overflows on the way, what it gives is right too.

    Args:
        smallest: magnitudes below it count as this.
    """
    narrow_type = torch.float64 if results[0].dtype == torch.float64 else torch.float32
    truths = zip(
        exact(name, inputs, attributes),
        exact(name, inputs, attributes, narrow_type),
        magnitudes(name, inputs, attributes),
        strict=True,
    )
    return [
        error_in_ulps(result, truth, narrow_truth, magnitude.clamp(min=smallest))
        for result, (truth, narrow_truth, magnitude) in zip(results, truths, strict=True)
    ]


def error_in_ulps(result: Tensor, truth: Tensor, narrow_truth: Tensor, magnitude: Tensor) -> float:
    result = result.cpu()
    assert result.shape == truth.shape, f"{tuple(result.shape)} instead of {tuple(truth.shape)}"
    if truth.numel() == 0:
        return 0.0
    info = torch.finfo(result.dtype)
    allowed = result.isnan() & narrow_truth.isnan()
    for value in (truth.to(result.dtype), narrow_truth.to(result.dtype)):
        allowed |= (result == value) | (result.isnan() & value.isnan())
    # At the edge of overflow the next number may be infinity.
    edge = info.max * (1 - 8 * info.eps)
    allowed |= (truth.abs() >= edge) & (result.abs() >= edge) & (result.sign() == truth.sign())
    error = (result.double() - truth).abs() / (info.eps * magnitude.clamp(min=info.tiny))
    return float(error.nan_to_num(torch.inf, torch.inf).masked_fill(allowed, 0).max())


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
