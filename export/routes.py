"""torch's two exporters, each to an onnx_ir model without function bodies, and without their noise."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript import version_converter

from twinop.errors import ExportError, TwinopError
from twinop.export.dynamo import translation_table
from twinop.export.inputs import Inputs
from twinop.export.schema import registered_schemas
from twinop.export.torchscript import register_symbolics
from twinop.record import Record

DynamicAxes = Mapping[str, Mapping[int, str]]
Route = Callable[
    [torch.nn.Module, Inputs, Sequence[str], DynamicAxes, int, Mapping[str, Record], Path], ir.Model
]

_TORCHSCRIPT_OPSET = 20  # the newest that the TorchScript exporter writes


def _dynamo(
    model: torch.nn.Module,
    inputs: Inputs,
    output_names: Sequence[str],
    dynamic: DynamicAxes,
    opset: int,
    records: Mapping[str, Record],
    folder: Path,
) -> ir.Model:
    hints = [
        dict.fromkeys(dynamic[name], torch.export.Dim.DYNAMIC) if name in dynamic else None
        for name in inputs.tensors
    ]
    for op in (torch.ops.aten.gru.input, torch.ops.aten.lstm.input):
        # torch 2.13 leaves the layer unrolled there, for the next export.
        getattr(op, "_dispatch_cache", {}).clear()
    program = torch.onnx.export(
        model if inputs.plain else _OfTensors(model, inputs),
        tuple(inputs.tensors.values()),
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=(tuple(hints) if inputs.plain else {"tensors": tuple(hints)}) if dynamic else None,
        input_names=list(inputs.tensors),
        output_names=list(output_names),
        custom_translation_table=translation_table(records),
        verbose=False,
    )
    assert program is not None
    # torch's own (s77) -> the user's; axes that the model makes equal share the first
    names: dict[str | ir.SymbolicDim, str] = {}
    for value in program.model.graph.inputs:
        for axis, name in dynamic.get(str(value.name), {}).items():
            size = value.shape[axis] if value.shape is not None else None
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, name)
    program.rename_axes(names)
    nodes = list(program.model.graph.all_nodes())
    if any(node.op_type in ("GRU", "LSTM", "RNN") for node in nodes):
        # Behind these nodes torch declares an open time axis with the example's size.
        for value in (value for node in nodes for value in node.outputs):
            value.shape = None
        _infer_sizes(program.model, records)
    if not inputs.plain:
        _name_as_in_the_model(program.model)
    return program.model


def _infer_sizes(model: ir.Model, records: Mapping[str, Record]) -> None:
    with registered_schemas(record for record in records.values() if not record.is_backward):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _torchscript(
    model: torch.nn.Module,
    inputs: Inputs,
    output_names: Sequence[str],
    dynamic: DynamicAxes,
    opset: int,
    records: Mapping[str, Record],
    folder: Path,
) -> ir.Model:
    register_symbolics(records)
    path = folder / "traced" / "model.onnx"
    path.parent.mkdir()
    torch.onnx.export(
        _OfTensors(model, inputs),  # given the model itself, torch makes inputs of forward's Python defaults
        tuple(inputs.tensors.values()),
        str(path),  # not into memory: over 2 GB the weights go beside it
        dynamo=False,
        opset_version=min(opset, _TORCHSCRIPT_OPSET),
        dynamic_axes={name: dict(axes) for name, axes in dynamic.items()},
        input_names=list(inputs.tensors),
        output_names=list(output_names),
        verbose=False,
    )
    exported = ir.load(path)
    _name_as_in_the_model(exported)
    if opset > _TORCHSCRIPT_OPSET:
        version_converter.convert_version(exported, opset)
        if exported.graph.opset_imports[""] != opset:
            raise ExportError(
                f"the model cannot be brought from opset {_TORCHSCRIPT_OPSET}, where the TorchScript "
                f"exporter ends, to {opset}. Use opset {_TORCHSCRIPT_OPSET}, or the dynamo exporter"
            )
    _forget_invented_sizes(exported)
    _infer_sizes(exported, records)
    return exported


class _OfTensors(torch.nn.Module):
    """The model as a function of its tensors alone; all other arguments are constants."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.training = False  # the TorchScript exporter gives its mode to the whole model afterwards

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.inputs.call(self.model, dict(zip(self.inputs.tensors, tensors, strict=True)))


def _name_as_in_the_model(exported: ir.Model) -> None:
    """Takes the wrapper's name off: the weight `model.fc.weight` becomes `fc.weight` again."""
    weights = exported.graph.initializers
    for name in [name for name in weights if name.startswith("model.")]:
        if (plain := name.removeprefix("model.")) not in weights:
            weights[name].name = plain
    for node in exported.graph.all_nodes():
        node.name = (node.name or "").removeprefix("/model")


def _forget_invented_sizes(model: ir.Model) -> None:
    """The TorchScript exporter gives each dynamic size a new name after an op that it does not know. The
    ops' own rules find the inputs' names again, and equal names let ONNX Runtime reuse memory."""
    given = {
        dim.value
        for value in model.graph.inputs
        for dim in value.shape or ()
        if isinstance(dim, ir.SymbolicDim)
    }
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                dims = [
                    None if isinstance(d, ir.SymbolicDim) and d.value not in given else d for d in value.shape
                ]
                value.shape = ir.Shape(dims)


_FIXED_AXIS = re.compile(r"inferred a static shape of (\d+) for dimension inputs\['(\w+)'\]\.shape\[(\d+)\]")


def fixed_axis(name: str, axis: int, size: object) -> str:
    return (
        f"axis {axis} of {name} was to stay dynamic, but the model fixes it to {size}. Leave it out of "
        "dynamic, or change the model: a size used as a Python number, such as an op's attribute, fixes it"
    )


ROUTES: dict[str, Route] = {"dynamo": _dynamo, "torchscript": _torchscript}


def run_route(exporter: str, *arguments: Any) -> tuple[ir.Model, list[str]]:
    """Calls a route; returns its model, whose weights may lie in `folder`, and warnings for the user.

    Raises:
        ExportError: torch cannot export the model.
    """
    with quiet() as caught:
        try:
            model = ROUTES[exporter](*arguments)
        except Exception as error:
            cause = _root_cause(error)
            if isinstance(cause, TwinopError):
                raise ExportError(str(cause)) from error
            text = f"{type(cause).__name__}: {_shorten(str(cause))}"
            if fixed := _FIXED_AXIS.search(str(cause)):
                raise ExportError(fixed_axis(fixed[2], int(fixed[3]), fixed[1])) from error
            raise ExportError(f"torch's {exporter} exporter cannot export the model. {text}") from error
    return model, list(dict.fromkeys(_shorten(str(entry.message)) for entry in caught))


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Silences the exporters and collects the tracer's warnings, which say where a model may be wrong."""
    # torch prints the whole graph of a model that its TorchScript exporter refuses.
    silenced = mock.patch.object(torch._C, "_jit_onnx_log", lambda *_: None, create=True)
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    kept: list[warnings.WarningMessage] = []
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with silenced, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield kept
        kept += [entry for entry in caught if issubclass(entry.category, torch.jit.TracerWarning)]
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error, TwinopError):
        error = error.__cause__
    return error


def _shorten(text: str) -> str:
    """The first lines of an exporter's message, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]
