"""Reads the nodes of twinop's ops in a model: each call, as the op's record describes it."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from twinop.errors import ExportError
from twinop.record import DOMAIN, Attribute, Record

from .schema import (
    ATTRIBUTE_TYPES,
    DTYPE_NAMES,
    ONNX_TYPES,
    combination_of,
    default_of,
    onnx_value,
    registered_schemas,
)


@dataclass(frozen=True)
class Call:
    """One node of an op.

    Attributes:
        dtypes: the dtype of every input and output by name: one of the record's combinations.
        attributes: the value of every attribute by name, as ONNX holds it.
    """

    record: Record
    node: ir.Node
    dtypes: Mapping[str, str]
    attributes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The node as error messages name it."""
        return label_of(self.node)

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs that the node has, by name."""
        pairs = zip(self.record.inputs, self.node.inputs, strict=False)
        return {entry.name: value for entry, value in pairs if value is not None}


def label_of(node: ir.Node) -> str:
    """Returns the node as error messages name it."""
    return f"node {node.name or node.outputs[0].name}"


def read_call(record: Record, node: ir.Node) -> Call:
    """Reads a node of the record's op.

    Raises:
        ExportError: the node does not fit the record, or the dtype of an input is not known.
    """
    attributes = _attributes(record, node)
    call = Call(record, node, {}, attributes)
    if len(node.inputs) > len(record.inputs) and not record.has_repeated_input:
        raise ExportError(
            f"{call.label} has {len(node.inputs)} inputs; {record.onnx_name} takes {len(record.inputs)}"
        )
    if missing := [e.name for e in record.inputs if not e.optional and e.name not in call.inputs]:
        raise ExportError(f"{call.label}: {record.onnx_name} needs input {', '.join(missing)}")
    dtypes = {}
    for name, value in call.inputs.items():
        if value.dtype is None:
            raise ExportError(
                f"{call.label}: the type of input {name} ({value.name}) is not known. "
                "Add it to the model's value_info"
            )
        dtypes[name] = DTYPE_NAMES.get(value.dtype, value.dtype.name.lower())
    return Call(record, node, combination_of(record, dtypes, call.label), attributes)


def _attributes(record: Record, node: ir.Node) -> dict[str, Any]:
    label = label_of(node)
    known = {entry.name: entry for entry in record.attributes}
    values = {entry.name: default_of(entry) for entry in record.attributes}
    for name, given in node.attributes.items():
        attribute = known.get(name)
        if attribute is None:
            raise ExportError(
                f"{label}: {record.onnx_name} has no attribute {name}; it has: "
                f"{', '.join(known) or 'none'} ({record.schema})"
            )
        if given.type is not ATTRIBUTE_TYPES[attribute.kind]:
            raise ExportError(
                f"{label}: attribute {name} of {record.onnx_name} is a {given.type.name}, expected "
                f"{attribute.kind}"
            )
        values[name] = onnx_value(attribute, given.value)
        if values[name] == () and default_of(attribute) != ():
            raise ExportError(
                f"{label}: attribute {name} is an empty list, which ONNX Runtime cannot tell from a missing "
                f"one (default {attribute.default_text}). Pass the default, or make an empty list the default"
            )
    if missing := [e.name for e in record.attributes if e.required and e.name not in node.attributes]:
        raise ExportError(f"{label}: {record.onnx_name} needs attribute {', '.join(missing)}")
    return values


def make_call(
    record: Record, dtypes: Mapping[str, str], present: Collection[str], attributes: Mapping[str, Any]
) -> Call:
    """Makes a call that belongs to no model, to trace a function body or to run it.

    Args:
        dtypes: one of the record's combinations.
        present: the names of the inputs that the node has.
        attributes: the value of every attribute by name.
    """

    def value(name: str) -> ir.Value:
        return ir.val(name, dtype=ONNX_TYPES[dtypes[name]])

    def attribute(entry: Attribute) -> ir.Attr:
        return ir.Attr(entry.name, ATTRIBUTE_TYPES[entry.kind], attributes[entry.name])

    node = ir.Node(
        record.domain,
        record.onnx_name,
        [value(entry.name) if entry.name in present else None for entry in record.inputs],
        [attribute(entry) for entry in record.attributes if attributes[entry.name] is not None],
        outputs=[value(name) for name in record.outputs],
        name="node",
    )
    return Call(record, node, dtypes, attributes)


def op_nodes(model: ir.Model, records: Mapping[str, Record]) -> dict[tuple[str, str], list[ir.Node]]:
    """Returns the nodes of the records' domains by `Record.node_type`, in subgraphs and functions too."""
    domains = {DOMAIN, *(record.domain for record in records.values())}
    found: dict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            if node.domain in domains:
                found[node.domain, node.op_type].append(node)
    return dict(found)


def find_calls(model: ir.Model, records: Mapping[str, Record]) -> dict[Record, list[Call]]:
    """Finds all calls of twinop's ops in a model, which gets the types that it lacks.

    Args:
        records: the ops by name.

    Raises:
        ExportError: a node's op is not among the records, or a node does not fit its record.
    """
    by_type = {record.node_type: record for record in records.values() if not record.is_backward}
    nodes = op_nodes(model, records)
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
    return {
        by_type[node_type]: [read_call(by_type[node_type], node) for node in found]
        for node_type, found in nodes.items()
    }


def infer_types(model: ir.Model, records: Collection[Record]) -> None:
    """Runs ONNX's type and shape inference, which then knows these ops."""
    with registered_schemas(records):
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
