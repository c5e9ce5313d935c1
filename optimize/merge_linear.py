"""Merges matmuls of one input, such as q, k and v.

Matches: CustomLinear nodes with the same input and precision, without activation and residual, if the number
of rows is known and small.
Writes: one CustomLinear with the concatenated weights, and a Split, which costs less than several matmuls.
`packed_attention.py` merges q, k and v of any number of rows, because it needs no Split.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .linear import LAYOUT, join_rows
from .rewrite import LABELS, Rewrite, label

MERGED = "matmuls of one input merged"
_MAX_ELEMENTS = 3 << 20
"""Elements of the merged output. With more, the Split costs more than it saves (measured on an H200)."""


class MergeLinear(Rewrite[list[ir.Node]], key="merge_linear", ops=("linear",), device="cuda"):
    """Finds the matmuls of one input, from the first one."""

    def match(self, node: ir.Node) -> list[ir.Node] | str:
        x = node.inputs[0]
        if x is None or not is_plain(node) or not (rows := _rows(x)):
            return "it has an activation or a weight that others read, or the number of rows is not known"
        readers = sorted({use.node for use in x.uses()} & {*self.order}, key=self.order.__getitem__)
        alike = [each for each in readers if _kind(each) == _kind(node) and is_plain(each)]
        if alike[0] is not node or len(alike) == 1:
            return "it is not the first of several matmuls of one input"
        if rows * sum(g.last_dim(each.outputs[0]) or 0 for each in alike) > _MAX_ELEMENTS:
            return "a Split of so many elements takes longer than several matmuls"
        return alike

    def apply(self, node: ir.Node, match: list[ir.Node]) -> None:
        y, old = merge(self.context, match), [each.outputs[0] for each in match]
        widths = g.int_constant(node, [g.last_dim(each) or 0 for each in old])
        for value, part in zip(old, g.add_like(node, "Split", [y, widths], {"axis": -1}, old), strict=True):
            self.replace(value, part)


def _kind(node: ir.Node) -> tuple[object, ...]:
    """Returns what matmuls have in common that can be one."""
    return node.domain, node.op_type, node.inputs[0], len(node.inputs), g.FP32 in node.meta


def is_plain(node: ir.Node) -> bool:
    """Whether a CustomLinear has constant weights, and no more than a bias."""
    constants = node.inputs[1:]
    return (
        g.attribute(node, "activation", "none") == "none"
        and not any(g.attribute(node, name, 0) for name in ("rms_eps", "invariant"))
        and g.attribute(node, "few_rows", 32) == 32
        and g.attribute(node, "layout", LAYOUT) == LAYOUT
        and len(constants) <= 2
        and all(g.is_constant(each) for each in constants)
        and g.has_only(constants[0], node.graph, node.op_type)
    )


def matmuls_of_one(values: Sequence[ir.Value | None]) -> list[ir.Node]:
    """Returns the matmuls that compute values from one tensor, if nothing else reads these; else none."""
    found = [g.producer(value, "CustomLinear", domain=DOMAIN) for value in values]
    plain = [each for each in found if each is not None and is_plain(each) and g.only_user(each.outputs[0])]
    alike = {*map(_kind, plain)}
    return plain if len({*plain}) == len(values) and len(alike) == 1 else []


def merge(context: g.RewriteContext, nodes: list[ir.Node]) -> ir.Value:
    """Inserts one matmul in place of several of the same x, before the first one, and returns its output."""
    first, x = nodes[0], nodes[0].inputs[0]
    packed = join_rows(context, [[*map(g.tensor, node.inputs[1:])] for node in nodes], "packed")
    shape = [*(g.dims(x) or [])[:-1], sum(g.last_dim(node.outputs[0]) or 0 for node in nodes)]
    y = context.add_op(first, "linear", [x, *packed], shape, activation="none", layout=LAYOUT)
    label(g.maker(y), *first.meta.get(LABELS, ()), MERGED)
    return y


def _rows(x: ir.Value) -> int:
    """Returns the number of rows, or 0 if it is not known."""
    rows = (g.dims(x) or [None])[:-1]
    known = [size for size in rows if isinstance(size, int)]
    return math.prod(known) if 0 < len(known) == len(rows) else 0
