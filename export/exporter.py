"""`export`: from a torch model to a checked ONNX file."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, ShapeInferencePass

import twinop
from twinop import deploy, torch_op
from twinop.errors import ExportError
from twinop.export import comparison
from twinop.export.attach import attach_bodies, call_sites, custom_nodes
from twinop.export.fuse_add_norm import fuse_sums
from twinop.export.inputs import (
    FLOATING,
    Dynamic,
    Inputs,
    bind_inputs,
    check_dynamic,
    check_opset,
    leaves,
    resized,
)
from twinop.export.record_body import CallSite
from twinop.export.report import ExportReport
from twinop.export.routes import ROUTES, fixed_axis, quiet, run_route
from twinop.export.standard_nodes import replace_nodes
from twinop.export.state import evaluation
from twinop.record import Record

# protobuf ends at 2 GiB; half a GiB is left for everything that is not a weight.
EXTERNAL_DATA_BYTES = 1536 * 1024 * 1024


def export(
    model: torch.nn.Module,
    args: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    exporter: str = "dynamo",
    dynamic: Dynamic | None = None,
    opset: int = 20,
    bodies: bool = True,
    replace: Sequence[str] = (),
    fuse: bool = True,
    verify: bool = True,
    library: deploy.Libraries = None,
    external_data_bytes: int = EXTERNAL_DATA_BYTES,
    progress: Callable[[str], None] = lambda step: None,
) -> ExportReport:
    """Exports a torch model that uses twinop's ops, and keeps the file only if it passes every check.

    The model is exported in eval mode and left as it was, each submodule in its own mode. The file then
    carries a function body for each op of twinop's. Its metadata holds twinop's version (`twinop.version`)
    and the hash of each op's schema (`twinop.schema.CustomRelu`). It must pass `onnx.checker` with full_check
    and run in ONNX Runtime's CPU provider as torch does, also on other data with one more entry on every
    dynamic axis. Whether it runs without the library is reported. ONNX Runtime runs in a process of its own,
    so that a crash there is reported as well.

    Args:
        model: any module; `torch_op.replace_modules(model)` puts twinop's ops into it.
        args: example inputs, a tensor or a tuple.
        path: the file to write; an existing one is replaced. Weights of `external_data_bytes` or more go to
            `<path>.data` beside it.
        kwargs: example inputs by name.
        exporter: "dynamo" (torch.export) or "torchscript" (tracing).
        dynamic: axes that stay open, by input: `{"x": [0]}`, or with names of one's own
            `{"x": {0: "batch"}}`. The rank is fixed.
        opset: of the standard operators, 20 to 23.
        bodies: attach the function bodies.
        replace: ops that take the place of standard operators, such as "add" and "softmax" (see
            `twinop.export.standard_nodes`): what `torch_op.replace_modules` does not see.
        fuse: make one node of a sum and a norm of twinop's behind it; the results keep every bit.
        verify: compare with torch in ONNX Runtime.
        library: the libraries for that, one or several; for each domain of the model that has none here,
            the smallest one found that has its ops.
        progress: called with the name of each step.

    Raises:
        ExportError: wrong arguments, a model that cannot be exported, or a file that does not do what torch
            does.
    """
    target = Path(path)
    if exporter not in ROUTES:
        raise ExportError(f"exporter {exporter!r} is not known; expected one of: {', '.join(ROUTES)}")
    check_opset(opset)
    inputs = bind_inputs(model, args, kwargs)
    axes = check_dynamic(dynamic, inputs.tensors)
    with evaluation(model), _work_folder(target) as folder:
        progress("running the model in torch")
        expected = _outputs(model, inputs, inputs.tensors)
        progress(f"exporting ({exporter})")
        names = _output_names(expected, inputs)
        records = torch_op.records()
        exported, notes = run_route(exporter, model, inputs, names, axes, opset, records, folder)
        progress("attaching function bodies, checking")
        with quiet():
            replaced = replace_nodes(exported, replace, records)
            fused = fuse_sums(exported, records) if fuse else {}
            calls = _finish(exported, records, bodies)
        draft = folder / target.name
        data = _save(exported, draft, external_data_bytes)
        _check(draft, axes)
        report = _describe(exported, target, exporter, [draft] + ([data] if data else []))
        report.bodies, report.replaced, report.fused = bodies, replaced, fused
        report.notes += notes + _mixed_dtypes(calls if bodies else {})
        if verify:
            progress("comparing with torch in ONNX Runtime")
            cases = [(inputs.tensors, list(expected.values()))]
            if axes:
                try:
                    cases.append(_larger_case(model, inputs, axes))
                except ExportError as error:
                    report.notes.append(f"not compared at other sizes: {error}")
            report.resized = len(cases) > 1
            comparison.verify(report, draft, exported, library, calls, cases)
        _publish([*([data] if data else []), draft], target.parent)  # the model last: it needs its data
    report.data_path = target.parent / data.name if data else None
    return report


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, so that a failed or interrupted export leaves nothing behind."""
    if target.is_dir():
        raise ExportError(f"{target}: is a folder; expected a file name such as {target / 'model.onnx'}")
    try:
        folder = tempfile.TemporaryDirectory(prefix=".twinop-export-", dir=target.parent)
    except OSError as error:
        raise ExportError(
            f"{target}: cannot be written, {target.parent}: {error.strerror}. Name another folder, or make "
            "this one"
        ) from error
    with folder as name:
        yield Path(name)


