"""Runs models in ONNX Runtime on the CPU, in another process, so that results can be compared."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from twinop.dtypes import to_array
from twinop.errors import ExportError, option

from .choose_library import Libraries
from .errors import RunError
from .ort_process import SERVER, Answer, OrtCrash, Request

NOISE = 2.0
"""How many times the original's own error is accepted."""
LOST = 0.1
"""An error of the original with which its numbers are of no use."""


class NotRunnable(Exception):
    """ONNX Runtime cannot run the model on this machine's CPU; the model itself may be right."""


def run(
    model: Path | bytes, library: Libraries | bool, cases: Sequence[Mapping[str, Any]] = (), **options: Any
) -> Answer:
    """Runs a model on the CPU provider in another process, so that a crash of ONNX Runtime is reported.

    Args:
        cases: the inputs of each run, tensors or arrays. Inputs that the model does not have are ignored: an
            exporter removes those that it finds to be unused.
        options: other fields of a `Request`.

    Raises:
        NotRunnable: an operator of the model has no kernel there, or ONNX Runtime crashes.
        ExportError: ONNX Runtime refuses the model or a run for another reason.
        TwinopError: the library is missing, damaged, or not the one that the model needs.
    """
    arrays = [{name: to_array(tensor) for name, tensor in case.items()} for case in cases]
    request = Request(model, library, arrays, **options)
    name = f"ONNX Runtime {ort.__version__}"
    try:
        try:
            return SERVER.run(request)
        except OrtCrash as crash:
            note = (
                f"{name} crashes ({crash}) when it optimizes this model for the CPU: compared without its "
                "optimizations. Where it runs on the CPU, set graph_optimization_level to ORT_DISABLE_ALL"
            )
            return replace(SERVER.run(replace(request, optimize=False)), note=note)
    except OrtCrash as crash:
        raise NotRunnable(f"{name} crashes ({crash}) on this model on the CPU") from crash
    except RunError as error:
        if error.code == "NotImplemented":
            op = re.search(r"implementation for (?:\S+:)?(\w+)\(\d+\)", str(error))
            raise NotRunnable(f"{name} has no CPU kernel for {op[1] if op else error}") from error
        raise ExportError(str(error)) from error


def has_wrong_types(error: Exception) -> bool:
    """Returns whether `run` failed since the types of a model's values contradict each other.

    An operator without a kernel, or without a dtype, has another code.
    """
    return isinstance(error.__cause__, RunError) and error.__cause__.code == "Fail"


def check_shown(graph: Any, outputs: Iterable[Sequence[Any]], allowed: bool, cure: str) -> list[str]:
    """Finds outputs of which no case shows a finite number; returns a note for each if they are allowed.

    Args:
        graph: the model's, of onnx_ir. Outputs that never have elements are left out.
        outputs: of each usual case.
        cure: how other inputs are given.

    Raises:
        ExportError: there is such an output.
    """
    notes = []
    for output, *values in zip(graph.outputs, *outputs, strict=True):
        arrays = [
            to_array(each) for value in values for each in (value if isinstance(value, list) else [value])
        ]
        if not any(array.size for array in arrays):
            reason = "has no elements"
        elif all(array.dtype.kind not in "OSUiub" and not np.isfinite(array).any() for array in arrays):
            reason = "has no finite number"
        else:
            reason = ""
        if not reason or 0 in (output.shape or ()):  # it never has elements
            continue
        text = f"output {output.name} {reason} for any of the inputs"
        if not allowed:
            raise ExportError(
                f"{text}, so it cannot be compared. {cure}, or keep the file all the same with "
                f"{option('allow_uncompared', True)}"
            )
        notes.append(f"{text}: it was not compared")
    return notes
