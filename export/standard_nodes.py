"""Replaces standard operators in a model with twinop's ops that compute the same.

`torch_op.replace_modules` does this to modules; what a model writes as functions and operators (`x + mask`,
`torch.softmax`, the bias of a linear layer) is only seen here. ONNX Runtime's own kernels can be much
slower, such as those of sums in bfloat16.

A function body tells which operator an op can replace: a body that is a single standard node on the op's
inputs says that the two are the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx.defs import get_schema

from twinop.dtypes import dtype_name
from twinop.errors import ExportError, option
from twinop.op_schema import default_of
from twinop.record import Record

from .bodies import find_body
from .calls import make_call, records_or_loaded
from .record_body import trace


def standard_node(record: Record, opset: int = 20) -> ir.Node | None:
    """Returns the one node of the op's function body, or None if the op is not a standard operator.

    The node's attributes are references to the op's.
    """
    body = find_body(record.key)
    dtypes = next((dict(each) for each in record.combinations if "float32" in each.values()), None)
    if body is None or dtypes is None or record.is_backward:
        return None
    body.check(record)
    inputs = [entry.name for entry in record.inputs]
    defaults = {entry.name: default_of(entry) for entry in record.attributes}
    first, *others = trace(body, [make_call(record, dtypes, inputs, defaults)], opset)
    if others or [value and value.name for value in first.inputs] != inputs:
        return None
    return first if all(attribute.is_ref() for attribute in first.attributes.values()) else None


def replace_nodes(
    model: ir.Model, ops: Sequence[str], records: Mapping[str, Record] | None = None
) -> dict[str, int]:
    """Replaces standard nodes in place. Attach function bodies afterwards.

    A node is left as it is if the dtypes of its inputs are not known or the op has no kernel for them, as for
    integer sums that compute shapes. Nodes that have only constant inputs are left as well, because ONNX
    Runtime folds them.

    Args:
        model: with types of its values, as `torch.onnx.export` and shape inference give them.
        ops: names of ops that are standard operators, such as "add" and "softmax".
        records: the ops by name; by default the ops that `twinop.torch_op` has loaded.

    Returns:
        The number of new nodes by type.

    Raises:
        ExportError: an op is not loaded, or is not a standard operator.
    """
    records = records_or_loaded(records)
    opset = model.graph.opset_imports.get("", 20)
    by_type = {}
    for op in ops:
        standard = standard_node(records[op], opset) if op in records else None
        if standard is None:
            known = ", ".join(name for name, record in records.items() if standard_node(record, opset))
            raise ExportError(
                f"{option('replace', op)}: no standard operator is replaced by an op '{op}'; there are: "
                f"{known}"
            )
        by_type[standard.op_type] = records[op], standard
    replaced: Counter[str] = Counter()
    for node in list(model.graph.all_nodes()):
        if not node.domain and node.op_type in by_type:
            record, standard = by_type[node.op_type]
            if _fits(node, record, standard):
                _replace(node, record, _attributes(node, standard, opset))
                replaced[record.onnx_name] += 1
    return dict(replaced)


def _fits(node: ir.Node, record: Record, standard: ir.Node) -> bool:
    if len(node.inputs) != len(record.inputs) or all(_is_constant(value) for value in node.inputs):
        return False
    if not node.attributes.keys() <= standard.attributes.keys():
        return False
    dtypes = {}
    for entry, value in zip(record.inputs, node.inputs, strict=True):
        if value is None or value.dtype is None:
            return False
        dtypes[entry.name] = dtype_name(value.dtype)
    return record.combination_of(dtypes) is not None


def _is_constant(value: ir.Value | None) -> bool:
    return value is None or ir.convenience.get_const_tensor(value) is not None


def _attributes(node: ir.Node, standard: ir.Node, opset: int) -> list[ir.Attr]:
    """Returns the node's attributes under the op's names, with the operator's defaults for missing ones."""
    declared = get_schema(standard.op_type, opset).attributes
    found = []
    for name, reference in standard.attributes.items():
        given = node.attributes.get(name) or ir.serde.deserialize_attribute(declared[name].default_value)
        found.append(ir.Attr(str(reference.ref_attr_name), given.type, given.value))
    return found


def _replace(node: ir.Node, record: Record, attributes: Sequence[ir.Attr]) -> None:
    graph = node.graph
    assert graph is not None
    new = ir.Node(*record.node_type, node.inputs, attributes, num_outputs=1, name=node.name)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)
