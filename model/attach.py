"""Puts function bodies into a model that has twinop's nodes."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from twinop.errors import ExportError, option
from twinop.record.op_spec import OpSpec

from .bodies import Body, DefaultInput, find_body
from .calls import Call, find_calls, graphs_of, name_standard_domain
from .record_body import trace
from .schema import ATTRIBUTE_TYPES, ONNX_TYPES

OPSETS = range(20, 26)
"""Standard opsets that models may have: string comparison needs 20, onnxscript converts models up to 25."""

AnyModel = TypeVar("AnyModel", ir.Model, onnx.ModelProto)


def attach_bodies(
    model: AnyModel, records: Mapping[str, OpSpec] | None = None, *, allow_missing: bool = False
) -> AnyModel:
    """Gives each of twinop's ops in a model its function body, for runtimes without the library.

    The nodes get every attribute, also those at their defaults: onnx.inliner does not read a function's.
    Where only some nodes of an op omit an optional input, they get its default tensor; if it has none, they
    call an overload of the function (IR 10; without the library ONNX Runtime 1.27). Nodes in functions of the
    model's own get into the graph with them: ONNX infers no types in functions.

    Args:
        model: an `onnx_ir.Model`, which is changed in place, or an `onnx.ModelProto`, which is left as it is.
        records: the ops by name; by default the ops that `twinop.torch_op` has loaded.
        allow_missing: skip ops that have no body.

    Returns the model, of the type given.

    Raises:
        ExportError: an op has no body, is unknown, or its nodes cannot share one; the opset is not
            supported.
    """
    if isinstance(model, onnx.ModelProto):
        return ir.to_proto(attach_bodies(ir.from_proto(model), records, allow_missing=allow_missing))
    if records is None:
        from twinop import torch_op

        records = torch_op.records()
    ours = {record.domain for record in records.values()}
    if any(node.domain in ours for function in model.functions.values() for node in function.all_nodes()):
        InlinePass(lambda function: function.domain not in ours)(model)
    attach_to_calls(model, find_calls(model, records), allow_missing=allow_missing)
    return model


def attach_to_calls(
    model: ir.Model, calls: Mapping[OpSpec, Sequence[Call]], *, allow_missing: bool = False
) -> None:
    """Does what `attach_bodies` does, for calls that have been found (`find_calls`)."""
    name_standard_domain(model)
    opset = model.graph.opset_imports.get("", 0)
    if calls and opset not in OPSETS:
        raise ExportError(
            f"the model has opset {opset}; function bodies need {OPSETS[0]} to {OPSETS[-1]}. Export it with "
            "one of those"
        )
    for record, found in calls.items():
        body = find_body(record.key)
        if body is None and not allow_missing:
            raise ExportError(
                f"op {record.name} has no function body: {record.onnx_name} would need the library "
                "everywhere. Write one (see twinop/model/bodies.py), or export without "
                f"({option('bodies', False)})"
            )
        for call in found:
            _normalize(call)
        if body is not None:
            body.check(record)
            _insert_default_inputs(record, found, body)
            for overload, same in _by_inputs(found).items():
                function = trace(body, same, opset, by_rank=True)
                _omit_outputs(record, same, function)
                function.overload = overload
                for call in same:
                    call.node.overload = overload
                if overload:
                    model.ir_version = max(model.ir_version, 10)  # the first with overloads
                model.functions[function.identifier()] = function
        for graph in graphs_of(model):
            if graph is model.graph or any(node.domain == record.domain for node in graph):
                graph.opset_imports[record.domain] = record.domain_version


def _normalize(call: Call) -> None:
    """Writes every attribute, as onnx.inliner and onnx.reference do not read a function's defaults, and names
    every output. Absent inputs at the end go: onnxslim removes those that a body does not read."""
    record, node = call.record, call.node
    node.resize_inputs(max((at for at, value in enumerate(node.inputs, 1) if value is not None), default=0))
    for entry in record.attributes:
        value = call.attributes[entry.name]
        node.attributes[entry.name] = ir.Attr(entry.name, ATTRIBUTE_TYPES[entry.kind], value)
    node.resize_outputs(len(record.outputs))
    for value, name in zip(node.outputs, record.outputs, strict=True):
        if not value.name:
            value.name = f"{node.name or node.outputs[0].name}_{name}"


def _omit_outputs(record: OpSpec, calls: Sequence[Call], function: ir.Function) -> None:
    """Removes optional outputs at the end that nothing reads: then the kernel does not write them. Where one
    node has readers, all keep the output, and those before it that nothing reads have no name."""

    def is_read(index: int) -> list[bool]:
        values = [call.node.outputs[index] for call in calls]
        return [bool(value.uses()) or value.is_graph_output() for value in values]

    while record.outputs[len(function.outputs) - 1] in record.optional_outputs and not any(is_read(-1)):
        for call in calls:
            call.node.resize_outputs(len(call.node.outputs) - 1)
        function.outputs.pop()
    for index, name in enumerate(record.outputs[: len(function.outputs) - 1]):
        for call, has_reader in zip(calls, is_read(index), strict=True):
            if name in record.optional_outputs and not has_reader:
                call.node.outputs[index].name = ""


def _by_inputs(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Returns the calls with the same inputs by the name of their overload: "" for the fewest inputs."""
    groups = dict[tuple[str, ...], list[Call]]()
    for call in calls:
        groups.setdefault(tuple(call.inputs), []).append(call)
    # ONNX Runtime before 1.27 takes the last one for all nodes, and so refuses those that have fewer inputs.
    first, *others = sorted(groups, key=lambda names: (len(names), names))
    return {"": groups[first]} | {",".join(names): groups[names] for names in others}


def _insert_default_inputs(record: OpSpec, calls: Sequence[Call], body: Body) -> None:
    """Makes all nodes of an op have the same optional inputs, of those that have defaults."""
    for index, entry in enumerate(record.inputs):
        default = body.defaults.get(entry.name)
        lacking = [call for call in calls if entry.name not in call.inputs]
        if default is None or len(lacking) == len(calls):
            continue
        for call in lacking:
            if len(call.node.inputs) <= index:
                call.node.resize_inputs(index + 1)
            call.node.replace_input_with(index, _default_input(call, entry.name, default))


def _default_input(call: Call, name: str, default: DefaultInput) -> ir.Value:
    """Makes the tensor with nodes just before the call's own."""
    node, dtype = call.node, ONNX_TYPES[call.dtypes[name]]
    prefix = f"{node.name or node.outputs[0].name}_{name}"
    attributes, start = call.attributes, default.start
    start = attributes[start] if isinstance(start, str) else start(attributes) if callable(start) else start
    dimensions = {"start": start} if default.along is None else {"start": start, "end": start + 1}
    shaped = node.inputs[0] if default.along is None else call.inputs[default.along]
    number = default.value(call.attributes) if callable(default.value) else default.value
    tape = ir.tape.Tape()
    shape = tape.op("Shape", [shaped], dimensions, output=ir.val(f"{prefix}_shape"))
    if default.ones:
        ones = ir.Tensor(np.ones(default.ones, np.int64))
        first = tape.op("Constant", [], {"value": ones}, output=ir.val(f"{prefix}_ones"))
        shape = tape.op("Concat", [first, shape], {"axis": 0}, output=ir.val(f"{prefix}_whole_shape"))
    value = ir.Tensor(np.array([number]).astype(dtype.numpy()), dtype=dtype)
    result = tape.op("ConstantOfShape", [shape], {"value": value}, output=ir.val(prefix, dtype=dtype))
    assert node.graph is not None
    node.graph.insert_before(node, tape.nodes)
    return result
