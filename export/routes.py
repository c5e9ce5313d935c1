"""Runs torch's two exporters: each returns an onnx_ir model without function bodies, and prints nothing."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from onnxscript import version_converter

from twinop.deploy import wire
from twinop.errors import ExportError, TwinopError, option
from twinop.model.calls import infer_types
from twinop.model.folding import fold_constants
from twinop.record.dtypes import to_array
from twinop.record.op_spec import OpSpec
from twinop.system.quiet import quiet

from .dynamo import translation_table
from .inputs import Inputs, leaves
from .state import kept_state
from .torchscript import register_symbolics

_TORCHSCRIPT_OPSET = 20  # the newest that the TorchScript exporter writes


@dataclass(frozen=True)
class Source:
    """What an exporter gets."""

    model: torch.nn.Module
    inputs: Inputs
    output_names: Sequence[str]  # of the graph's outputs
    dynamic: Mapping[str, Mapping[int, str]]  # the dynamic axes of each input, with their names
    opset: int
    records: Mapping[str, OpSpec]  # the ops by name
    folder: Path  # an empty one, for files that the model refers to


def _dynamo(source: Source) -> ir.Model:
    inputs, dynamic = source.inputs, source.dynamic
    axes = tuple(dict(dynamic[name]) if name in dynamic else None for name in inputs.tensors)
    for op in (torch.ops.aten.gru.input, torch.ops.aten.lstm.input):
        # torch 2.13 caches the decomposed layer there, which would change the next export.
        getattr(op, "_dispatch_cache", {}).clear()
    printed = mock.patch("torch.export._trace.print", lambda *_, **__: None, create=True)  # whole graphs
    with kept_state(source.model), printed:
        program = torch.onnx.export(
            source.model if inputs.plain else _TensorFunction(source.model, inputs),
            tuple(inputs.tensors.values()),
            dynamo=True,
            opset_version=source.opset,
            dynamic_shapes=(axes if inputs.plain else {"tensors": axes}) if dynamic else None,
            input_names=list(inputs.tensors),
            output_names=list(source.output_names),
            custom_translation_table=translation_table(source.records),
            verbose=False,
            optimize=False,  # it would take small constants for 0
        )
    assert program is not None
    model = program.model
    InlinePass()(model)
    _promote_concatenated(model)
    fold_constants(model)
    nodes = list(model.graph.all_nodes())
    if any(node.op_type in ("GRU", "LSTM", "RNN") for node in nodes):
        # torch declares a dynamic time axis after these nodes with the example's size.
        for value in (value for node in nodes for value in node.outputs):
            value.shape = None
        infer_types(model, source.records.values())
    if not inputs.plain:
        _remove_wrapper_name(model)
    return model


def _promote_concatenated(model: ir.Model) -> None:
    """Casts what `torch.stack` and `torch.concat` promote: torch's exporter leaves the dtypes apart."""
    for node in list(model.graph.all_nodes()):
        dtype = node.outputs[0].dtype
        if node.op_type != "Concat" or dtype is None:
            continue
        for index, value in enumerate(node.inputs):
            maker, source = value.producer() if value is not None else None, value
            if maker is not None and maker.op_type == "Unsqueeze":  # its type is not declared
                source = maker.inputs[0]
            known = None if source is None else source.dtype
            if value is not None and known not in (None, dtype):
                cast = ir.node("Cast", [value], {"to": dtype})
                cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
                node.prepend(cast)
                node.replace_input_with(index, cast.outputs[0])


def _promote_norms(model: ir.Model) -> None:
    """Computes norms of 16 bits with gains in fp32, as autocast makes them, in fp32: ONNX has one dtype."""
    for node in [node for node in model.graph.all_nodes() if node.op_type == "LayerNormalization"]:
        (x, gain, *others), result, graph = node.inputs, node.outputs[0], node.graph
        if x is None or gain is None or x.dtype is None or gain.dtype in (None, x.dtype) or graph is None:
            continue
        to = ir.node("Cast", [x], {"to": gain.dtype})
        norm = ir.Node("", node.op_type, [*to.outputs, gain, *others], [*node.attributes.values()])
        back = ir.node("Cast", norm.outputs, {"to": x.dtype})
        back.outputs[0].shape, back.outputs[0].dtype = result.shape, x.dtype
        ir.convenience.replace_nodes_and_values(graph, node, [node], [to, norm, back], [result], back.outputs)


