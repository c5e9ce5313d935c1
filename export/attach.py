"""Puts function bodies into a model that already has twinop's nodes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from twinop.errors import ExportError
from twinop.export.bodies import Body, Neutral, find_body
from twinop.export.record_body import CallSite, trace
from twinop.export.schema import (
    ATTRIBUTE_TYPES,
    DTYPE_NAMES,
    ONNX_TYPES,
    combination_of,
    default_of,
    onnx_value,
    registered_schemas,
)
from twinop.record import DOMAIN, Attribute, Record

OPSETS = range(20, 24)
"""Standard opsets that models may have: string comparison needs 20, torch's exporter ends at 23."""

AnyModel = TypeVar("AnyModel", ir.Model, onnx.ModelProto)


def attach_bodies(
    model: AnyModel, records: Mapping[str, Record] | None = None, *, allow_missing: bool = False
) -> AnyModel:
    """Gives every op of twinop's in a model its function body, for runtimes without the library.

    Attributes at their default values are taken off the nodes (a body and the library have the same
    defaults). Where some nodes of one op have an optional input and others do not, the others get its neutral
    value.

    Args:
        model: an `onnx_ir.Model`, changed in place, or an `onnx.ModelProto`, left as it is.
        records: the ops by name; by default those that `twinop.torch_op` has loaded.
        allow_missing: leave ops that have no body as they are.

    Returns:
        The model, of the type given.

    Raises:
        ExportError: an op has no body, is unknown, or its nodes cannot share one body; the opset is not
            supported.
    """
    if isinstance(model, onnx.ModelProto):
        return ir.to_proto(attach_bodies(ir.from_proto(model), records, allow_missing=allow_missing))
    if records is None:
        from twinop import torch_op

        records = torch_op.records()
    by_type = {record.node_type: record for record in records.values() if not record.is_backward}
    nodes = custom_nodes(model, records)
    opset = model.graph.opset_imports.get("", 0)
    if nodes and opset not in OPSETS:
        raise ExportError(
            f"the model has opset {opset}; function bodies need {OPSETS[0]} to {OPSETS[-1]}. Export it with "
            "one of those"
        )
    for domain, op_type in nodes:
        if (domain, op_type) not in by_type:
            loaded = sorted(name for other, name in by_type if other == domain)
            raise ExportError(
                f"the model has a node {domain}.{op_type}, which no loaded library has; loaded ops: "
                f"{', '.join(loaded)}. Load its library with twinop.torch_op.load(path)"
            )
    used = [by_type[node_type] for node_type in nodes]
    _complete_types(model, nodes, used)
    for record in used:
        sites = nodes[record.node_type]
        for node in sites:
            _check_node(node, record)
        body = find_body(record.key)
        if body is not None:
            _supply_neutral_inputs(sites, record, body)
            function = trace(record, body, call_sites(sites, record), opset)
            model.functions[function.identifier()] = function
        elif not allow_missing:
            raise ExportError(
                f"op {record.name} has no function body: {record.onnx_name} would need the library "
                "everywhere. Write one (see twinop/export/bodies.py), or export without (bodies=False, "
                "--no-bodies)"
            )
        model.graph.opset_imports[record.domain] = record.domain_version
        for function in model.functions.values():
            if any(node.domain == record.domain for node in function):
                function.opset_imports[record.domain] = record.domain_version
    return model


def custom_nodes(model: ir.Model, records: Mapping[str, Record]) -> dict[tuple[str, str], list[ir.Node]]:
    """The nodes of the records' domains by `Record.node_type`, also in subgraphs and in other functions."""
    domains = {DOMAIN, *(record.domain for record in records.values())}
    found: dict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in _all_nodes(model):
        if node.domain in domains:
            found[node.domain, node.op_type].append(node)
    return dict(found)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _complete_types(
    model: ir.Model, nodes: Mapping[tuple[str, str], list[ir.Node]], used: list[Record]
) -> None:
    """Runs shape inference, with the ops' own rules, where the model does not say a node's types."""
    values = [
        value for sites in nodes.values() for node in sites for value in node.inputs if value is not None
    ]
    if any(value.dtype is None for value in values):
        with registered_schemas(used):
            ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _describe(node: ir.Node) -> str:
    return f"node {node.name or node.outputs[0].name}"


