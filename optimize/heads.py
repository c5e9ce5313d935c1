"""Converts heads [B, H, S, D] to [B, S, H*D], the layout of linear layers and fast attention.

A transpose between the two is then not needed.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from twinop.record import DOMAIN

from . import graph as g

SWAP_S_H = [0, 2, 1, 3]
"""The permutation between [B, H, S, D] and [B, S, H, D]."""


SWAP_ROWS = [1, 0, 2]
"""The permutation between [S, B, C] and [B, S, C]."""


@dataclass(frozen=True)
class Heads:
    """A tensor [B, S, count * size]."""

    value: ir.Value
    count: int
    size: int


def merged_heads(value: ir.Value, before: ir.Node) -> Heads | None:
    """Returns the heads [B, H, S, D] of a value as [B, S, H*D], or None if H or D is not known.

    Args:
        before: where nodes are inserted if no value of the graph has this form.
    """
    shape = g.dims(value)
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return None
    count, size = shape[1], shape[3]
    if (part := _part_of_packed(value, count, size, before)) is not None:
        return Heads(part, count, size)
    if (rows := _rows_of_torch(value, shape)) is not None:
        return Heads(_swapped(rows, before), count, size)
    transpose = g.producer(value, "Transpose")
    if transpose is not None and list(g.attribute(transpose, "perm", ())) == SWAP_S_H:
        bshd = transpose.inputs[0]
    else:
        bshd = g.add(
            before, "Transpose", [value], {"perm": SWAP_S_H}, shape=[shape[0], shape[2], count, size]
        )
    assert bshd is not None
    return merged_tokens(bshd, before)


def _rows_of_torch(value: ir.Value, shape: list[g.Dim]) -> ir.Value | None:
    """Returns [S, B, H*D] of heads [B, H, S, D], as nn.MultiheadAttention makes them.

    It reshapes to [S, B*H, D], transposes to [B*H, S, D] and reshapes again.
    """
    outer = g.producer(value, "Reshape")
    transpose = g.producer(outer.inputs[0], "Transpose") if outer is not None else None
    inner = g.producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or inner is None or list(g.attribute(transpose, "perm", ())) != SWAP_ROWS:
        return None
    _, count, tokens, size = shape
    rows, found = inner.inputs[0], g.dims(inner.outputs[0])
    if not isinstance(count, int) or not isinstance(size, int) or tokens is None:
        return None
    ends = [each[::2] if each is not None and len(each) == 3 else None for each in (g.dims(rows), found)]
    return rows if ends == [[tokens, count * size], [tokens, size]] else None  # then the batches are equal


def _swapped(value: ir.Value, before: ir.Node) -> ir.Value:
    """Returns [S, B, C] as [B, S, C].

    The transpose moves before the product that computes the value: models whose tensors are [B, S, C] have
    the opposite one there, and for others one transpose of x is enough for q, k and v.
    """
    transpose, node = g.producer(value, "Transpose"), g.producer(value, "Add", "MatMul", "Mul")
    if transpose is not None and list(g.attribute(transpose, "perm", ())) == SWAP_ROWS:
        assert transpose.inputs[0] is not None
        return transpose.inputs[0]
    s, b, width = g.dims(value) or [None] * 3
    if (part := _part_of_rows(value)) is not None:
        source, start = part
        assert isinstance(width, int)
        bounds = [g.int_constant(before, [each]) for each in (start, start + width, -1)]
        return g.add(before, "Slice", [_swapped(source, before), *bounds], shape=[b, s, width])
    if node is not None and g.only_user(value) is not None:  # else the product would be computed twice
        x, other = node.inputs
        if node.op_type != "MatMul" and len(g.dims(x) or ()) < 2:
            x, other = other, x
        if other is not None and len(g.dims(x) or ()) == 3 and _is_per_column(node, other):
            assert x is not None
            inputs = [_swapped(x, before), other]
            inputs = inputs if node.inputs[0] is x else inputs[::-1]
            return _reused(before, node.op_type, inputs, [], [b, s, width])
    return _reused(before, "Transpose", [value], SWAP_ROWS, [b, s, width])


def _is_per_column(node: ir.Node, other: ir.Value) -> bool:
    """Whether the second operand of a node is one for all rows."""
    shape = g.dims(other)
    return shape is not None and (len(shape) == 2 if node.op_type == "MatMul" else len(shape) < 2)


def _reused(
    before: ir.Node, op_type: str, inputs: list[ir.Value], perm: list[int], shape: list[g.Dim]
) -> ir.Value:
    """Returns the output of such a node, which is inserted if there is none: q, k and v need the same ones.

    The graph is sorted after each rewrite, so the node may be anywhere.
    """
    for use in inputs[0].uses():
        found = use.node if use.node is g.producer(use.node.outputs[0], op_type) else None
        if found is None or list(found.inputs) != inputs or found.graph is not before.graph:
            continue
        if list(g.attribute(found, "perm", ())) == perm:
            return found.outputs[0]
    return g.add(before, op_type, inputs, {"perm": perm} if perm else {}, shape=shape)


def _part_of_rows(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Returns the packed product [S, B, 3*C] of q, k or v [S, B, C], and where the part starts.

    nn.MultiheadAttention reshapes the product to [S, B, 3, C], adds a dimension in front, swaps it with that
    of the parts, removes it again and indexes the first dimension.
    """
    gather = g.producer(value, "Gather")
    squeeze = g.producer(gather.inputs[0], "Squeeze") if gather is not None else None
    transpose = g.producer(squeeze.inputs[0], "Transpose") if squeeze is not None else None
    unsqueeze = g.producer(transpose.inputs[0], "Unsqueeze") if transpose is not None else None
    reshape = g.producer(unsqueeze.inputs[0], "Reshape") if unsqueeze is not None else None
    if gather is None or squeeze is None or transpose is None or unsqueeze is None or reshape is None:
        return None
    index, source, apart = g.scalar(gather.inputs[1]), reshape.inputs[0], g.dims(reshape.outputs[0])
    if (
        index is None
        or source is None
        or apart is None
        or len(apart) != 4
        or g.attribute(gather, "axis", 0) != 0
    ):
        return None
    if g.ints(squeeze, "axes", 1) not in ([-2], [3]) or g.ints(unsqueeze, "axes", 1) != [0]:
        return None
    parts, width = apart[2:]
    if list(g.attribute(transpose, "perm", ())) != [3, 1, 2, 0, 4] or not isinstance(parts, int):
        return None
    if not isinstance(width, int) or not g.same_dims(g.dims(source), [*apart[:2], parts * width]):
        return None
    return source, int(index) % parts * width