def _torchscript(source: Source) -> ir.Model:
    register_symbolics(source.records)
    path = source.folder / "traced" / "model.onnx"
    path.parent.mkdir()
    for folding in (True, False):  # folded constants are of the buffers as the traced run left them
        copies = tuple(tensor.clone() for tensor in source.inputs.tensors.values())  # it may write to them
        with kept_state(source.model) as written:
            torch.onnx.export(
                # Given the model itself, torch makes inputs of forward's Python defaults.
                _TensorFunction(source.model, source.inputs),
                copies,
                str(path),  # not into memory: weights over 2 GB are stored beside the file
                dynamo=False,
                opset_version=min(source.opset, _TORCHSCRIPT_OPSET),
                dynamic_axes={name: dict(axes) for name, axes in source.dynamic.items()},
                input_names=list(source.inputs.tensors),
                output_names=list(source.output_names),
                do_constant_folding=folding,
                verbose=False,
            )
        if not written.buffers:
            break
    model = ir.load(wire.view(path))
    for record in source.records.values():
        if record.domain in model.graph.opset_imports:  # torch writes version 1 of every domain
            model.graph.opset_imports[record.domain] = record.domain_version
    _remove_wrapper_name(model)
    for name, old in written.buffers.items():  # the file has what the traced run wrote
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = ir.tensor(to_array(old), name=name)
    if source.opset > _TORCHSCRIPT_OPSET:
        version_converter.convert_version(model, source.opset)
        if model.graph.opset_imports[""] != source.opset:
            raise ExportError(
                f"the model cannot be brought from opset {_TORCHSCRIPT_OPSET}, where the TorchScript "
                f"exporter ends, to {source.opset}. Use {option('opset', _TORCHSCRIPT_OPSET)}, or the "
                "dynamo exporter"
            )
    _remove_unknown_sizes(model)
    infer_types(model, source.records.values())
    return model