def _check_node(node: ir.Node, record: Record) -> None:
    """The node fits the record; attributes at their defaults are dropped, all outputs get names."""
    known = {entry.name: entry for entry in record.attributes}
    for name in list(node.attributes):
        attribute = known.get(name)
        if attribute is None:
            raise ExportError(
                f"{_describe(node)}: {record.onnx_name} has no attribute {name}; it has: "
                f"{', '.join(known) or 'none'} ({record.schema})"
            )
        if node.attributes[name].type is not ATTRIBUTE_TYPES[attribute.kind]:
            raise ExportError(
                f"{_describe(node)}: attribute {name} of {record.onnx_name} is a "
                f"{node.attributes[name].type.name}, expected {attribute.kind}"
            )
        value = _attribute_value(node, attribute)
        if value == default_of(attribute):
            node.attributes.pop(name)
        elif value == ():
            raise ExportError(
                f"{_describe(node)}: attribute {name} is an empty list, which ONNX Runtime cannot tell from "
                f"a missing one (default {attribute.default_text}). Pass the default, or make an empty list "
                "the default"
            )
    required = [entry.name for entry in record.attributes if entry.required]
    if missing := [name for name in required if name not in node.attributes]:
        raise ExportError(f"{_describe(node)}: {record.onnx_name} needs attribute {', '.join(missing)}")
    if len(node.outputs) < len(record.outputs):
        node.resize_outputs(len(record.outputs))
    for value, name in zip(node.outputs, record.outputs, strict=True):
        if not value.name:  # a function's caller must list every output
            value.name = f"{node.name or node.outputs[0].name}_{name}"


def _attribute_value(node: ir.Node, attribute: Attribute) -> object:
    given = node.attributes.get(attribute.name)
    return default_of(attribute) if given is None else onnx_value(attribute, given.value)


def _given(node: ir.Node, record: Record) -> dict[str, ir.Value]:
    """The node's inputs that are present, by name."""
    if len(node.inputs) > len(record.inputs) and not record.has_repeated_input:
        raise ExportError(
            f"{_describe(node)} has {len(node.inputs)} inputs; {record.onnx_name} takes {len(record.inputs)}"
        )
    pairs = zip(record.inputs, node.inputs, strict=False)
    given = {entry.name: value for entry, value in pairs if value is not None}
    if missing := [entry.name for entry in record.inputs if not entry.optional and entry.name not in given]:
        raise ExportError(f"{_describe(node)}: {record.onnx_name} needs input {', '.join(missing)}")
    return given


def _dtypes(node: ir.Node, record: Record) -> dict[str, str]:
    found = {}
    for name, value in _given(node, record).items():
        if value.dtype is None:
            raise ExportError(
                f"{_describe(node)}: the type of input {name} ({value.name}) is not known. "
                "Add it to the model's value_info"
            )
        found[name] = DTYPE_NAMES.get(value.dtype, value.dtype.name.lower())
    return combination_of(record, found, _describe(node))


def call_sites(nodes: list[ir.Node], record: Record) -> list[CallSite]:
    """What the nodes of one op say about their calls.

    Raises:
        ExportError: a node does not fit the record.
    """
    return [
        CallSite(
            node=_describe(node),
            dtypes=_dtypes(node, record),
            present=frozenset(_given(node, record)),
            attributes={entry.name: _attribute_value(node, entry) for entry in record.attributes},
        )
        for node in nodes
    ]


def _supply_neutral_inputs(nodes: list[ir.Node], record: Record, body: Body) -> None:
    """Makes all nodes of one op have the same optional inputs."""
    body.check(record)
    given = [_given(node, record) for node in nodes]
    for index, entry in enumerate(record.inputs):
        having = [node for node, inputs in zip(nodes, given, strict=True) if entry.name in inputs]
        lacking = [node for node in nodes if node not in having]
        if not having or not lacking:
            continue
        neutral = body.neutral.get(entry.name)
        if neutral is None:
            raise ExportError(
                f"{_describe(having[0])} gives {record.onnx_name} the input {entry.name}, "
                f"{_describe(lacking[0])} does not; a model holds one body per op. Pass it in both (ones or "
                f"zeros), or give the body a neutral value: @body(neutral={{'{entry.name}': Neutral(...)}})"
            )
        for node in lacking:
            if len(node.inputs) <= index:
                node.resize_inputs(index + 1)
            dtype = ONNX_TYPES[_dtypes(node, record)[entry.name]]
            node.replace_input_with(index, _neutral_input(node, record, entry.name, neutral, dtype))


def _neutral_input(
    node: ir.Node, record: Record, name: str, neutral: Neutral, dtype: ir.DataType
) -> ir.Value:
    """`value` in the shape of the first input's dimensions from `start` on, made just before the node."""
    tape = ir.tape.Tape()
    prefix = f"{node.name or node.outputs[0].name}_{name}"
    attributes: dict[str, Any] = {entry.name: _attribute_value(node, entry) for entry in record.attributes}
    start = attributes[neutral.start] if isinstance(neutral.start, str) else neutral.start
    number = neutral.value(attributes) if callable(neutral.value) else neutral.value
    shape = tape.op("Shape", [node.inputs[0]], {"start": start}, output=ir.val(f"{prefix}_shape"))
    value = ir.Tensor(np.array([number]).astype(dtype.numpy()), dtype=dtype)
    result = tape.op("ConstantOfShape", [shape], {"value": value}, output=ir.val(prefix, dtype=dtype))
    assert node.graph is not None
    node.graph.insert_before(node, tape.nodes)
    return result
