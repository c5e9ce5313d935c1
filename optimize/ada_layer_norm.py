"""Fuses the adaptive layer norm of diffusion transformers (adaLN): each sequence has its scale and shift.

Matches: layer_norm(x) * (1 + scale) + shift in any order of the operands, with x [B, ..., C], and scale and
shift [B, 1, ..., C], of a norm that has no weights.
Writes: CustomAdaLayerNorm.
Leaves alone: one scale and shift for a batch of several sequences, or for each token.
"""

import onnx_ir as ir

from . import graph as g
from .rewrite import Rewrite

_Match = tuple[ir.Value, ir.Value, ir.Value]  # scale, shift and the result


class AdaLayerNorm(Rewrite[_Match], key="ada_layer_norm", ops=("layer_norm",)):
    """Finds scale, shift and the result."""

    def match(self, node: ir.Node) -> _Match | str:
        if g.attribute(node, "axis", -1) != -1 or _has_weights(node):
            return "the norm has weights, or is not over the last dimension"
        scaled = _other_operand(node.outputs[0], "Mul")
        shifted = _other_operand(scaled[0].outputs[0], "Add") if scaled is not None else None
        if scaled is None or shifted is None:
            return "no Mul alone reads the norm, or no Add that Mul"
        total, shift, x = g.producer(scaled[1], "Add"), shifted[1], g.dims(node.inputs[0])
        scales = [each for each in total.inputs if g.scalar(each) != 1] if total is not None else []
        scale = scales[0] if len(scales) == 1 else None  # of 1 + scale
        if scale is None or not all(_is_per_sequence(each, x) for each in (scale, shift)):
            return "scale and shift are not [B, 1, ..., C] for x [B, ..., C]"
        return scale, shift, shifted[0].outputs[0]

    def apply(self, node: ir.Node, match: _Match) -> None:
        x, (*rows, result) = node.inputs[0], match
        assert x is not None
        rows = [_as_rows(node, each) for each in rows]
        eps = g.attribute(node, "eps", 1e-5)
        self.replace(result, self.context.add_op(node, self.name, [x, *rows], eps=eps), self.name)


def _has_weights(norm: ir.Node) -> bool:
    """Whether a norm has weights, and not only the ones and zeros that exporters write for none."""
    arrays = [(g.constant(each), each) for each in norm.inputs[1:]]
    return any(
        value is not None and (array is None or (array != neutral).any())
        for (array, value), neutral in zip(arrays, (1, 0), strict=False)
    )


def _other_operand(value: ir.Value, op_type: str) -> tuple[ir.Node, ir.Value] | None:
    """Returns the only reader of the value, if it has the type, and its other operand."""
    node = g.only_user(value)
    if node is None or node is not g.producer(node.outputs[0], op_type):
        return None
    others = [each for each in node.inputs if each is not value]
    return (node, others[0]) if len(others) == 1 and others[0] is not None else None


def _is_per_sequence(value: ir.Value, x: list[g.Dim] | None) -> bool:
    """Whether a value is [B, 1, ..., C] where x is [B, ..., C]."""
    shape = g.dims(value)
    if shape is None or x is None or len(x) < 2 or len(shape) != len(x) or None in (x[0], x[-1]):
        return False
    return shape == [x[0], *[1] * (len(x) - 2), x[-1]]


def _as_rows(before: ir.Node, value: ir.Value) -> ir.Value:
    """Returns [B, 1, ..., C] as [B, C]."""
    shape, source = g.dims(value) or [], g.producer(value, "Unsqueeze")
    rows = source.inputs[0] if source is not None else None
    if rows is not None and g.rank(rows) == 2:
        return rows
    if len(shape) == 2:
        return value
    middle = g.int_constant(before, range(1, len(shape) - 1))
    return g.add(before, "Squeeze", [value, middle], shape=[shape[0], shape[-1]])
