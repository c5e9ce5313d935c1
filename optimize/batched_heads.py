"""Moves matmuls of [B*H, S, D] to heads [B, H, S, D], the form that `attention.py` matches.

Matches: torch.bmm and baddbmm on heads that were reshaped from [B, H, S, D], perhaps transposed, or from
[S, B, H*D], as in nn.MultiheadAttention; then numbers and tensors that are multiplied and added, such as
BLOOM's ALiBi; then a reshape back to four dimensions, or a softmax, the matmul with v and the reshape of its
tokens. tf2onnx, which writes Keras's attention so, gives heads and results a fifth dimension of 1.
Writes: the same operators on four dimensions, without the reshapes. A softmax of scores that were reshaped to
[B*H, S, T] goes before that reshape, as in BART's older exports.
"""

import onnx_ir as ir

from . import graph as g
from .heads import SWAP_ROWS, SWAP_S_H
from .rewrite import Rewrite
from .scores import unscaled

_ROTATED = [0, 2, 1]
_OF_ROWS = {(1, 0, 2): [1, 2, 0, 3], (1, 2, 0): [1, 2, 3, 0]}
"""How [S, B, H, D] is transposed to heads where [S, B*H, D] was, by how."""


class BatchedHeads(Rewrite[tuple[int, list[ir.Node]]], key="batched_heads", op_types=("MatMul", "Softmax")):
    """Finds the number of heads, and what follows the matmul."""

    def match(self, node: ir.Node) -> tuple[int, list[ir.Node]] | str:
        if node.op_type == "Softmax":
            reshape, is_last = g.producer(node.inputs[0], "Reshape"), g.attribute(node, "axis", -1) in (-1, 2)
            count = _heads(node.inputs[0]) if reshape is not None and is_last else None
            return "its scores are not [B, H, S, T] before" if count is None else (count, [node])
        if g.rank(node.outputs[0]) != 3 or None in map(_heads, node.inputs):
            return "its inputs are not heads [B, H, S, D] that were reshaped to [B*H, S, D]"
        chain, heads = _to_four_dimensions(node), _heads(node.inputs[0])
        after = (g.dims(chain[-1].outputs[0]) or []) if chain else []
        read = [node.inputs[1], *(each.inputs[1] for each in chain if each.op_type == "MatMul")]
        if heads is None or not after or {*map(_heads, read), *after[1:-2]} != {heads}:
            return "its result is not reshaped to [B, H, S, T]"
        return heads, chain

    def apply(self, node: ir.Node, match: tuple[int, list[ir.Node]]) -> None:
        (heads, (*elementwise, last)), value = match, node.outputs[0]
        if last is node:
            [scores, *target], shape = g.maker(node.inputs[0]).inputs, g.dims(value)  # type: ignore[arg-type]
            result = g.add(node, "Softmax", [scores], {"axis": -1}, shape=g.dims(scores))
            return self.replace(value, g.add(node, "Reshape", [result, *target], shape=shape))
        for before, each in zip((None, node, *elementwise), (node, *elementwise), strict=False):
            for shape_node, like in _shapes(each, before):
                shape_node.replace_input_with(0, like)
        moved = _apart(node.inputs[0], node)
        batch = (g.dims(moved) or [None])[0] if heads > 1 else None  # of all: B*H is not 1, which broadcasts
        for each in (node, *elementwise):
            shape = [*(g.dims(moved) or [])[:2], *(g.dims(each.outputs[0]) or [])[1:]]
            if each.op_type == "MatMul":
                inputs: list[ir.Value | None] = [moved, _apart(each.inputs[1], each, batch)]
            else:
                inputs = [moved if read is value else _with_heads(read, heads, each) for read in each.inputs]
            attributes = {"axis": -1} if each.op_type == "Softmax" else {}
            moved = g.add(each, each.op_type, inputs, attributes, dtype=moved.dtype, shape=shape)
            value = each.outputs[0]
        if last.op_type != "Transpose":
            return self.replace(last.outputs[0], moved)
        [reshape] = last.outputs[0].consumers()
        reshape.replace_input_with(0, g.transpose(reshape, moved, [2, 0, 1, 3]))


def _shapes(node: ir.Node, before: ir.Node | None) -> list[tuple[ir.Node, ir.Value]]:
    """Returns each Shape of a result, which TorchScript's exporter writes, with an operand that has this
    shape, too, and is not the result of the node before."""
    value, others = node.outputs[0], [each for each in node.inputs if each and each.producer() is not before]
    like = next((each for each in others if g.same_dims(*map(g.dims, (each, value)))), None)
    return [(each, like) for each in value.consumers() if each.op_type == "Shape"] if like else []


def _heads(value: ir.Value | None) -> int | None:
    """Returns H of a value [B*H, S, D] that was reshaped from [B, H, S, D] or [S, B, H*D], and perhaps
    transposed; its numbers may be scaled."""
    value = None if value is None else unscaled(value)[0]
    if (transpose := g.producer(value, "Transpose")) is not None:
        if g.has_permutation(transpose, _ROTATED):
            return _heads(transpose.inputs[0])
        return None if (rows := _rows(transpose)) is None else rows[1]
    reshape = g.producer(value, "Reshape")
    source, order = _of_four(reshape.inputs[0]) if reshape is not None else (None, [])
    before, after = [(g.dims(source) or [None] * 4)[axis] for axis in order], g.dims(value)
    if after is None or len(before) != 4 or before[2:] != after[1:] or None in before:
        return None
    return before[1] if isinstance(before[1], int) else None


