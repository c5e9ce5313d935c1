"""Runs an exported file in ONNX Runtime, with the library and without, and compares with torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from twinop import deploy
from twinop.deploy.tolerance import TOLERANCE
from twinop.errors import ExportError
from twinop.library import Library
from twinop.record import Record

from . import ort_process
from .bodies import find_body
from .calls import Call, make_call
from .ort_process import CaseError, OrtCrash, Request
from .record_body import trace
from .report import ExportReport, Parity

_TOLERANCE = {getattr(torch, name): accepted for name, accepted in TOLERANCE.items()}


_HIDDEN_ROWS = (
    "If a mask hides all of such a row: torch's dynamo exporter masks with the lowest finite number below "
    "opset 23 and differs from torch there. Export with opset 23 or, where ONNX Runtime refuses that (rotary "
    "positions, broadcast masks), with the torchscript exporter"
)


class NotRunnable(Exception):
    """ONNX Runtime cannot run the model on this machine's CPU; the model itself may be right."""


class Differs(ExportError):
    """The numbers are not torch's."""


@dataclass(frozen=True)
class Runs:
    """What ONNX Runtime made of each case, with which libraries, and what a user should know about it."""

    outputs: list[list[torch.Tensor]]
    libraries: Sequence[Library] = ()
    note: str = ""


def run(
    model: Path | bytes,
    library: deploy.Libraries | bool,
    cases: Sequence[Mapping[str, torch.Tensor]] = (),
) -> Runs:
    """Runs a model on the CPU provider, in another process: a crash of ONNX Runtime is an answer too.

    Args:
        library: as in `deploy.session`.
        cases: the inputs of each run; those that the exporter found to be unused are left out.

    Raises:
        NotRunnable: an operator of the model has no kernel there, or ONNX Runtime crashes.
        ExportError: ONNX Runtime refuses the model or a run for another reason.
        TwinopError: the library is missing, damaged, or not the one that the model needs.
    """
    arrays = [{name: _to_numpy(tensor) for name, tensor in case.items()} for case in cases]
    name = f"ONNX Runtime {ort.__version__}"
    note = ""
    try:
        try:
            answer = ort_process.SERVER.run(Request(model, library, arrays))
        except OrtCrash as crash:
            answer = ort_process.SERVER.run(Request(model, library, arrays, optimize=False))
            note = (
                f"{name} crashes ({crash}) when it optimizes this model for the CPU: compared without its "
                "optimizations. Where it runs on the CPU, set graph_optimization_level to ORT_DISABLE_ALL"
            )
    except OrtCrash as crash:
        raise NotRunnable(f"{name} crashes ({crash}) on this model on the CPU") from crash
    except CaseError as error:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays[error.case].items())
        raise ExportError(f"the exported model fails in ONNX Runtime for {shapes}: {error.error}") from error
    except deploy.RunError as error:
        if missing := re.search(r"implementation for (?:\S+:)?(\w+)\(\d+\)", str(error)):
            raise NotRunnable(f"{name} has no CPU kernel for {missing[1]}") from error
        raise ExportError(str(error)) from error
    return Runs([[_to_torch(array) for array in each] for each in answer.outputs], answer.libraries, note)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, dtype):
        return tensor.numpy()
    return tensor.view(_BITS[tensor.element_size()]).numpy().view(getattr(ml_dtypes, dtype))


def _to_torch(array: Any) -> torch.Tensor:
    if not isinstance(array, np.ndarray) or array.dtype.kind in "OSU":
        raise NotRunnable(f"an output is {type(array).__name__}, not a tensor of numbers")
    if not hasattr(ml_dtypes, array.dtype.name):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))


_BITS = {1: torch.uint8, 2: torch.uint16}


def compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], what: str) -> Parity:
    """Compares two lists of outputs.

    Raises:
        Differs: numbers differ by more than rounding.
        ExportError: the number of outputs, their shapes or dtypes differ.
    """
    if len(expected) != len(found):
        raise ExportError(f"{what} has {len(found)} outputs, torch {len(expected)}")
    worst, equal = 0.0, True
    for index, (reference, value) in enumerate(zip(expected, found, strict=True)):
        reference = reference.detach().cpu()
        for name in ("dtype", "shape"):
            if getattr(reference, name) != getattr(value, name):
                raise ExportError(
                    f"{what}, output {index}: {name} {getattr(value, name)}, torch {getattr(reference, name)}"
                )
        error = _error(reference, value)
        if not error <= _TOLERANCE.get(reference.dtype, 0.0):
            raise Differs(
                f"{what} differs from torch in output {index} ({reference.dtype}, "
                f"{tuple(reference.shape)}): error {error:.2e}, accepted "
                f"{_TOLERANCE.get(reference.dtype, 0.0):.0e} of the largest value"
                f"{_worst_rows(reference, value)}"
            )
        worst = max(worst, error)
        equal = equal and same_bits(reference, value)
    return Parity(worst, equal, len(found))


def _error(reference: torch.Tensor, value: torch.Tensor) -> float:
    if reference.numel() == 0:
        return 0.0
    a, b = reference.double(), value.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    finite = a.isfinite()
    if not torch.equal(a[a.isinf()], b[b.isinf()]):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / a.abs().max().clamp(min=1)) if a.numel() else 0.0


def _worst_rows(reference: torch.Tensor, value: torch.Tensor) -> str:
    """Where the tensors differ by more than rounding, by the indices of all dimensions but the last."""
    if reference.dim() < 2:
        return ""
    a, b = reference.double(), value.double()
    largest = a.masked_fill(~a.isfinite(), 0).abs().max().clamp(min=1)
    accepted = _TOLERANCE.get(reference.dtype, 0.0) * largest
    difference = (a - b).abs()
    # A value that only one of the two has (NaN, infinity) differs more than any number.
    difference[a.isfinite() != b.isfinite()] = float("inf")
    rows = difference.nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
    worst = rows.flatten().topk(min(3, rows.numel()))
    found = [index for index, error in zip(worst.indices, worst.values, strict=True) if error > accepted]
    places = [str([int(i) for i in torch.unravel_index(index, rows.shape)]) for index in found]
    return f". It differs most in the rows {', '.join(places)}" if places else ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, also the sign of zero; any NaN equals any."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).reshape(-1).view(torch.uint8),
        b.masked_fill(nan, 0).reshape(-1).view(torch.uint8),
    )


def verify(
    report: ExportReport,
    draft: Path,
    model: ir.Model,
    library: deploy.Libraries,
    calls: Mapping[Record, Sequence[Call]],
    cases: Sequence[tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]],
) -> None:
    """Runs a file with the library and without it, and writes into the report how it compares with torch.

    Args:
        draft: the file of `model`.
        calls: the model's calls of each op.
        cases: inputs, and torch's outputs for them.

    Raises:
        ExportError: a run fails, or its outputs are not torch's.
    """

    def compare_run(library: deploy.Libraries | bool, what: str) -> tuple[Parity, Sequence[Library]]:
        runs = run(draft, library, [tensors for tensors, _ in cases])
        try:
            found = [
                compare(expected, outputs, what)
                for (_, expected), outputs in zip(cases, runs.outputs, strict=True)
            ]
        except Differs as error:
            if report.exporter == "dynamo" and report.opset < 23 and _masks_by_lowest_number(model):
                raise ExportError(f"{error}. {_HIDDEN_ROWS}") from error
            raise
        report.notes += [runs.note] if runs.note and runs.note not in report.notes else []
        equal = all(each.equal for each in found)
        return Parity(max(each.error for each in found), equal, found[0].outputs), runs.libraries

    try:
        report.parity, used = compare_run(library, "the exported model")
        report.library = used[0].path if used else None
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
        for record, sites in calls.items():
            for call in sites:
                reason = unsupported_cell(call, report.opset)
                cell = f"{record.onnx_name} {call.dtypes[record.inputs[0].name]}: {reason}"
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
