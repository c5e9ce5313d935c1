"""Runs an exported file in ONNX Runtime, with the library and without, and compares with torch."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import torch

from twinop import deploy
from twinop.deploy.tolerance import TOLERANCE
from twinop.errors import ExportError
from twinop.export.bodies import find_body
from twinop.export.report import Parity
from twinop.export.schema import ATTRIBUTE_TYPES, ONNX_TYPES
from twinop.export.trace import CallSite, trace
from twinop.record import DOMAIN, DOMAIN_VERSION, Record

_TOLERANCE = {getattr(torch, name): accepted for name, accepted in TOLERANCE.items()}
_PROVIDER = "CPUExecutionProvider"


class NotRunnable(Exception):
    """ONNX Runtime has no kernel for one of the model's operators."""


def open_session(model: Path | bytes, library: Path | bool | None) -> deploy.Session:
    """A session on the CPU provider; `library` as in `deploy.session`.

    Raises:
        NotRunnable: an operator of the model has no kernel there.
        ExportError: ONNX Runtime refuses the model for another reason.
        TwinopError: the library is missing, damaged, or not the one that the model needs.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # no library found: the caller looks itself
            return deploy.session(model, [_PROVIDER], library, session_options=options)
    except deploy.RunError as error:
        if missing := re.search(r"implementation for (?:\S+:)?(\w+)\(\d+\)", str(error)):
            raise NotRunnable(f"ONNX Runtime {ort.__version__} has no CPU kernel for {missing[1]}") from error
        raise ExportError(str(error)) from error


def run(session: deploy.Session, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """All outputs, in order. Inputs that the exporter found to be unused are left out.

    Raises:
        ExportError: the run failed.
    """
    feeds = {name: tensor.detach().cpu() for name, tensor in tensors.items() if name in session.inputs}
    try:
        return list(session.run(feeds).values())
    except deploy.RunError as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in feeds.items())
        raise ExportError(f"the exported model fails in ONNX Runtime for {shapes}: {error}") from error


def compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], what: str) -> Parity:
    """
    Raises:
        ExportError: numbers, shapes or dtypes differ by more than rounding.
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
            raise ExportError(
                f"{what} differs from torch in output {index} ({reference.dtype}, "
                f"{tuple(reference.shape)}): error {error:.2e}, accepted "
                f"{_TOLERANCE.get(reference.dtype, 0.0):.0e} of the largest value"
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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, also the sign of zero; any NaN equals any."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).reshape(-1).view(torch.uint8),
        b.masked_fill(nan, 0).reshape(-1).view(torch.uint8),
    )


def unsupported_cell(record: Record, call: CallSite, opset: int) -> str:
    """Why ONNX Runtime's CPU provider cannot run the op's body for a call of these dtypes, or ""."""
    body = find_body(record.name)
    if body is None:
        return "it has no function body"
    inputs = {name: ir.val(name, dtype=ONNX_TYPES[call.dtypes[name]]) for name in call.present}
    attributes = [
        ir.Attr(entry.name, ATTRIBUTE_TYPES[entry.kind], call.attributes[entry.name])
        for entry in record.attributes
    ]
    outputs = [ir.val(name, dtype=ONNX_TYPES[call.dtypes[name]]) for name in record.outputs]
    arguments = [inputs.get(entry.name) for entry in record.inputs]
    node = ir.Node(DOMAIN, record.onnx_name, arguments, attributes, outputs=outputs)
    imports = {"": opset, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph(list(inputs.values()), outputs, nodes=[node], opset_imports=imports, name="probe")
    model = ir.Model(graph, ir_version=10, functions=[trace(record, body, [call], opset)])
    try:
        open_session(ir.to_proto(model).SerializeToString(), False)
    except (NotRunnable, ExportError) as error:
        return str(error)
    return ""
