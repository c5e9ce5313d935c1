"""Finds what stands behind heads [B, H, S, D]: [B, S, H*D], as a linear layer makes it.

ONNX Runtime's fast attention takes the second, so the transposes between the two go.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from twinop.record import DOMAIN

from .graph import (
    Dim,
    Work,
    add,
    attribute,
    constant,
    dims,
    initializer,
    int_constant,
    ints,
    producer,
    scalar,
)

SWAP_S_H = [0, 2, 1, 3]


@dataclass(frozen=True)
class Heads:
    """A tensor [B, S, count * size].

    Attributes:
        copied: whether a transpose was added to make it.
    """

    value: ir.Value
    count: int
    size: int
    copied: bool = False


def merged_heads(value: ir.Value, before: ir.Node) -> Heads | None:
    """Returns the heads [B, H, S, D] of a value as [B, S, H*D], or None if H or D is not known.

    Args:
        before: where nodes are added if some are needed.
    """
    shape = dims(value)
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return None
    count, size = shape[1], shape[3]
    if (part := _part_of_packed(value, count, size, before)) is not None:
        return Heads(part, count, size)
    transpose = producer(value, "Transpose")
    copied = transpose is None or list(attribute(transpose, "perm", ())) != SWAP_S_H
    if copied:
        apart: ir.Value | None = add(
            before, "Transpose", [value], {"perm": SWAP_S_H}, shape=[shape[0], shape[2], count, size]
        )
    else:
        assert transpose is not None
        apart = transpose.inputs[0]
    assert apart is not None
    if (reshape := producer(apart, "Reshape")) is not None:
        source = reshape.inputs[0]
        found = dims(source)
        if found is not None and len(found) == 3 and found[2] == count * size:
            assert source is not None
            return Heads(source, count, size, copied)
    outer = dims(apart) or [None, None]
    return Heads(
        _reshape(before, apart, [0, 0, count * size], [*outer[:2], count * size]), count, size, copied
    )


def split_heads(heads: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value:
    """Makes [B, H, S, D] of [B, S, H*D]; `joined` takes this back."""
    outer = (dims(heads) or [None, None])[:2]
    apart = _reshape(before, heads, [0, 0, count, size], [*outer, count, size])
    shape = [outer[0], count, outer[1], size]
    return add(before, "Transpose", [apart], {"perm": SWAP_S_H}, shape=shape)


def without_repeats(value: ir.Value) -> tuple[ir.Value, int]:
    """Returns the heads before each was repeated for several heads of q (`repeat_kv`), and how often."""
    reshaped: ir.Value | None = value
    while (reshape := producer(reshaped, "Reshape")) is not None:  # dynamo's exports have two of them
        reshaped = reshape.inputs[0]
    expand = producer(reshaped, "Expand") if reshaped is not value else None
    unsqueeze = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if unsqueeze is None or ints(unsqueeze, "axes", 1) != [2] or expand is None:
        return value, 1
    found, source, whole = dims(expand.outputs[0]), unsqueeze.inputs[0], dims(value)
    if found is None or len(found) != 5 or source is None or whole is None or len(whole) != 4:
        return value, 1
    if not isinstance(found[1], int) or not isinstance(found[2], int) or whole[1] != found[1] * found[2]:
        return value, 1
    return (source, found[2]) if whole[2:] == found[3:] else (value, 1)


def repeat_heads(work: Work, heads: Heads, times: int, before: ir.Node) -> Heads:
    """Repeats each head [B, S, H*D] -> [B, S, H*times*D].

    On CUDA by a product with ones, which runs at the speed of memory, as ONNX Runtime's Expand does not.
    """
    if times == 1:
        return heads
    outer = (dims(heads.value) or [None, None])[:2]
    count, size = heads.count, heads.size
    apart = _reshape(before, heads.value, [0, 0, count, 1, size], [*outer, count, 1, size])
    shape = [*outer, count, times, size]
    if work.device == "cuda" and apart.dtype is not None:
        ones = initializer(work.graph, np.ones((times, 1), apart.dtype.numpy()), "ones")
        wide = add(before, work.records["mul"].onnx_name, [apart, ones], domain=DOMAIN, shape=shape)
    else:
        wide = add(before, "Expand", [apart, int_constant(before, [1, 1, 1, times, 1])], shape=shape)
    width = count * times * size
    return Heads(_reshape(before, wide, [0, 0, width], [*outer, width]), count * times, size, True)


def _part_of_packed(value: ir.Value, count: int, size: int, before: ir.Node) -> ir.Value | None:
    """Returns q, k or v of [B, S, 3*H*D] as a slice of it.

    Vision transformers reshape the product to [B, S, 3, H, D], permute it to [3, B, H, S, D] and take an
    index of the first dimension.
    """
    index: float | None
    if (gather := producer(value, "Gather")) is not None and attribute(gather, "axis", 0) == 0:
        permuted, index = gather.inputs[0], scalar(gather.inputs[1])
    elif (squeeze := producer(value, "Squeeze")) is not None and ints(squeeze, "axes", 1) == [0]:
        parts = squeeze.inputs[0]
        assert parts is not None
        node = producer(parts, "Split", "Slice")
        if node is None:
            return None
        permuted = node.inputs[0]
        if node.op_type == "Split":
            index = list(node.outputs).index(parts)
        else:
            starts = constant(node.inputs[1])
            index = None if starts is None else float(starts.reshape(-1)[0])
    else:
        return None
    transpose = producer(permuted, "Transpose")
    if transpose is None or list(attribute(transpose, "perm", ())) != [2, 0, 3, 1, 4] or index is None:
        return None
    reshape = producer(transpose.inputs[0], "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    packed, found = (dims(reshape.outputs[0]), dims(source)) if reshape is not None else (None, None)
    if packed is None or found is None or len(found) != 3 or packed[3:] != [count, size]:
        return None
    width = count * size
    if not isinstance(packed[2], int) or found[2] != packed[2] * width or source is None:
        return None
    start = int(index) % packed[2] * width
    bounds = [int_constant(before, [each]) for each in (start, start + width, -1)]
    return add(before, "Slice", [source, *bounds], shape=[*found[:2], width])


def _reshape(before: ir.Node, value: ir.Value, target: list[int], shape: list[Dim]) -> ir.Value:
    return add(before, "Reshape", [value, int_constant(before, target)], shape=shape)
