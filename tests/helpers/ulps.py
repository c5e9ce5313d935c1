"""How far results are from the references, in units of the last place."""

from collections.abc import Sequence
from typing import Any

import torch
from references import REFERENCES, Results
from torch import Tensor


def as_tuple(results: Results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def exact(
    name: str,
    inputs: dict[str, Tensor | None],
    attributes: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """The op's results, computed in fp64 (or another type)."""
    reference = REFERENCES[name]
    wide = [None if t is None else t.cpu().to(dtype) for t in inputs.values()]
    first = next(t for t in inputs.values() if t is not None)
    extra = {"stored": first.dtype} if reference.stored else {}
    return as_tuple(reference.compute(*wide, **attributes, **extra))


def magnitudes(name: str, inputs: dict[str, Tensor | None], attributes: dict[str, Any]) -> tuple[Tensor, ...]:
    """What errors of the results are measured by."""
    compute = REFERENCES[name].magnitude
    if compute is None:
        return tuple(result.abs() for result in exact(name, inputs, attributes))
    wide = [None if t is None else t.cpu().double() for t in inputs.values()]
    return as_tuple(compute(*wide, **attributes))


def errors_in_ulps(
    name: str,
    inputs: dict[str, Tensor | None],
    attributes: dict[str, Any],
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
