"""Compares an exported file with torch: runs it in ONNX Runtime, with the library and without."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from twinop import deploy
from twinop.comparison import TOLERANCE, difference, same_bits
from twinop.dtypes import to_array
from twinop.errors import ExportError, option
from twinop.library import Library
from twinop.record import Record

from .bodies import find_body
from .calls import Call, make_call, paths_in_use
from .ort_process import SERVER, Answer, OrtCrash, Request
from .record_body import trace
from .report import ExportReport, Parity

_HIDDEN_ROWS = (
    "If a mask hides all of such a row: torch's dynamo exporter masks with the lowest finite number below "
    "opset 23 and differs from torch there. Export with opset 23 or, where ONNX Runtime refuses that (rotary "
    "positions, broadcast masks), with the torchscript exporter"
)

NOISE = 2.0
"""How many times the original's own error is accepted."""
LOST = 0.1
"""An error of the original with which its numbers are of no use."""


@dataclass(frozen=True)
class Case:
    """Inputs, and torch's outputs for them.

    Attributes:
        special: what the inputs are, such as "inputs of zeros"; empty for usual ones.
        noise: of special inputs: returns by how much torch's outputs change with their last bits.
    """

    tensors: Mapping[str, torch.Tensor]
    expected: Sequence[torch.Tensor]
    special: str = ""
    noise: Callable[[], Sequence[float]] = tuple


class NotRunnable(Exception):
    """ONNX Runtime cannot run the model on this machine's CPU; the model itself may be right."""


class Differs(ExportError):
    """The numbers are not torch's."""


def run(
    model: Path | bytes,
    library: deploy.Libraries | bool,
    cases: Sequence[Mapping[str, Any]] = (),
    until_one_runs: bool = False,
    optimize: bool = True,
    required: float = inf,
) -> Answer:
    """Runs a model on the CPU provider in another process, so that a crash of ONNX Runtime is reported.

    Args:
        library: as in `deploy.session`.
        cases: the inputs of each run, tensors or arrays. Inputs that the model does not have are ignored: an
            exporter removes those that it finds to be unused.
        until_one_runs: end with the first case that runs; those that fail before it have no outputs.
        optimize: whether ONNX Runtime may run its graph optimizations.
        required: how many of the cases must run; others that fail have no outputs.

    Raises:
        NotRunnable: an operator of the model has no kernel there, or ONNX Runtime crashes.
        ExportError: ONNX Runtime refuses the model or a run for another reason.
        TwinopError: the library is missing, damaged, or not the one that the model needs.
    """
    arrays = [{name: to_array(tensor) for name, tensor in case.items()} for case in cases]
    request = Request(model, library, arrays, optimize, until_one_runs, required)
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
    except deploy.RunError as error:
        if missing := re.search(r"implementation for (?:\S+:)?(\w+)\(\d+\)", str(error)):
            raise NotRunnable(f"{name} has no CPU kernel for {missing[1]}") from error
        raise ExportError(str(error)) from error


def compare(case: Case, found: Sequence[Any], what: str) -> Parity:
    """Compares torch's outputs with those of `what`, which are numpy arrays.

    Raises:
        Differs: numbers differ by more than rounding.
        NotRunnable: an output is not a tensor of numbers.
        ExportError: the number of outputs, their shapes or dtypes differ.
    """
    if len(case.expected) != len(found):
        raise ExportError(f"{what} has {len(found)} outputs, torch {len(case.expected)}")
    worst, equal, where = 0.0, True, f" for {case.special}" if case.special else ""
    for index, (tensor, value) in enumerate(zip(case.expected, found, strict=True)):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            raise NotRunnable(f"an output is {type(value).__name__}, not a tensor of numbers")
        reference = to_array(tensor)
        error, accepted = difference(reference, value), TOLERANCE.get(reference.dtype.name, 0.0)
        if not error <= accepted and case.special:
            noise = case.noise()[index]
            if not noise <= LOST:
                continue
            accepted = max(accepted, NOISE * noise)
        for name in ("dtype", "shape"):
            if getattr(reference, name) != getattr(value, name):
                raise ExportError(
                    f"{what}, output {index}{where}: {name} {getattr(value, name)}, torch "
                    f"{getattr(reference, name)}"
                )
        if not error <= accepted:
            raise Differs(
                f"{what} differs from torch{where} in output {index} ({reference.dtype}, {reference.shape}): "
                f"error {error:.2e}, accepted {accepted:.0e} of the largest value"
                f"{_worst_rows(reference, value)}"
            )
        worst = worst if case.special else max(worst, error)
        equal = equal and same_bits(reference, value)
    return Parity(worst, equal, len(found))


