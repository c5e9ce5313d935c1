"""Converts heads [B, H, S, D] to [B, S, H*D], the layout of linear layers and fast attention.

A transpose between the two is then not needed.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import graph as g

SWAP_S_H = [0, 2, 1, 3]  # the permutation between [B, H, S, D] and [B, S, H, D]
SWAP_ROWS = [1, 0, 2]  # the permutation between [S, B, C] and [B, S, C]


@dataclass(frozen=True)
class Heads:
    """A tensor [B, S, count * size]."""

    value: ir.Value
    count: int
    size: int


def merged_heads(value: ir.Value, before: ir.Node) -> Heads | None:
    """Returns the heads [B, H, S, D] of a value as [B, S, H*D], or None if H or D is not known. If no value
    of the graph has this form, nodes are inserted before one."""
    _, count, _, size = shape = _four(value)
    if not isinstance(count, int) or not isinstance(size, int):
        return None
    if (part := _part_of_packed(value, count, size)) is not None:
        source, start = part
        return Heads(g.columns(before, source, start, start + count * size), count, size)
    if (rows := _rows_of_torch(value, shape)) is not None:
        return Heads(_swapped(rows, before), count, size)
    tokens_first, outer = g.untransposed(value, SWAP_S_H), g.producer(value, "Unsqueeze")
    if outer is not None and g.ints(outer, "axes", 1) == [0]:
        tokens_first = g.untransposed(outer.inputs[0], SWAP_ROWS)  # [S, H, D]
    return merged_tokens(
        g.transpose(before, value, SWAP_S_H) if tokens_first is None else tokens_first, before
    )


def _four(value: ir.Value | None) -> list[g.Dim]:
    """Returns the shape of a value with four dimensions, and unknown sizes for others."""
    shape = g.dims(value)
    return shape if shape is not None and len(shape) == 4 else [None] * 4


def _rows_of_torch(value: ir.Value, shape: list[g.Dim]) -> ir.Value | None:
    """Returns [S, B, H*D] of heads [B, H, S, D], as nn.MultiheadAttention makes them: it reshapes to [S, B*H,
    D], transposes to [B*H, S, D] and reshapes again. `batched_heads.py` transposes [S, B, H, D]."""
    _, count, tokens, size = shape
    if not isinstance(count, int) or not isinstance(size, int) or tokens is None:
        return None
    split = g.producer(g.untransposed(value, [1, 2, 0, 3]), "Reshape")
    nodes = g.chain(value, "Reshape", "Transpose", "Reshape")
    if split is None and (not nodes or not g.has_permutation(nodes[1], SWAP_ROWS)):
        return None
    last = split or nodes[2]
    ends = [(g.dims(each) or [])[::2] for each in (last.inputs[0], last.outputs[0])]
    are_rows = g.rank(last.inputs[0]) == 3 and ends[0] == [tokens, count * size]
    is_one = are_rows and ends[1] == [tokens, count if split else size]
    return last.inputs[0] if is_one else None  # then the batches are equal


def _swapped(value: ir.Value, before: ir.Node) -> ir.Value:
    """Returns [S, B, C] as [B, S, C]: transposed before the matmul that computes it, where models of [B, S,
    C] have the opposite one, and where one transpose of x is enough for q, k and v."""
    if (source := g.untransposed(value, SWAP_ROWS)) is not None:
        return source
    node, shape = g.producer(value, "Add", "MatMul", "Mul"), g.dims(value) or [None] * 3
    swapped = [shape[axis] for axis in SWAP_ROWS]
    if (part := _part_of_rows(value)) is not None:
        packed, start, width = part
        return g.columns(before, _swapped(packed, before), start, start + width)
    if node is not None and g.only_user(value) is not None:  # else the matmul would be computed twice
        x, other = node.inputs
        if node.op_type != "MatMul" and g.rank(x) < 2:
            x, other = other, x
        rank = len(operand) if (operand := g.dims(other)) is not None else 3
        is_per_column = rank == 2 if node.op_type == "MatMul" else rank < 2
        if x is not None and other is not None and g.rank(x) == 3 and is_per_column:
            inputs = [_swapped(x, before), other]
            return g.add(before, node.op_type, inputs if node.inputs[0] is x else inputs[::-1], shape=swapped)
    return g.transpose(before, value, SWAP_ROWS)


def _part_of_rows(value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """Returns the packed matmul [S, B, 3*C] of q, k or v [S, B, C], where the part starts, and C.
    nn.MultiheadAttention makes [S, B, 3, C], then [1, S, B, 3, C], [3, S, B, 1, C], [3, S, B, C]."""
    element = g.element_of(value, 0)
    nodes = g.chain(element[0], "Squeeze", "Transpose", "Unsqueeze", "Reshape") if element is not None else []
    if element is None or not nodes or not g.has_permutation(nodes[1], [3, 1, 2, 0, 4]):
        return None
    squeeze, _, unsqueeze, reshape = nodes
    source, (*outer, parts, width) = reshape.inputs[0], _four(reshape.outputs[0])
    if g.ints(squeeze, "axes", 1) not in ([-2], [3]) or g.ints(unsqueeze, "axes", 1) != [0]:
        return None
    if source is None or not isinstance(parts, int) or not isinstance(width, int):
        return None
    is_whole = g.same_dims(g.dims(source), [*outer, parts * width])
    return (source, element[1] % parts * width, width) if is_whole else None


def merged_tokens(value: ir.Value, before: ir.Node) -> Heads | None:
    """Returns the heads [B, S, H, D] of a value as [B, S, H*D], or [S, H, D] as [1, S, H*D], or None if H or
    D is not known."""
    *outer, count, size = [1, *(g.dims(value) or [])] if g.rank(value) == 3 else _four(value)
    if not isinstance(count, int) or not isinstance(size, int):
        return None
    reshape = g.producer(value, "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    if source is None or g.rank(value) == 3 or g.rank(source) != 3 or g.last_dim(source) != count * size:
        target = [1, -1] if g.rank(value) == 3 else [0, 0]
        source = g.reshape(before, value, [*target, count * size], [*outer, count * size])
    return Heads(source, count, size)


def split_heads(heads: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value:
    """Returns [B, S, H*D] as [B, H, S, D]; `merged_heads` is the inverse."""
    return g.transpose(before, split_tokens(heads, count, size, before), SWAP_S_H)


def split_tokens(heads: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value:
    """Returns [B, S, H*D] as [B, S, H, D]; `merged_tokens` is the inverse."""
    outer = (g.dims(heads) or [None, None])[:2]
    return g.reshape(before, heads, [0, 0, count, size], [*outer, count, size])


def without_repeats(value: ir.Value) -> ir.Value:
    """Returns the heads before `repeat_kv` repeated each for several heads of q."""
    reshaped: ir.Value | None = value
    while (reshape := g.producer(reshaped, "Reshape")) is not None:  # dynamo's exports have two of them
        reshaped = reshape.inputs[0]
    nodes = g.chain(reshaped, "Expand", "Unsqueeze") if reshaped is not value else []
    if not nodes or g.ints(nodes[1], "axes", 1) != [2]:
        return value
    repeated, source, (_, heads, *rest) = g.dims(reshaped) or [], nodes[1].inputs[0], _four(value)
    if len(repeated) != 5 or source is None or rest != repeated[3:] or g.rank(value) != 4:
        return value
    _, count, times, *_ = repeated
    is_whole = isinstance(count, int) and isinstance(times, int) and heads == count * times
    return source if is_whole else value


def repeat_heads(context: g.RewriteContext, heads: Heads, times: int, before: ir.Node) -> Heads:
    """Repeats each head: [B, S, H*D] -> [B, S, H*times*D]. On CUDA it multiplies by ones: twinop's mul runs
    at memory bandwidth, and ONNX Runtime's Expand does not."""
    if times == 1:
        return heads
    outer = (g.dims(heads.value) or [None, None])[:2]
    count, size = heads.count, heads.size
    single = g.reshape(before, heads.value, [0, 0, count, 1, size], [*outer, count, 1, size])
    shape = [*outer, count, times, size]
    if context.device == "cuda" and single.dtype is not None:
        ones = g.initializer(context.graph, np.ones((times, 1), single.dtype.numpy()), "ones")
        wide = context.add_op(before, "mul", [single, ones], shape)
    else:
        wide = g.add(before, "Expand", [single, g.int_constant(before, [1, 1, 1, times, 1])], shape=shape)
    width = count * times * size
    return Heads(g.reshape(before, wide, [0, 0, width], [*outer, width]), count * times, size)


def _part_of_packed(value: ir.Value, count: int, size: int) -> tuple[ir.Value, int] | None:
    """Returns the packed matmul [B, S, 3*H*D] that q, k or v is a part of, and where the part starts. Vision
    transformers make [B, S, 3, H, D] of it, then [3, B, H, S, D], and index that."""
    element = g.element_of(value, 0)
    nodes = g.chain(element[0], "Transpose", "Reshape") if element is not None else []
    if element is None or not nodes or not g.has_permutation(nodes[0], [2, 0, 3, 1, 4]):
        return None
    source, packed = nodes[1].inputs[0], g.dims(nodes[1].outputs[0]) or []
    if source is None or g.rank(source) != 3 or packed[3:] != [count, size] or not isinstance(packed[2], int):
        return None
    width = count * size
    return (source, element[1] % packed[2] * width) if g.last_dim(source) == packed[2] * width else None
