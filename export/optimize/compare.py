"""Compares an optimised model with the original."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twinop import deploy
from twinop.errors import ExportError, TwinopError

from ..comparison import NotRunnable, run
from . import inputs
from .inputs import Case

Outputs = list[list[np.ndarray]]
"""The outputs of each case."""

ACCEPTED = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The relative error that is always accepted: sums in another order have as much."""
FACTOR = 1.2  # times the error of the original in 16 bits is accepted, too


class NotEquivalent(Exception):
    """A rewritten model fails or computes something else than the original; the text says which.

    Attributes:
        rewrite: the name of the rewrite that is the cause, if it is known.
    """

    def __init__(self, text: str, rewrite: str = "") -> None:
        super().__init__(text)
        self.rewrite = rewrite


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Returns |found - expected| / |expected| in the 2-norm; infinity if shapes or NaN and inf differ."""
    if expected.shape != found.shape:
        return float("inf")
    a, b = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    scale = float(np.linalg.norm(a[finite]))
    return float(np.linalg.norm(a[finite] - b[finite])) / (scale or 1.0)


def worst_error(expected: Outputs, found: Outputs) -> float:
    """Returns the largest relative error of all outputs of all cases."""
    pairs = [(a, b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)]
    return max((relative_error(np.asarray(a), np.asarray(b)) for a, b in pairs), default=0.0)


def make_cases(
    original: Path, model: ir.Model, padding: str | None, library: deploy.Libraries
) -> tuple[list[Case], Outputs, tuple[int, int]]:
    """Generates inputs that the original accepts, and runs it on them.

    Args:
        original: the file of the model in fp32.
        padding: "right" if masks hide nothing but the end of a sequence.

    Returns:
        The cases, the original's outputs for them, and a batch and a length that it accepts.

    Raises:
        ExportError: the original does not run on any of the inputs that were tried.
    """
    reasons = []
    for batch, length in inputs.SIZES:
        other = (1, length + 2 * (length % 2))
        kinds = [((batch, length), "right"), ((batch, length), "left"), (other, "nothing")]
        cases = [
            inputs.generate(model, *sizes, hide=hide, seed=seed)
            for seed, (sizes, hide) in enumerate(kinds)
            if hide != "left" or padding != "right"
        ]
        try:
            return cases, run(original, library, cases).outputs, (batch, length)
        except (TwinopError, NotRunnable) as error:
            reasons.append(str(error).splitlines()[0])
    raise ExportError(
        f"the original does not run on generated inputs ({reasons[0]}). Give it inputs with "
        f"--inputs file.npz: {', '.join(str(value.name) for value in model.graph.inputs)}"
    )


def outputs_of(path: Path, cases: Sequence[Case], library: deploy.Libraries | bool) -> Outputs:
    """Returns the outputs of a model on the CPU provider.

    Raises:
        NotRunnable: an operator has no CPU kernel.
        ExportError: it fails for another reason.
    """
    return run(path, library, cases).outputs
