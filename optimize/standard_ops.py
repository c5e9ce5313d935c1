"""Replaces standard operators with twinop's ops that compute the same, where the user names these ops.

`torch_op.replace_modules` does this to modules. What a model writes as functions and operators (`x + mask`,
`torch.softmax`) is only seen here. ONNX Runtime's own kernels can be much slower, such as those of sums in
bfloat16. A function body tells which operator an op replaces: a body that is a single standard node on the
op's inputs says that the two are the same.
Leaves alone: inputs of dtypes that are not known or that the op has no kernel for, such as integer sums that
compute shapes.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import onnx_ir as ir
from onnx.defs import get_schema

from twinop.errors import ExportError, option
from twinop.model.attach import OPSETS
from twinop.model.bodies import find_body
from twinop.model.calls import make_call
from twinop.model.record_body import trace
from twinop.record.dtypes import dtype_name
from twinop.record.op_schema import default_of
from twinop.record.op_spec import OpSpec

from . import graph as g
from .rewrite import Rewrite

REPLACED = "what replaces standard operators"  # in the `meta` of a graph: the names of ops


def standard_node(record: OpSpec) -> ir.Node | None:
    """Returns the one node of the op's function body, whose attributes are references to the op's, or None if
    the op is not a standard operator."""
    body = find_body(record.key)
    dtypes = next((dict(each) for each in record.combinations if "float32" in each.values()), None)
    if body is None or dtypes is None or record.is_backward:
        return None
    inputs = [entry.name for entry in record.inputs]
    defaults = {entry.name: default_of(entry) for entry in record.attributes}
    first, *others = trace(body, [make_call(record, dtypes, inputs, defaults)], OPSETS[0])
    if others or [value and value.name for value in first.inputs] != inputs:
        return None
    return first if all(attribute.is_ref() for attribute in first.attributes.values()) else None


def check_ops(ops: Sequence[str], records: Mapping[str, OpSpec]) -> None:
    """Raises ExportError if an op is not among the records, or is not a standard operator."""
    for op in ops:
        if op not in records or standard_node(records[op]) is None:
            known = ", ".join(name for name, record in records.items() if standard_node(record))
            raise ExportError(
                f"{option('replace', op)}: twinop has no op '{op}' that replaces a standard operator; "
                f"expected one of: {known}"
            )


class Replace(Rewrite[tuple[str, ir.Node]], key="replace"):
    """Finds the op that replaces an operator, and its `standard_node`."""

    @cached_property
    def standard(self) -> dict[str, ir.Node]:
        """The operators that ops replace, by op."""
        ops = self.context.graph.meta.get(REPLACED, ())
        return {op: node for op in ops if (node := standard_node(self.context.records[op])) is not None}

    def candidates(self) -> list[ir.Node]:
        return self.context.nodes(*(node.op_type for node in self.standard.values()))

    def match(self, node: ir.Node) -> tuple[str, ir.Node] | str:
        for op, standard in self.standard.items():
            if standard.op_type == node.op_type and _fits(node, self.context.records[op], standard):
                return op, standard
        return "no op that is to replace it has its inputs, dtypes and attributes"

    def apply(self, node: ir.Node, match: tuple[str, ir.Node]) -> None:
        op, standard = match
        new = self.context.add_op(node, op, node.inputs, g.dims(node.outputs[0]))
        g.maker(new).attributes.update({each.name: each for each in _attributes(node, standard)})
        self.replace(node.outputs[0], new, op)


def _fits(node: ir.Node, record: OpSpec, standard: ir.Node) -> bool:
    if len(node.inputs) != len(record.inputs) or not node.attributes.keys() <= standard.attributes.keys():
        return False
    dtypes = {
        entry.name: dtype_name(value.dtype)
        for entry, value in zip(record.inputs, node.inputs, strict=True)
        if value is not None and value.dtype is not None
    }
    return len(dtypes) == len(node.inputs) and record.combination_of(dtypes) is not None


def _attributes(node: ir.Node, standard: ir.Node) -> list[ir.Attr]:
    """Returns the node's attributes under the op's names, with the operator's defaults for missing ones."""
    declared = get_schema(standard.op_type, OPSETS[0]).attributes
    found = []
    for name, reference in standard.attributes.items():
        given = node.attributes.get(name) or ir.serde.deserialize_attribute(declared[name].default_value)
        found.append(ir.Attr(str(reference.ref_attr_name), given.type, given.value))
    return found