class _TensorFunction(torch.nn.Module):
    """Wraps a model as a function of its tensors; all other arguments are constants."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.training = False  # the TorchScript exporter gives its mode to the whole model afterwards

    def forward(self, *tensors: torch.Tensor) -> Any:
        result = self.inputs.call(self.model, dict(zip(self.inputs.tensors, tensors, strict=True)))
        wanted = self.inputs.returned  # a size is a tensor while torch traces
        return tuple(each for name, each in leaves(result, outputs=True) if not wanted or name in wanted)


def _remove_wrapper_name(model: ir.Model) -> None:
    """Renames what `_TensorFunction` prefixed: the weight `model.fc.weight` becomes `fc.weight` again."""
    weights = model.graph.initializers
    for name in [name for name in weights if name.startswith("model.")]:
        if (plain := name.removeprefix("model.")) not in weights:
            weights[name].name = plain
    for node in model.graph.all_nodes():
        node.name = (node.name or "").removeprefix("/model")


def _remove_unknown_sizes(model: ir.Model) -> None:
    """Removes the names of sizes that the inputs do not have: the TorchScript exporter makes new ones after
    ops that it does not know. Inference with the ops' rules finds the inputs' names, with which ONNX Runtime
    reuses memory."""
    sizes = [size for value in model.graph.inputs for size in value.shape or ()]
    known = {size.value for size in sizes if isinstance(size, ir.SymbolicDim)}
    for value in (value for node in model.graph.all_nodes() for value in node.outputs):
        if value.shape is not None:
            value.shape = ir.Shape(
                None if isinstance(size, ir.SymbolicDim) and size.value not in known else size
                for size in value.shape
            )


def _separate_outputs(model: ir.Model, source: Source) -> None:
    """Gives each output a value of its own: torch renames an input or another output that is returned."""
    if len(model.graph.inputs) == len(source.inputs.tensors):
        for value, name in zip(model.graph.inputs, source.inputs.tensors, strict=True):
            value.name = name
    outputs, seen = model.graph.outputs, set[ir.Value]()
    for index, (value, name) in enumerate(zip(list(outputs), source.output_names, strict=True)):
        if value.producer() is None or value in seen:
            if value.is_initializer():
                value.name = f"{name}_value"
            node = ir.node("Identity", [value])
            model.graph.append(node)
            outputs[index] = node.outputs[0]
            outputs[index].shape, outputs[index].type = value.shape, value.type
        seen.add(outputs[index])
        outputs[index].name = name


_FIXED_AXIS = re.compile(r"inferred a static shape of (\d+) for dimension inputs\['(\w+)'\]\.shape\[(\d+)\]")


def fixed_axis(name: str, axis: int, size: object, source: Source) -> ExportError:
    """Makes the error for a dynamic axis that the model specializes."""
    fixed = [
        (other, at)
        for other, tensor in source.inputs.tensors.items()
        for at, length in enumerate(tensor.shape)
        if str(length) == str(size) and at not in source.dynamic.get(other, {})
    ]
    cure = ""
    if fixed:
        other, at = min(fixed, key=lambda each: each[1] != axis)
        cure = f"Axis {at} of {other} has this size, too: if the two go together, make both dynamic. "
    return ExportError(
        f"axis {axis} of {name} was to stay dynamic, but the model fixes it to {size}. {cure}Leave it out of "
        f"{option('dynamic')}, or change the model: a size used as a Python number, such as an op's "
        "attribute, fixes it"
    )


ROUTES = {"dynamo": _dynamo, "torchscript": _torchscript}


def run_route(exporter: str, source: Source) -> tuple[ir.Model, list[str]]:
    """Exports with one of `ROUTES`, if torch can; returns the model and warnings for the user."""
    with quiet_torch() as caught:
        try:
            model = ROUTES[exporter](source)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, TwinopError):
                raise ExportError(str(cause)) from error
            if fixed := _FIXED_AXIS.search(str(cause)):
                raise fixed_axis(fixed[2], int(fixed[3]), fixed[1], source) from error
            text = f"{type(cause).__name__}: {_shorten(str(cause))}"
            parts = {f"{name} ({type(part).__name__})": part for name, part in source.model.named_modules()}
            if of_ao := [name for name, part in parts.items() if "ao.nn.quant" in type(part).__module__]:
                text = f"It does not take quantized modules of torch.ao, as {of_ao[0]}. Export the model "
                text += "before it is quantized, and quantize the file: onnxruntime.quantization"
            elif exporter == "dynamo":
                text = f"{text.rstrip('.')}. {option('exporter', 'torchscript')} may export it"
            raise ExportError(f"torch's {exporter} exporter cannot export the model. {text}") from error
    _promote_norms(model)
    _separate_outputs(model, source)
    for value in model.graph.inputs:
        for axis in source.dynamic.get(str(value.name), {}):
            if value.shape is not None and isinstance(value.shape[axis], int):
                raise fixed_axis(str(value.name), axis, value.shape[axis], source)
    return model, list(dict.fromkeys(_shorten(str(entry.message)) for entry in caught))


@contextmanager
def quiet_torch() -> Iterator[list[warnings.WarningMessage]]:
    """Silences the exporters and collects the tracer's warnings, which say where a model may be wrong."""
    # torch prints the whole graph of a model that its TorchScript exporter refuses.
    silenced = mock.patch.object(torch._C, "_jit_onnx_log", lambda *_: None, create=True)
    kept: list[warnings.WarningMessage] = []
    with silenced, quiet() as caught:
        yield kept
    kept += [entry for entry in caught if issubclass(entry.category, torch.jit.TracerWarning)]


def root_cause(error: BaseException) -> BaseException:
    """Returns the error from which an exporter's error comes."""
    while error.__cause__ is not None and not isinstance(error, TwinopError):
        error = error.__cause__
    return error


def _shorten(text: str) -> str:
    """Joins the first lines of an exporter's message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]
