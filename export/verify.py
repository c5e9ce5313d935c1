"""Compares an exported file with torch: runs it in ONNX Runtime, with the library and without."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from twinop import deploy
from twinop.deploy.ort_runs import NotRunnable, run
from twinop.errors import ExportError, option
from twinop.libraries.library import Library
from twinop.model.bodies import find_body
from twinop.model.calls import Call, make_call, paths_in_use
from twinop.model.record_body import model_of, trace
from twinop.record import tolerance
from twinop.record.dtypes import dtype_name, to_array
from twinop.record.op_spec import OpSpec
from twinop.record.tolerance import MAX_USABLE_ERROR, accepted, difference, same_bits, scale_of

from .report import ExportReport, Parity

_HIDDEN_ROWS = (
    "If a mask hides all of such a row: torch's dynamo exporter masks with the lowest finite number below "
    "opset 23 and differs from torch there. Export with opset 23 or, where ONNX Runtime refuses that (rotary "
    "positions, broadcast masks), with the torchscript exporter"
)
_FIXED = "The example inputs agree: a number or a branch that Python took from them may be fixed in the file"

_MOST_PREPACKED = 256 << 20
"""The bytes of weights of which ONNX Runtime may keep copies in a layout of its own (prepacking)."""


@dataclass(frozen=True)
class Case:
    """Inputs, and torch's outputs for them."""

    tensors: Mapping[str, torch.Tensor]
    expected: Sequence[torch.Tensor]
    noise: Callable[[], Sequence[float]]  # by how much these change with the last bits of inputs and weights
    edge: str = ""  # what the inputs are, such as "inputs of zeros"; empty for typical ones
    scales: Sequence[float] = ()  # of edge inputs: the largest value of each output for typical ones


class Differs(ExportError):
    """The numbers are not torch's."""


def compare(case: Case, found: Sequence[Any], what: str, notes: list[str]) -> Parity:
    """Compares torch's outputs with those of `what`, numpy arrays; `notes` gets one for each output of
    rounding errors. Differs: numbers do by more than rounding; NotRunnable: an output is no tensor of
    numbers; ExportError: their number, shapes or dtypes differ."""
    if len(case.expected) != len(found):
        raise ExportError(f"{what} has {len(found)} outputs, torch {len(case.expected)}")
    worst, equal, where = 0.0, True, f" for {case.edge}" if case.edge else ""
    for index, (tensor, value) in enumerate(zip(case.expected, found, strict=True)):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            raise NotRunnable(f"an output is {type(value).__name__}, not a tensor of numbers")
        reference = to_array(tensor)
        least = case.scales[index] if case.scales else 0.0
        error, limit = difference(reference, value, least), accepted(reference.dtype.name)
        if not error <= limit:
            noise = case.noise()[index]
            if case.edge and not noise <= MAX_USABLE_ERROR:
                continue
            limit = accepted(reference.dtype.name, noise, scale_of(reference) or 1.0)
            if MAX_USABLE_ERROR < noise < inf:
                change = f"{noise:.0%} of its largest value"
                notes.append(f"output {index} changes by {change} with the last bits of inputs and weights")
        for name in ("dtype", "shape"):
            if getattr(reference, name) != getattr(value, name):
                raise ExportError(
                    f"{what} gives output {index}{where} the {name} {getattr(value, name)}, torch "
                    f"{getattr(reference, name)}"
                )
        if not error <= limit:
            raise Differs(
                f"{what} differs from torch{where} in output {index} ({reference.dtype}, {reference.shape}): "
                f"{tolerance.described_error(reference, error, limit, least)}"
                f"{_worst_rows(reference, value, limit * max(scale_of(reference), least))}"
            )
        worst = worst if case.edge else max(worst, error)
        equal = equal and same_bits(reference, value)
    return Parity(worst, equal, len(found))


