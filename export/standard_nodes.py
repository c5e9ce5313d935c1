"""Puts twinop's nodes where a model has standard operators that compute the same.

`torch_op.replace_modules` does this to modules; what a model writes as functions and operators (`x + mask`,
`torch.softmax`, a linear layer's bias) is only seen here. ONNX Runtime's own kernels can be far slower:
a bfloat16 Add of an attention mask or a bias runs at a third of copy bandwidth on an H200, and in a BERT of
12 layers these sums take longer than the matrix products (bench/results/encoder-nvidia-h200.json).

Which operator an op takes the place of is read off its function body: one that is a single standard node on
the op's inputs says that the two are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx.defs import get_schema

from twinop.errors import ExportError
from twinop.export.bodies import find_body
from twinop.export.record_body import CallSite, trace
from twinop.export.schema import DTYPE_NAMES, default_of
from twinop.record import DOMAIN, Record


@dataclass(frozen=True)
class Standard:
    """The standard operator that an op is another name of; `attributes`: the operator's -> the op's."""

    op_type: str
    attributes: Mapping[str, str]


def standard_of(record: Record, opset: int = 20) -> Standard | None:
    """The operator that the op's function body consists of; None where it is more than one node."""
    body = find_body(record.key)
    dtypes = next((dict(each) for each in record.combinations if "float32" in each.values()), None)
    if body is None or dtypes is None or record.is_backward:
        return None
    defaults = {entry.name: default_of(entry) for entry in record.attributes}
    call = CallSite(record.onnx_name, dtypes, frozenset(entry.name for entry in record.inputs), defaults)
    nodes = list(trace(record, body, [call], opset))
    inputs = [entry.name for entry in record.inputs]
    if len(nodes) != 1 or [value and value.name for value in nodes[0].inputs] != inputs:
        return None
    given = nodes[0].attributes.values()
    if not all(attribute.is_ref() for attribute in given):
        return None
    return Standard(nodes[0].op_type, {each.name: str(each.ref_attr_name) for each in given})


def replace_nodes(
    model: ir.Model, ops: Sequence[str], records: Mapping[str, Record] | None = None
) -> dict[str, int]:
    """Replaces in place; returns the number of new nodes by type. Function bodies are attached after it.

    A node stays where its inputs' dtypes are not known or the op has no kernel for them: integer sums that
    compute shapes, for one. Nodes of constants only stay too, as ONNX Runtime folds them.

    Args:
        model: with types of its values, as `torch.onnx.export` and shape inference give them.
        ops: names of ops that are standard operators, such as "add" and "softmax".
        records: the ops by name; by default those that `twinop.torch_op` has loaded.

    Raises:
        ExportError: an op is not loaded, or is no standard operator.
    """
    if records is None:
        from twinop import torch_op

        records = torch_op.records()
    opset = model.graph.opset_imports.get("", 20)
    by_type = {}
    for op in ops:
        standard = standard_of(records[op], opset) if op in records else None
        if standard is None:
            known = ", ".join(name for name, record in records.items() if standard_of(record, opset))
            raise ExportError(f"no standard operator is replaced by an op {op!r}; there are: {known}")
        by_type[standard.op_type] = records[op], standard
    replaced: dict[str, int] = {}
    for node in list(model.graph.all_nodes()):
        if node.domain in ("", "ai.onnx") and node.op_type in by_type:
            record, standard = by_type[node.op_type]
            if _fits(node, record, standard):
                _replace(node, record, _attributes(node, standard, opset))
                replaced[record.onnx_name] = replaced.get(record.onnx_name, 0) + 1
    return replaced


def _fits(node: ir.Node, record: Record, standard: Standard) -> bool:
    if len(node.inputs) != len(record.inputs) or all(_is_constant(value) for value in node.inputs):
        return False
    if not node.attributes.keys() <= standard.attributes.keys():
        return False
    dtypes = {}
    for entry, value in zip(record.inputs, node.inputs, strict=True):
        if value is None or value.dtype not in DTYPE_NAMES:
            return False
        dtypes[entry.name] = DTYPE_NAMES[value.dtype]
    return record.combination_of(dtypes) is not None


def _is_constant(value: ir.Value | None) -> bool:
    if value is None or value.const_value is not None:
        return True
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant"


def _attributes(node: ir.Node, standard: Standard, opset: int) -> list[ir.Attr]:
    """The node's attributes under the op's names; what it leaves out has the operator's default."""
    declared = get_schema(standard.op_type, opset).attributes
    found = []
    for theirs, ours in standard.attributes.items():
        given = node.attributes.get(theirs) or ir.serde.deserialize_attribute(declared[theirs].default_value)
        found.append(ir.Attr(ours, given.type, given.value))
    return found


def _replace(node: ir.Node, record: Record, attributes: Sequence[ir.Attr]) -> None:
    graph = node.graph
    assert graph is not None
    twin = ir.Node(DOMAIN, record.onnx_name, node.inputs, attributes, num_outputs=1, name=node.name)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [twin], node.outputs, twin.outputs)