def check_shown(graph: ir.Graph, outputs: Iterable[Sequence[Any]], allowed: bool, cure: str) -> list[str]:
    """Finds outputs of which no case shows a finite number; returns a note for each if they are allowed.

    Args:
        graph: the model's. Outputs that never have elements are left out.
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


def _worst_rows(reference: np.ndarray, value: np.ndarray) -> str:
    """Names the rows that differ most, by the indices of all dimensions but the last."""
    if reference.ndim < 2:
        return ""
    a, b = reference.astype(np.float64), value.astype(np.float64)
    accepted = TOLERANCE.get(reference.dtype.name, 0.0) * max(np.abs(a[np.isfinite(a)]).max(initial=0), 1)
    # A value that only one of the two has (NaN, infinity) differs more than any number.
    errors = np.where(np.isfinite(a) == np.isfinite(b), np.nan_to_num(np.abs(a - b)), np.inf).max(-1)
    worst = [i for i in np.argsort(-errors, axis=None, kind="stable")[:3] if errors.flat[i] > accepted]
    places = [str([int(index) for index in np.unravel_index(i, errors.shape)]) for i in worst]
    return f". It differs most in the rows {', '.join(places)}" if places else ""


def verify(
    report: ExportReport,
    draft: Path,
    model: ir.Model,
    library: deploy.Libraries,
    calls: Mapping[Record, Sequence[Call]],
    cases: Sequence[Case],
) -> None:
    """Runs a file with the library and without it, and writes into the report how it compares with torch.

    Args:
        draft: the file of `model`.
        calls: the model's calls of each op.
        cases: inputs, and torch's outputs for them. Special ones that ONNX Runtime refuses become a note.

    Raises:
        ExportError: a run fails, or its outputs are not torch's.
    """

    def compare_run(library: deploy.Libraries | bool, what: str) -> tuple[Parity, Sequence[Library]]:
        usual = sum(not case.special for case in cases)
        answer = run(draft, library, [case.tensors for case in cases], required=usual)
        found, notes = list[Parity](), [answer.note]
        try:
            for case, outputs in zip(cases, answer.outputs, strict=True):
                if outputs:
                    found.append(compare(case, outputs, what))
                else:
                    notes.append(f"ONNX Runtime fails for {case.special}, for which torch does not")
        except Differs as error:
            if report.exporter == "dynamo" and report.opset < 23 and _masks_by_lowest_number(model):
                raise ExportError(f"{error}. {_HIDDEN_ROWS}") from error
            raise
        report.notes += [note for note in notes if note and note not in report.notes]
        equal = all(each.equal for each in found)
        return Parity(max(each.error for each in found), equal, found[0].outputs), answer.libraries

    try:
        report.parity, used = compare_run(library, "the exported model")
        report.libraries = paths_in_use(model, used)
        known = {record for each in used for record in each.by_onnx_name.values()}
        if foreign := [record.onnx_name for record in calls if record not in known]:
            report.notes.append(
                f"no ONNX Runtime library with {', '.join(foreign)} was found: compared on the function body"
            )
    except NotRunnable as error:
        report.parity_reason = str(error)
    without = [record.onnx_name for record in calls if find_body(record.key) is None or not report.bodies]
    if without:
        report.without_reason = f"no function body: {', '.join(without)}"
        return
    try:
        report.without_library, _ = compare_run(False, "the exported model, without the library,")
    except NotRunnable as error:
        report.without_reason = str(error)
        for call in (call for each in calls.values() for call in each):
            reason = unsupported_cell(call, report.opset)
            cell = f"{call.record.onnx_name} {call.dtypes[call.record.inputs[0].name]}: {reason}"
            if reason and cell not in report.unsupported:
                report.unsupported.append(cell)


def _masks_by_lowest_number(model: ir.Model) -> bool:
    """Whether a node chooses between a value and the lowest number of its dtype, as torch's masks do."""
    for node in model.graph.all_nodes():
        for value in node.inputs if node.op_type == "Where" else ():
            constant = value.const_value if value is not None else None
            if constant is None or constant.size != 1 or not constant.dtype.is_floating_point():
                continue
            if constant.numpy().item() == constant.dtype.min:
                return True
    return False


def unsupported_cell(call: Call, opset: int) -> str:
    """Returns why ONNX Runtime's CPU provider cannot run the op's body for a call of these dtypes, or ""."""
    body = find_body(call.record.key)
    if body is None:
        return "it has no function body"
    alone = make_call(call.record, call.dtypes, call.inputs, call.attributes)
    imports = {"": opset, call.record.domain: call.record.domain_version}
    graph = ir.Graph(
        list(alone.inputs.values()),
        alone.node.outputs,
        nodes=[alone.node],
        opset_imports=imports,
        name="probe",
    )
    model = ir.Model(graph, ir_version=10, functions=[trace(body, [alone], opset)])
    try:
        run(ir.to_proto(model).SerializeToString(), False)
    except (NotRunnable, ExportError) as error:
        return str(error)
    return ""
