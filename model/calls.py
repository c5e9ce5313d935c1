"""Reads the nodes of twinop's ops in a model: each call, as the op's record describes it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from twinop.deploy.check_nodes import node_problems
from twinop.errors import ExportError
from twinop.libraries.library import Library, in_use
from twinop.record.dtypes import dtype_name
from twinop.record.op_schema import default_of
from twinop.record.op_spec import DOMAIN, OpSpec

from .schema import ATTRIBUTE_TYPES, ONNX_TYPES, onnx_value, registered_schemas


@dataclass(frozen=True)
class Call:
    """One node of an op."""

    record: OpSpec
    node: ir.Node
    dtypes: Mapping[str, str]  # of every input and output by name: one of the record's combinations
    attributes: Mapping[str, Any]  # the value of every attribute by name, as ONNX holds it

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs that the node has, by name."""
        pairs = zip(self.record.inputs, self.node.inputs, strict=False)
        return {entry.name: value for entry, value in pairs if value is not None}


def label_of(node: ir.Node) -> str:
    """Returns the node as error messages name it."""
    return f"node {node.name or node.outputs[0].name}"


def read_call(record: OpSpec, node: ir.Node) -> Call:
    """Reads a node of an op; ExportError: it does not fit the record, or a dtype is unknown."""
    label = label_of(node)
    types = {value.name or "": value.dtype for value in node.inputs if value is not None and value.dtype}
    for problem in node_problems(ir.to_proto(node), types, record):
        raise ExportError(f"{label} ({record.onnx_name}): {problem}")
    call = Call(record, node, {}, _attributes(record, node))
    dtypes = {}
    for name, value in call.inputs.items():
        if value.dtype is None:
            raise ExportError(
                f"{label}: the type of input {name} ({value.name}) is not known. Add it to the model's "
                "value_info"
            )
        dtypes[name] = dtype_name(value.dtype)
    combination = record.combination_of(dtypes)
    assert combination is not None, "node_problems compares the dtypes"
    return replace(call, dtypes=combination)


def _attributes(record: OpSpec, node: ir.Node) -> dict[str, Any]:
    values = {entry.name: default_of(entry) for entry in record.attributes}
    for entry in record.attributes:
        if entry.name in node.attributes:
            values[entry.name] = onnx_value(entry, node.attributes[entry.name].value)
    return values


def make_call(
    record: OpSpec, dtypes: Mapping[str, str], present: Collection[str], attributes: Mapping[str, Any]
) -> Call:
    """Makes a call that belongs to no model, to trace a function body or to run it: of dtypes that are one of
    the record's combinations, with the inputs of these names and values of all attributes."""

    def value(name: str) -> ir.Value:
        return ir.val(name, dtype=ONNX_TYPES[dtypes[name]])

    inputs = [value(entry.name) if entry.name in present else None for entry in record.inputs]
    given = [entry for entry in record.attributes if attributes[entry.name] is not None]
    named = [ir.Attr(each.name, ATTRIBUTE_TYPES[each.kind], attributes[each.name]) for each in given]
    outputs = [value(name) for name in record.outputs]
    node = ir.Node(record.domain, record.onnx_name, inputs, named, outputs=outputs, name="node")
    return Call(record, node, dtypes, attributes)


def paths_in_use(model: ir.Model, libraries: Iterable[Library]) -> list[Path]:
    """Returns the files of the libraries that have an op of a model's nodes, each once."""
    nodes = {(node.domain, node.op_type) for graph in graphs_of(model) for node in graph.all_nodes()}
    return [*dict.fromkeys(library.path for library in in_use(libraries, nodes))]


def graphs_of(model: ir.Model) -> list[ir.Graph | ir.Function]:
    return [model.graph, *model.functions.values()]


def name_standard_domain(model: ir.Model) -> None:
    """Imports the standard operators as "", which ONNX also names "ai.onnx"; onnx_ir does so in nodes."""
    for graph in graphs_of(model):
        if (opset := graph.opset_imports.pop("ai.onnx", None)) is not None:
            graph.opset_imports.setdefault("", opset)


def find_calls(model: ir.Model, records: Mapping[str, OpSpec]) -> dict[OpSpec, list[Call]]:
    """Finds all calls of ops in a model, which gets the types that it lacks; ExportError: a node's op is not
    among the records, or a node does not fit its record."""
    by_type = {record.node_type: record for record in records.values() if not record.is_backward}
    domains = {DOMAIN, *(record.domain for record in records.values())}
    nodes: dict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in (node for graph in graphs_of(model) for node in graph.all_nodes()):
        if node.domain in domains:
            nodes[node.domain, node.op_type].append(node)
    for domain, op_type in nodes:
        if (domain, op_type) not in by_type:
            loaded = sorted(name for other, name in by_type if other == domain)
            raise ExportError(
                f"the model has a node {domain}.{op_type}, which no loaded library has; loaded ops: "
                f"{', '.join(loaded)}. Load its library with twinop.torch_op.load(path)"
            )
    inputs = [value for found in nodes.values() for node in found for value in node.inputs]
    if any(value is not None and value.dtype is None for value in inputs):
        infer_types(model, [by_type[node_type] for node_type in nodes])
    pairs = [(by_type[node_type], found) for node_type, found in nodes.items()]
    return {record: [read_call(record, node) for node in found] for record, found in pairs}


def infer_types(model: ir.Model, records: Iterable[OpSpec]) -> None:
    """Runs ONNX's type and shape inference, which then knows these ops."""
    with registered_schemas(record for record in records if not record.is_backward):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
