"""Moves matmuls of [B*H, S, D] to heads [B, H, S, D], the form that `attention.py` matches.

Matches: torch.bmm and baddbmm on heads that were reshaped from [B, H, S, D], perhaps transposed; then numbers
and tensors that are multiplied and added, such as BLOOM's ALiBi; then a reshape back to four dimensions.
Writes: the same operators on four dimensions, without the reshapes. A softmax of scores that were reshaped to
[B*H, S, T] goes before that reshape, as in BART's older exports.
"""

import onnx_ir as ir

from . import graph as g
from .rewrite import Rewrite

_ROTATED = [0, 2, 1]


class BatchedHeads(Rewrite[tuple[int, list[ir.Node]]], name="batched_heads", op_types=("MatMul", "Softmax")):
    """Finds the number of heads, and what follows the matmul."""

    def match(self, node: ir.Node) -> tuple[int, list[ir.Node]] | str:
        if node.op_type == "Softmax":
            reshape, is_last = g.producer(node.inputs[0], "Reshape"), g.attribute(node, "axis", -1) in (-1, 2)
            count = _heads(node.inputs[0]) if reshape is not None and is_last else None
            return "its scores are not [B, H, S, T] before" if count is None else (count, [node])
        if g.rank(node.outputs[0]) != 3 or None in map(_heads, node.inputs):
            return "its inputs are not heads [B, H, S, D] that were reshaped to [B*H, S, D]"
        chain = _to_four_dimensions(node)
        heads = (g.dims(chain[-1].outputs[0]) or [])[1] if chain else None
        if not isinstance(heads, int) or {_heads(value) for value in node.inputs} != {heads}:
            return "its result is not reshaped to [B, H, S, T]"
        return heads, chain

    def apply(self, node: ir.Node, match: tuple[int, list[ir.Node]]) -> None:
        (heads, (*elementwise, last)), value = match, node.outputs[0]
        if last is node:
            [scores, *target], shape = g.maker(node.inputs[0]).inputs, g.dims(value)  # type: ignore[arg-type]
            result = g.add(node, "Softmax", [scores], {"axis": -1}, shape=g.dims(scores))
            return self.replace(value, g.add(node, "Reshape", [result, *target], shape=shape))
        for each in _shapes(node):
            each.replace_input_with(0, node.inputs[1])
        a, b = (_apart(each, node) for each in node.inputs)
        shape = [*(g.dims(a) or [])[:2], *(g.dims(value) or [])[1:]]
        moved = g.add(node, "MatMul", [a, b], shape=shape)
        for each in elementwise:
            inputs = [moved if read is value else _with_heads(read, heads, each) for read in each.inputs]
            value, moved = each.outputs[0], g.add(each, each.op_type, inputs, dtype=moved.dtype, shape=shape)
        self.replace(last.outputs[0], moved)


def _shapes(matmul: ir.Node) -> list[ir.Node]:
    """Returns each Shape of a matmul, which TorchScript's exporter writes, that v has, too."""
    if not g.same_dims(*map(g.dims, (matmul.inputs[1], matmul.outputs[0]))):
        return []
    return [node for node in matmul.outputs[0].consumers() if node.op_type == "Shape"]


def _heads(value: ir.Value | None) -> int | None:
    """Returns H of a value [B*H, S, D] that was reshaped from [B, H, S, D], and perhaps transposed."""
    if (transpose := g.producer(value, "Transpose")) is not None:
        return _heads(transpose.inputs[0]) if g.has_permutation(transpose, _ROTATED) else None
    reshape = g.producer(value, "Reshape")
    before, after = (g.dims(reshape.inputs[0]), g.dims(value)) if reshape is not None else (None, None)
    if before is None or after is None or len(before) != 4 or before[2:] != after[1:] or None in before:
        return None
    return before[1] if isinstance(before[1], int) else None


def _apart(value: ir.Value | None, before: ir.Node) -> ir.Value:
    """Returns [B, H, S, D] of a value for which `_heads` has found H."""
    node = g.producer(value, "Transpose", "Reshape")
    assert node is not None and node.inputs[0] is not None
    if node.op_type == "Reshape":
        return node.inputs[0]
    return g.transpose(before, _apart(node.inputs[0], before), [0, 1, 3, 2])


def _to_four_dimensions(matmul: ir.Node) -> list[ir.Node]:
    """Returns what follows a matmul up to the Reshape to [B, H, S, T], or nothing if there is none."""
    chain, shape = list[ir.Node](), g.dims(matmul.outputs[0]) or []
    users = [each for each in matmul.outputs[0].consumers() if each not in _shapes(matmul)]
    node = users[0] if len(users) == 1 and not matmul.outputs[0].is_graph_output() else None
    while node is not None and node.op_type in ("Add", "Div", "Mul", "Sub") and not node.domain:
        if g.dims(node.outputs[0]) != shape:
            return []
        if any(g.rank(value) != 3 and g.scalar(value) is None for value in node.inputs):
            return []
        chain.append(node)
        node = g.only_user(node.outputs[0])
    if node is None or node.op_type != "Reshape":
        return []
    after = g.dims(node.outputs[0]) or []
    return [*chain, node] if len(after) == 4 and after[2:] == shape[1:] else []


def _with_heads(value: ir.Value | None, heads: int, before: ir.Node) -> ir.Value | None:
    """Returns a number as it is, and a tensor [B*H or 1, S, T] as [B or 1, H or 1, S, T]."""
    shape = g.dims(value) or []
    if value is None or len(shape) != 3:
        return value
    apart = g.add(before, "Unsqueeze", [value, g.int_constant(before, [1])], shape=[shape[0], 1, *shape[1:]])
    if shape[0] == 1:
        return apart
    return g.reshape(before, apart, [-1, heads, 0, 0], [None, heads, *shape[1:]])