def merged_tokens(value: ir.Value, before: ir.Node) -> Heads | None:
    """Returns the heads [B, S, H, D] of a value as [B, S, H*D], or None if H or D is not known."""
    shape = g.dims(value)
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or not isinstance(shape[3], int):
        return None
    count, size, width = shape[2], shape[3], shape[2] * shape[3]
    reshape = g.producer(value, "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    found = g.dims(source)
    if source is None or found is None or len(found) != 3 or found[2] != width:
        source = _reshape(before, value, [0, 0, width], [*shape[:2], width])
    return Heads(source, count, size)


def split_heads(heads: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value:
    """Returns [B, S, H*D] as [B, H, S, D]; `merged_heads` is the inverse."""
    outer = (g.dims(heads) or [None, None])[:2]
    bshd = split_tokens(heads, count, size, before)
    shape = [outer[0], count, outer[1], size]
    return g.add(before, "Transpose", [bshd], {"perm": SWAP_S_H}, shape=shape)


def split_tokens(heads: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value:
    """Returns [B, S, H*D] as [B, S, H, D]; `merged_tokens` is the inverse."""
    outer = (g.dims(heads) or [None, None])[:2]
    return _reshape(before, heads, [0, 0, count, size], [*outer, count, size])


def without_repeats(value: ir.Value) -> tuple[ir.Value, int]:
    """Returns the heads before `repeat_kv` repeated each for several heads of q, and how often it did."""
    reshaped: ir.Value | None = value
    while (reshape := g.producer(reshaped, "Reshape")) is not None:  # dynamo's exports have two of them
        reshaped = reshape.inputs[0]
    expand = g.producer(reshaped, "Expand") if reshaped is not value else None
    unsqueeze = g.producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if unsqueeze is None or g.ints(unsqueeze, "axes", 1) != [2] or expand is None:
        return value, 1
    found, source, whole = g.dims(expand.outputs[0]), unsqueeze.inputs[0], g.dims(value)
    if found is None or len(found) != 5 or source is None or whole is None or len(whole) != 4:
        return value, 1
    if not isinstance(found[1], int) or not isinstance(found[2], int) or whole[1] != found[1] * found[2]:
        return value, 1
    return (source, found[2]) if whole[2:] == found[3:] else (value, 1)


def repeat_heads(context: g.RewriteContext, heads: Heads, times: int, before: ir.Node) -> Heads:
    """Repeats each head: [B, S, H*D] -> [B, S, H*times*D].

    On CUDA it multiplies by ones: twinop's mul runs at memory bandwidth, and ONNX Runtime's Expand does not.
    """
    if times == 1:
        return heads
    outer = (g.dims(heads.value) or [None, None])[:2]
    count, size = heads.count, heads.size
    single = _reshape(before, heads.value, [0, 0, count, 1, size], [*outer, count, 1, size])
    shape = [*outer, count, times, size]
    if context.device == "cuda" and single.dtype is not None:
        ones = g.initializer(context.graph, np.ones((times, 1), single.dtype.numpy()), "ones")
        wide = g.add(before, context.records["mul"].onnx_name, [single, ones], domain=DOMAIN, shape=shape)
    else:
        wide = g.add(before, "Expand", [single, g.int_constant(before, [1, 1, 1, times, 1])], shape=shape)
    width = count * times * size
    return Heads(_reshape(before, wide, [0, 0, width], [*outer, width]), count * times, size)


def _part_of_packed(value: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value | None:
    """Returns q, k or v as a slice of the packed product [B, S, 3*H*D].

    Vision transformers reshape this product to [B, S, 3, H, D], permute it to [3, B, H, S, D] and index the
    first dimension.
    """
    permuted: ir.Value | None
    index: float | None
    if (gather := g.producer(value, "Gather")) is not None and g.attribute(gather, "axis", 0) == 0:
        permuted, index = gather.inputs[0], g.scalar(gather.inputs[1])
    elif (squeeze := g.producer(value, "Squeeze")) is not None and g.ints(squeeze, "axes", 1) == [0]:
        part = g.part_of(squeeze.inputs[0], 0)
        if part is None:
            return None
        permuted, index = part[:2]
    else:
        return None
    transpose = g.producer(permuted, "Transpose")
    if transpose is None or list(g.attribute(transpose, "perm", ())) != [2, 0, 3, 1, 4] or index is None:
        return None
    reshape = g.producer(transpose.inputs[0], "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    packed, found = (g.dims(reshape.outputs[0]), g.dims(source)) if reshape is not None else (None, None)
    if packed is None or found is None or len(found) != 3 or packed[3:] != [count, size]:
        return None
    width = count * size
    if not isinstance(packed[2], int) or found[2] != packed[2] * width or source is None:
        return None
    start = int(index) % packed[2] * width
    bounds = [g.int_constant(before, [each]) for each in (start, start + width, -1)]
    return g.add(before, "Slice", [source, *bounds], shape=[*found[:2], width])


def _reshape(before: ir.Node, value: ir.Value, target: list[int], shape: list[g.Dim]) -> ir.Value:
    return g.add(before, "Reshape", [value, g.int_constant(before, target)], shape=shape)
