"""Splits a matmul whose parts are read, such as packed q, k and v: attention takes these one by one.

Matches: a matmul with a constant weight, whose readers are only Splits and Slices of the last dimension; a
Split or Slices of a constant, such as the packed weight of cross attention in nn.MultiheadAttention.
Writes: a matmul for each part, with its columns of the weight; a constant for each part.
Leaves alone: matmuls that GroupQueryAttention reads: one of few rows takes less time than three; weights
that other nodes read, too, and so stay beside their parts.
"""

import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .linear import LAYOUT, Linear, is_replaceable, join_rows, plain_matmul, supported_linear
from .rewrite import Rewrite

_Part = tuple[ir.Value, int, int]  # of the last dimension, or of the axis of a constant: value, start, stop
_Match = tuple[Linear | None, list[_Part]]
_MOVES = ("Split", "Slice")


class SplitLinear(Rewrite[_Match], key="split_linear", op_types=(*_MOVES, "MatMul", "Gemm"), device="cuda"):
    """Finds the matmul, or None for a constant, and the parts of it that are read."""

    def match(self, node: ir.Node) -> _Match | str:
        if node.op_type in _MOVES:
            is_alone = g.has_only(node.inputs[0], self.context.graph, *_MOVES)
            if not is_alone or not g.is_constant(node.inputs[0]):
                return "it splits no constant that only Splits and Slices read"
            if any(value.is_graph_output() for value in node.outputs):
                return "a part is an output of the graph"
            read, axis = [value for value in node.outputs if value.uses()], _axis(node)
            found = [(value, *part[1:]) for value in read if (part := g.part_of(value, axis))]
            return (None, found) if found else "it has no known parts"
        linear = supported_linear(node)
        parts = _parts(linear) if linear is not None else None
        if linear is None or parts is None:
            return "it is no matmul with a constant weight of which only parts are read"
        if not is_replaceable(linear, self.context.graph):
            return "other nodes read its weight, too"
        return linear, parts

    def apply(self, node: ir.Node, match: _Match) -> None:
        linear, parts = match
        whole = g.tensor(node.inputs[0]) if linear is None else None
        for value, start, stop in parts:
            if linear is None:
                assert whole is not None
                part = weights.part(whole, _axis(node), start, stop)
                self.replace(value, g.initializer(self.context.graph, part, str(value.name)))
            else:
                prefix, shape = str(value.name), [*(g.dims(linear.output) or [])[:-1], stop - start]
                weight, bias = join_rows(self.context, [linear.rows(start, stop)], prefix)
                assert weight is not None
                new = plain_matmul(g.maker(value), linear.x, weight, bias, LAYOUT, shape)
                self.replace(value, new, "part of a packed matmul")


def _axis(node: ir.Node) -> int:
    """Returns the axis of a Split, or the first one of a Slice."""
    axes = g.ints(node, "axes", 3) if node.op_type == "Slice" else [g.attribute(node, "axis", 0)]
    return axes[0] if axes else 0


def _parts(linear: Linear) -> list[_Part] | None:
    """Returns each part of the last dimension as (value, start, stop), if all readers read such parts."""
    parts = list[_Part]()
    if linear.output.is_graph_output():
        return None
    for node in {use.node: None for use in linear.output.uses()}:
        for value in node.outputs:
            found = g.part_of(value, -1)
            if found is None or found[0] is not linear.output or found[1] == found[2]:
                return None
            if any(use.node.op_type == "GroupQueryAttention" for use in value.uses()):
                return None
            if g.is_read(value):
                parts.append((value, *found[1:]))
    return parts or None
