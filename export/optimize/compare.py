"""Compares an optimised model with the original."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop import deploy
from twinop.errors import ExportError, TwinopError

from ..comparison import NotRunnable, run
from . import inputs
from .inputs import Case, Sizes
from .weight_sizes import fit

Outputs = list[list[Any]]
"""The outputs of each case: arrays, or lists of arrays for sequences."""

ACCEPTED = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The relative error that is always accepted: sums in another order have as much."""
# The CPU's kernels compute 16 bits in fp32 and round later than those of a GPU, so a deep original has the
# smaller error. The report mentions the first factor; the second one is an error.
NOTED, FACTOR = 1.2, 3.0
LOST = 0.1  # an error of the original with which a dtype is of no use
EMPTY = "the outputs of the original have no elements"
_LARGE, _TIMES_TYPICAL = 1e4, 1e3  # numbers that hide scores and logits are far larger than the rest


class NotEquivalent(Exception):
    """A rewritten model fails or computes something else than the original; the text says which.

    Attributes:
        rewrite: the name of the rewrite that is the cause, if it is known.
    """

    def __init__(self, text: str, rewrite: str = "") -> None:
        super().__init__(text)
        self.rewrite = rewrite


def relative_error(expected: Any, found: Any) -> float:
    """Returns |found - expected| / |expected| in the 2-norm; infinity if shapes or NaN and inf differ.

    Of integers and truth values it is the share of those that differ.
    Numbers that are much larger than the typical one, such as the lowest number in masked logits, have an
    error of their own: beside them, no other number would count.
    """
    if isinstance(expected, list):  # a sequence
        pairs = zip(expected, found, strict=False)
        return (
            max((relative_error(*pair) for pair in pairs), default=0.0)
            if len(expected) == len(found)
            else inf
        )
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:
        return inf
    if expected.dtype.kind in "OSU":
        return 0.0 if (expected == found).all() else inf
    if expected.dtype.kind in "iub":
        return float((expected != found).mean()) if expected.size else 0.0
    a, b = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return inf
    a, b = a[finite], b[finite]
    ordinary = np.abs(a[(a != 0) & (np.abs(a) < _LARGE)])
    typical = np.median(ordinary) if ordinary.size else 0.0
    large = np.abs(a) >= max(_LARGE, _TIMES_TYPICAL * typical)
    return max(_norm_error(a[part], b[part]) for part in (large, ~large))


def _norm_error(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        scale = float(np.abs(a).max(initial=0.0)) or 1.0  # the square of the lowest number overflows
        return float(np.linalg.norm((a - b) / scale)) / (float(np.linalg.norm(a / scale)) or 1.0)


def worst_error(expected: Outputs, found: Outputs) -> float:
    """Returns the largest relative error of all outputs of all cases."""
    pairs = [(a, b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)]
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def shows_nothing(outputs: Outputs) -> str:
    """Returns which output has numbers but no finite one in any case, or "": it cannot be compared."""
    sizes = 0
    for index, values in enumerate(zip(*outputs, strict=True)):
        arrays = [
            np.asarray(each) for value in values for each in (value if isinstance(value, list) else [value])
        ]
        size = sum(array.size for array in arrays)
        sizes += size
        numbers = [array.astype(np.float64) for array in arrays if array.dtype.kind not in "OSU"]
        if size and len(numbers) == len(arrays) and not any(np.isfinite(array).any() for array in numbers):
            return f"output {index} of the original has no finite number"
    return "" if sizes else EMPTY


def make_cases(
    original: Path, model: ir.Model, padding: str | None, library: deploy.Libraries
) -> tuple[list[Case], Outputs, Sizes]:
    """Generates inputs that the original accepts, and runs it on them.

    Args:
        original: the file of the model in fp32.
        padding: "right" if masks hide nothing but the end of a sequence.

    Returns:
        The cases, the original's outputs for them, and sizes that it accepts.

    Raises:
        ExportError: the original cannot be loaded, or returns nothing finite for the inputs that were tried.
    """
    reasons: list[str] = []

    def outputs_for(sizes: Sizes) -> tuple[list[Case], Outputs, Sizes] | None:
        other = replace(sizes, batch=1, length=sizes.length + 2 * (sizes.length % 2))
        kinds = [(sizes, "right"), (sizes, "left"), (other, "nothing")]
        for positive in (False, True):
            try:
                cases = [
                    inputs.generate(model, each, hide=hide, seed=seed, positive=positive)
                    for seed, (each, hide) in enumerate(kinds)
                    if hide != "left" or padding != "right"
                ]
            except inputs.TooLarge as error:
                reasons.append(str(error))
                break
            try:
                outputs = run(original, library, cases).outputs
            except (TwinopError, NotRunnable) as error:
                if not reasons:
                    _require_loadable(original, library)
                reasons.append(str(error).splitlines()[0])
                break
            if not (reason := shows_nothing(outputs)) or reason == EMPTY:
                return cases, outputs, sizes
            reasons.append(reason)
        return None

    for sizes in inputs.SIZES:
        if found := outputs_for(sizes):
            return found
        if not sizes.step and (fitting := fit(model, sizes, library)) and (found := outputs_for(fitting)):
            return found
    raise ExportError(
        f"the original does not run on generated inputs ({reasons[0]}). Give it inputs with "
        f"--inputs file.npz: {', '.join(str(value.name) for value in model.graph.inputs)}"
    )


def _require_loadable(original: Path, library: deploy.Libraries) -> None:
    try:
        run(original, library)
    except (TwinopError, NotRunnable) as error:
        raise ExportError(f"the original cannot be loaded on the CPU: {error}") from error


def declare_outputs(model: ir.Model, outputs: Outputs) -> None:
    """Gives outputs without a shape the rank that they have in a run: onnx.checker wants one."""
    for value, found in zip(model.graph.outputs, outputs[0], strict=True):
        if value.shape is None and isinstance(found, np.ndarray):
            value.shape = ir.Shape([None] * found.ndim)