def _outputs(
    model: torch.nn.Module, inputs: Inputs, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    try:
        # Copies: a model may write to its inputs.
        with torch.no_grad():
            result = inputs.call(model, {name: tensor.clone() for name, tensor in tensors.items()})
    except Exception as error:
        raise ExportError(f"the model fails on its example inputs, in torch: {error}") from error
    outputs = dict(leaves(result))
    if not outputs:
        raise ExportError(f"the model returns {type(result).__name__}; expected at least one tensor")
    return outputs


def _larger_case(
    model: torch.nn.Module, inputs: Inputs, axes: Mapping[str, Mapping[int, str]]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Inputs with one more entry on each dynamic axis, and torch's outputs.

    Raises:
        ExportError: torch runs the model with none of them.
    """
    try:
        larger = resized(inputs.tensors, axes, fresh=True)
        return larger, list(_outputs(model, inputs, larger).values())
    except ExportError:  # values that depend on each other, such as sorted offsets
        larger = resized(inputs.tensors, axes, fresh=False)
        return larger, list(_outputs(model, inputs, larger).values())


def _output_names(outputs: Mapping[str, torch.Tensor], inputs: Inputs) -> list[str]:
    """y, or y_0, y_1 ..., or a dict's keys."""
    names = [name if name and not name[0].isdigit() else f"y_{name}".rstrip("_") for name in outputs]
    return [f"{name}_out" if name in inputs.tensors else name for name in names]


def _finish(model: ir.Model, records: Mapping[str, Record], bodies: bool) -> dict[Record, list[CallSite]]:
    """Bodies, shapes and metadata; returns the ops used and their calls."""
    ClearMetadataAndDocStringPass()(model)  # source paths and stack traces of the machine that exported
    if bodies:
        attach_bodies(model, records, allow_missing=True)
    ShapeInferencePass(check_type=True, strict_mode=False)(model)
    nodes = custom_nodes(model, records)
    calls = {
        record: call_sites(nodes[record.node_type], record)
        for record in records.values()
        if record.node_type in nodes
    }
    model.metadata_props["twinop.version"] = twinop.__version__
    for record in calls:
        model.metadata_props[record.metadata_key] = record.schema_hash
    return calls


def _mixed_dtypes(calls: Mapping[Record, Sequence[CallSite]]) -> list[str]:
    notes = []
    for record, sites in calls.items():
        dtypes = {dtype for call in sites for dtype in call.dtypes.values()} & FLOATING.keys()
        if "float64" in dtypes and len(dtypes) > 1:
            notes.append(
                f"{record.onnx_name} is called with {', '.join(sorted(dtypes))}: a model holds one body per "
                "op, so without the library all of these calls compute in float64"
            )
    return notes


def _save(model: ir.Model, path: Path, external_data_bytes: int) -> Path | None:
    """Writes the file, and its weights beside it if they are too many; returns the path of those."""
    weights = [
        value.const_value for value in model.graph.initializers.values() if value.const_value is not None
    ]
    external = sum(tensor.nbytes for tensor in weights) >= external_data_bytes
    data = path.with_name(f"{path.name}.data") if external else None
    try:
        ir.save(model, path, format="protobuf", external_data=data.name if data else None)
    except OSError as error:
        raise ExportError(f"{path.name}: cannot be written: {error.strerror or error}") from error
    return data


def _publish(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        try:
            os.replace(file, folder / file.name)
        except OSError as error:
            raise ExportError(f"{folder / file.name}: cannot be written: {error.strerror}") from error


def _check(path: Path, axes: Mapping[str, Mapping[int, str]]) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"onnx.checker refuses the exported model: {error}") from error
    graph = onnx.load(str(path), load_external_data=False).graph
    for entry in graph.input:
        for axis in axes.get(entry.name, {}):
            dim = entry.type.tensor_type.shape.dim[axis]
            if not dim.HasField("dim_param"):
                raise ExportError(fixed_axis(entry.name, axis, dim.dim_value))


def _describe(model: ir.Model, target: Path, exporter: str, files: Sequence[Path]) -> ExportReport:
    def signature(values: Sequence[ir.Value]) -> dict[str, str]:
        return {
            str(value.name): f"{value.dtype.name.lower() if value.dtype else '?'} {value.shape}"
            for value in values
        }

    nodes = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )
    return ExportReport(
        path=target,
        exporter=exporter,
        opsets={
            domain or "ai.onnx": version for domain, version in sorted(model.graph.opset_imports.items())
        },
        inputs=signature(model.graph.inputs),
        outputs=signature(model.graph.outputs),
        nodes=dict(sorted(nodes.items())),
        size=sum(file.stat().st_size for file in files),
    )