def _worst_rows(reference: np.ndarray, value: np.ndarray, accepted: float) -> str:
    """Names the rows that differ most, by the indices of all dimensions but the last."""
    if reference.ndim < 2:
        return ""
    a, b = reference.astype(np.float64), value.astype(np.float64)
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
    calls: Mapping[OpSpec, Sequence[Call]],
    cases: Sequence[Case],
) -> None:
    """Runs the file of a model with the library and without it, if it has calls of ops, and writes into the
    report how it compares with torch. Edge cases that ONNX Runtime refuses become a note. ExportError: a run
    fails, or its outputs are not torch's."""
    used: Sequence[Library] = ()
    try:
        report.parity, used = _compare_run(report, draft, model, library, cases, "the exported model")
        report.libraries = paths_in_use(model, used)
        known = {record for each in used for record in each.by_onnx_name.values()}
        if foreign := [record.onnx_name for record in calls if record not in known]:
            names = ", ".join(foreign)
            report.notes.append(f"no library with a CPU kernel of {names}: compared on the function body")
    except NotRunnable as error:
        report.parity_reason = str(error)
        for index, (value, tensor) in enumerate(zip(model.graph.outputs, cases[0].expected, strict=False)):
            kinds = dtype_name(value.dtype or 0), to_array(tensor).dtype.name
            if value.dtype is not None and kinds[0] != kinds[1]:
                text = f"the exported model, output {index}: dtype {kinds[0]}, torch {kinds[1]}"
                raise ExportError(text) from error
    without = [record.onnx_name for record in calls if find_body(record.key) is None or not report.bodies]
    if without:
        report.without_reason = f"no function body: {', '.join(without)}"
        return
    if not calls and not used:
        report.without_library, report.without_reason = report.parity, report.parity_reason
        return
    what = "the exported model, without the library,"
    try:
        report.without_library, _ = _compare_run(report, draft, model, False, cases, what)
    except NotRunnable as error:
        report.without_reason = str(error)
        for call in (call for each in calls.values() for call in each):
            reason = unsupported_cell(call, report.opset)
            cell = f"{call.record.onnx_name} {call.dtypes[call.record.inputs[0].name]}: {reason}"
            if reason and cell not in report.unsupported:
                report.unsupported.append(cell)


def _compare_run(
    report: ExportReport,
    draft: Path,
    model: ir.Model,
    library: deploy.Libraries | bool,
    cases: Sequence[Case],
    what: str,
) -> tuple[Parity, Sequence[Library]]:
    typical = sum(not case.edge for case in cases)
    weights = [value.const_value for value in model.graph.initializers.values()]
    prepack = sum(each.nbytes for each in weights if each is not None) <= _MOST_PREPACKED
    given = [case.tensors for case in cases]
    answer = run(draft, library, given, required=typical, may_skip=True, prepack=prepack)
    found, notes = list[Parity](), [answer.note]
    try:
        for case, outputs in zip(cases, answer.outputs, strict=True):
            if outputs:
                found.append(compare(case, outputs, what, notes))
            else:
                notes.append(f"ONNX Runtime fails for {case.edge}, for which torch does not")
    except Differs as error:
        if report.exporter == "dynamo" and report.opset < 23 and _masks_by_lowest_number(model):
            raise ExportError(f"{error}. {_HIDDEN_ROWS}") from error
        if case.edge or case is cases[0]:
            raise
        cure = f"change the model, or leave the axes that vary out of {option('dynamic')}"
        raise ExportError(f"{error}. {_FIXED}: {cure}") from error
    report.notes += [note for note in notes if note and note not in report.notes]
    equal = all(each.equal for each in found)
    return Parity(max(each.error for each in found), equal, found[0].outputs), answer.libraries


def _masks_by_lowest_number(model: ir.Model) -> bool:
    """Whether a node chooses between a value and the lowest number of its dtype, as torch's masks do."""
    read = [value for node in model.graph.all_nodes() if node.op_type == "Where" for value in node.inputs]
    found = [each for value in read if value is not None and (each := value.const_value) is not None]
    numbers = [each for each in found if each.size == 1 and each.dtype.is_floating_point()]
    return any(each.numpy().item() == each.dtype.min for each in numbers)


def unsupported_cell(call: Call, opset: int) -> str:
    """Returns why ONNX Runtime's CPU provider cannot run the op's body for a call of these dtypes, or ""."""
    body = find_body(call.record.key)
    assert body is not None
    alone = make_call(call.record, call.dtypes, call.inputs, call.attributes)
    model = model_of(trace(body, [alone], opset), alone, [alone.node])
    try:
        run(model, False)
    except (NotRunnable, ExportError) as error:
        return str(error)
    return ""