def _of_four(value: ir.Value | None) -> tuple[ir.Value | None, list[int]]:
    """Returns a value and how it is transposed, without a dimension of 1 that it was given before."""
    rank, transpose = g.rank(value), g.producer(value, "Transpose")
    unsqueeze = g.producer(transpose.inputs[0] if transpose is not None else value, "Unsqueeze")
    axes = g.ints(unsqueeze, "axes", 1) if unsqueeze is not None else None
    if unsqueeze is None or axes is None or len(axes) != 1 or rank != 5:
        return value, [*range(rank)]
    order = [*range(5)] if transpose is None else list(g.attribute(transpose, "perm", ()))
    order.remove(axis := axes[0] % 5)
    return unsqueeze.inputs[0], [each - (each > axis) for each in order]


def _rows(transpose: ir.Node) -> tuple[ir.Value, int, int] | None:
    """Returns [S, B, H*D], H and D, if a node transposes [S, B*H, D] that was reshaped from it."""
    reshape, perm = g.producer(transpose.inputs[0], "Reshape"), g.attribute(transpose, "perm", ())
    rows = reshape.inputs[0] if reshape is not None else None
    before, after = (g.dims(each) or [] for each in (rows, transpose.inputs[0]))
    if rows is None or tuple(perm) not in _OF_ROWS or len(before) != 3 or before[0] != after[0]:
        return None
    width, size = before[2], after[2]
    if before[0] is None or not isinstance(width, int) or not isinstance(size, int):
        return None
    return rows, width // size, size


def _apart(value: ir.Value | None, before: ir.Node, batch: g.Dim = None) -> ir.Value:
    """Returns [B, H, S, D] of a value for which `_heads` has found H; `batch`: B, where it is known."""
    assert value is not None
    plain, scale = unscaled(value)
    node = g.producer(plain, "Transpose", "Reshape")
    assert node is not None and node.inputs[0] is not None
    if node.op_type == "Reshape":
        source, order = _of_four(node.inputs[0])
        assert source is not None
        found = source if order == [0, 1, 2, 3] else g.transpose(before, source, order)
    elif (of_rows := _rows(node)) is None:
        turned = _apart(node.inputs[0], before, batch)
        rows = g.untransposed(turned, [0, 2, 3, 1])
        found = g.transpose(before, rows or turned, [0, 1, 3, 2] if rows is None else SWAP_S_H)
    else:
        joined, heads, size = of_rows
        length, own, _ = g.dims(joined) or [None] * 3
        apart = [length, own if batch is None else batch, heads, size]
        split = g.reshape(before, joined, [0, 0, heads, size], apart)
        found = g.transpose(before, split, _OF_ROWS[tuple(g.attribute(node, "perm", ()))])
    if scale == 1.0:
        return found
    number = g.scalar_constant(before, scale, value)
    return g.add(before, "Mul", [found, number], dtype=value.dtype, shape=g.dims(found))


def _reader(node: ir.Node, before: ir.Node | None) -> ir.Node | None:
    """Returns the only reader of a result but for `_shapes`."""
    shapes = [each for each, _ in _shapes(node, before)]
    readers = [each for each in node.outputs[0].consumers() if each not in shapes]
    is_alone = len(readers) == 1 and readers[0].graph is node.graph and not node.outputs[0].is_graph_output()
    return readers[0] if is_alone else None


def _to_four_dimensions(matmul: ir.Node) -> list[ir.Node]:
    """Returns what follows a matmul, perhaps a softmax and the matmul with v, up to the Reshape to four
    dimensions, or the Transpose to [S, B*H, D] that is reshaped; nothing if there is neither."""
    chain, shape = list[ir.Node](), g.dims(matmul.outputs[0]) or []
    node = _reader(matmul, None)
    while node is not None and node.op_type in ("Add", "Div", "Mul", "Sub") and not node.domain:
        if g.dims(node.outputs[0]) != shape:
            return []
        if any(g.rank(value) != 3 and g.scalar(value) is None for value in node.inputs):
            return []
        chain.append(node)
        node = _reader(node, [matmul, *chain][-2])
    if node is not None and node.op_type == "Softmax" and g.attribute(node, "axis", -1) in (-1, 2):
        product = g.only_user(node.outputs[0])
        if product is None or product.op_type != "MatMul" or product.inputs[0] is not node.outputs[0]:
            return []
        chain, node = [*chain, node, product], g.only_user(product.outputs[0])
        shape = g.dims(product.outputs[0]) or []
    if g.has_permutation(node, SWAP_ROWS):
        assert node is not None
        reshape = g.only_user(node.outputs[0])
        if reshape is None or reshape.op_type != "Reshape":
            return []
        target = g.constant(reshape.inputs[1])  # 0 would be a size of the transposed tensor
        return [*chain, node] if target is None or target.all() else []
    if node is None or node.op_type != "Reshape":
        return []
    squeeze = g.only_user(node.outputs[0])
    if g.rank(node.outputs[0]) == 5 and squeeze is not None and squeeze.op_type == "Squeeze":
        node = squeeze
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
