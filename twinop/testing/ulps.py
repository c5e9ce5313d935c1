"""How far results are from the references, in units of the last place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinop.export.body_in_torch import evaluate_body
from twinop.record.dtypes import torch_name
from twinop.record.op_spec import OpSpec
from twinop.torch_op.rules import as_tuple

from .references import ONE_ROUNDING
from .rounding import RoundingOps
from .under_test import reference_of

Inputs = Mapping[str, Tensor | None]

BODY_ROUNDINGS = 8
"""The error allowed for an op without a `Reference`, as a multiple of its body's rounding error."""


def compute(
    record: OpSpec, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], stored: torch.dtype
) -> tuple[Tensor, ...]:
    """Computes what the op means in the dtype of the inputs; differentiable.

    `stored` is the dtype of the op's own call, in which it rounds intermediate results that it stores.
    """
    reference = reference_of(record)
    if reference.compute is not None:
        return as_tuple(reference.compute(*inputs, **attributes))
    results = evaluate_body(record, inputs, attributes, stored)
    return tuple(r.double() if r.is_floating_point() and r.itemsize == 1 else r for r in results)


def _widened(inputs: Inputs, dtype: torch.dtype) -> tuple[list[Tensor | None], torch.dtype]:
    """The inputs on the CPU, floating-point ones in another dtype, and the dtype that the first one had."""
    wide = [t if t is None else (t.to(dtype) if t.is_floating_point() else t).cpu() for t in inputs.values()]
    return wide, next(t.dtype for t in inputs.values() if t is not None)


def is_defined(record: OpSpec, inputs: Inputs, attributes: Mapping[str, Any]) -> bool:
    """Whether the op has a meaning for these inputs: an index of the largest of no numbers has none."""
    if all(tensor is None or tensor.numel() for tensor in inputs.values()):
        return True
    try:
        exact(record, inputs, attributes)
    except (IndexError, RuntimeError):
        return False
    return True


def exact(
    record: OpSpec, inputs: Inputs, attributes: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """Computes the op's results in fp64 (or another type)."""
    wide, stored = _widened(inputs, dtype)
    return compute(record, wide, attributes, stored)


def magnitudes(
    record: OpSpec,
    inputs: Inputs,
    attributes: Mapping[str, Any],
    truth: Sequence[Tensor],
    ops: type[RoundingOps],
) -> tuple[Tensor, ...]:
    """Computes what errors of `truth` are measured by: roundings of `ops` where no `Reference` has `ulps`."""
    reference = reference_of(record)
    wide, stored = _widened(inputs, torch.float64)
    if reference.magnitude is not None:
        return as_tuple(reference.magnitude(*wide, **attributes))
    results = [  # integers and truth values are equal or wrong
        result.abs() if result.is_floating_point() or result.is_complex() else torch.zeros(result.shape)
        for result in truth
    ]
    if reference.ulps is not None or not stored.is_floating_point:
        return tuple(results)
    bounds = evaluate_body(record, wide, attributes, stored, ops)
    computed = torch.float64 if stored == torch.float64 else torch.float32
    share = BODY_ROUNDINGS / ONE_ROUNDING * torch.finfo(computed).eps
    errors = [getattr(bound, "error", torch.zeros(())) for bound in bounds]  # integers have none
    dtypes = record.combination_of({name: torch_name(t.dtype) for name, t in inputs.items() if t is not None})
    kinds = [getattr(torch, dtypes[name]) if dtypes else stored for name in record.outputs]
    return tuple(
        result.nan_to_num(0) + (share / torch.finfo(kind).eps * error).nan_to_num(0, posinf=torch.inf)
        if kind.is_floating_point
        else result
        for result, error, kind in zip(results, errors, kinds, strict=True)
    )


@dataclass(frozen=True)
class Measured:
    """Exact values, and errors in units of the last place: infinite where just one is NaN or infinite."""

    exact: Tensor
    errors: Tensor

    @property
    def worst(self) -> float:
        return float(self.errors.max()) if self.errors.numel() else 0.0


def measure(
    record: OpSpec,
    inputs: Inputs,
    attributes: Mapping[str, Any],
    results: Sequence[Tensor],
    smallest: float = 0.0,
    ops: type[RoundingOps] = RoundingOps,
) -> list[Measured]:
    """Compares the results of a call with the reference. Magnitudes below the smallest count as that.

    Where fp32 arithmetic, in which most kernels compute, overflows on the way, what it gives is right too.
    AssertionError: a result has another shape than the reference.
    """
    in_64 = exact(record, inputs, attributes)
    in_32 = in_64 if results[0].dtype == torch.float64 else exact(record, inputs, attributes, torch.float32)
    truths = zip(in_64, in_32, magnitudes(record, inputs, attributes, in_64, ops), strict=True)
    found = []
    for name, result, (truth, narrow_truth, magnitude) in zip(record.outputs, results, truths, strict=True):
        assert result.shape == truth.shape, (
            f"{record.qualified_name}: output {name} has shape {list(result.shape)}, "
            f"the function body gives {list(truth.shape)}"
        )
        found.append(
            Measured(truth, _errors(result.cpu(), truth, narrow_truth, magnitude.clamp(min=smallest)))
        )
    return found


def _errors(result: Tensor, truth: Tensor, narrow_truth: Tensor, magnitude: Tensor) -> Tensor:
    if not result.is_floating_point():
        return torch.zeros(result.shape).masked_fill(result != truth, torch.inf)
    info = torch.finfo(result.dtype)
    allowed = result.isnan() & narrow_truth.isnan()
    for value in (truth.to(result.dtype), narrow_truth.to(result.dtype)):
        allowed |= (result == value) | (result.isnan() & value.isnan())
    # At the edge of overflow the next number may be infinity.
    edge = info.max * (1 - (8 if result.itemsize > 1 else 1) * info.eps)
    result = result.double()
    allowed |= (truth.abs() >= edge) & (result.abs() >= edge) & (result.sign() == truth.sign())
    error = (result - truth).abs() / (info.eps * magnitude.clamp(min=info.tiny))
    # An infinite magnitude: a rounded number was multiplied with infinity, which gives any result.
    return error.nan_to_num(torch.inf, torch.inf).masked_fill(allowed | magnitude.isposinf(), 0)
