"""Rotary position embedding in one node.

Matches: x * cos + rotate_half(x) * sin on heads [B, H, S, D], with cos and sin [1 or B, 1, S, D] as the
model computes them, the two halves of each row being equal.
Writes: CustomRope on q and k [B, S, H*D] of one attention together, with the first half of cos and sin:
nothing about positions is assumed. One that stands alone, and for the CPU, becomes ONNX Runtime's
RotaryEmbedding.
Leaves alone: parts of a head (the rest passes as it is), other orders of the rotated pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from .graph import DOMAIN, MICROSOFT, Dim, Work, add, dims, int_constant, ints, made_by, other_input, replace
from .heads import Heads, joined, split


@dataclass(frozen=True)
class _Rotation:
    node: ir.Node  # whose output is the result
    heads: Heads
    cos: ir.Value
    sin: ir.Value


def rewrite(work: Work) -> None:
    """Applies this rewrite."""
    found = list(_rotations(work))
    while found:
        first = found.pop(0)
        second = next((each for each in found if work.device == "cuda" and _go_together(first, each)), None)
        if second is None:
            _replace(first, _alone(first))
            work.made["rotary embedding"] += 1
        else:
            found.remove(second)
            for rotation, result in zip((first, second), _together(work, first, second), strict=True):
                _replace(rotation, result)
            work.made["rotary embedding of q and k"] += 1


def _rotations(work: Work) -> Iterator[_Rotation]:
    for node in work.nodes("Add", domain=""):
        found = _parts(node) if node.graph is not None else None
        if found is None:
            continue
        x, cos, sin = found
        if not _fits(dims(x), dims(cos), dims(sin)):
            work.left["rotary embedding: of another layout than [B, H, S, D]"] += 1
        elif (heads := joined(x, node)) is None:
            work.left["rotary embedding: the number of heads is not known"] += 1
        else:
            yield _Rotation(node, heads, cos, sin)


def _go_together(a: _Rotation, b: _Rotation) -> bool:
    """Whether one node can compute both: they have the same angles, and neither needs the other."""
    if a.cos is not b.cos or a.sin is not b.sin or a.heads.size != b.heads.size:
        return False
    return not (_needs(a.heads.value, b.node) or _needs(b.heads.value, a.node))


def _needs(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value is computed from what a node returns."""
    waiting, seen = [value], set[ir.Value]()
    while waiting:
        each = waiting.pop()
        made = each.producer()
        if each in seen or made is None:
            continue
        if made is node:
            return True
        seen.add(each)
        waiting += [read for read in made.inputs if read is not None]
    return False


def _together(work: Work, a: _Rotation, b: _Rotation) -> list[ir.Value]:
    angles = [_angles(a.node, each, a.heads.size) for each in (a.cos, a.sin)]
    inputs = [a.heads.value, b.heads.value, *angles]
    node = ir.node(work.records["rope"].onnx_name, inputs, domain=DOMAIN, num_outputs=2)
    for result, rotation in zip(node.outputs, (a, b), strict=True):
        source = rotation.heads.value
        result.type, result.shape = source.type, source.shape
    work.graph.insert_before(b.node, node)
    work.graph.opset_imports.setdefault(DOMAIN, 1)
    return list(node.outputs)


def _alone(rotation: _Rotation) -> ir.Value:
    node, heads = rotation.node, rotation.heads
    caches = [_cache(node, each, heads.size) for each in (rotation.cos, rotation.sin)]
    inputs = [heads.value, _positions(node, rotation.cos), *caches]
    attributes = {"num_heads": heads.count}
    return add(node, "RotaryEmbedding", inputs, attributes, domain=MICROSOFT, shape=dims(heads.value))


def _replace(rotation: _Rotation, result: ir.Value) -> None:
    node, heads = rotation.node, rotation.heads
    replace(node.outputs[0], split(result, heads.count, heads.size, node))


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Returns x, cos and sin."""
    products = [made_by(value, "Mul") for value in node.inputs]
    if products[0] is None or products[1] is None:
        return None
    for turned, plain in (products, products[::-1]):
        assert turned is not None and plain is not None
        for rotated in turned.inputs:
            x = _source_of_rotated(rotated)
            if x is None or rotated is None or not any(value is x for value in plain.inputs):
                continue
            cos, sin = other_input(plain, x), other_input(turned, rotated)
            if cos is not None and sin is not None:
                return x, cos, sin
    return None


def _source_of_rotated(value: ir.Value | None) -> ir.Value | None:
    """Returns x of concat(-x[..., half:], x[..., :half])."""
    concat = made_by(value, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None
    negative = made_by(concat.inputs[0], "Neg")
    if negative is None:
        return None
    second, first = negative.inputs[0], concat.inputs[1]
    halves = [made_by(each, "Slice", "Split") for each in (second, first)]
    if halves[0] is None or halves[1] is None:
        return None
    x = halves[0].inputs[0]
    if halves[1].inputs[0] is not x or x is None:
        return None
    width, parts = (dims(x) or [None])[-1], [(dims(each) or [None])[-1] for each in (second, first)]
    if not isinstance(width, int) or parts != [width // 2, width // 2]:
        return None
    if halves[0].op_type == "Split":
        return x if halves[0] is halves[1] and list(halves[0].outputs) == [first, second] else None
    return x if ints(halves[1], "starts", 1) == [0] and ints(halves[0], "starts", 1) != [0] else None


def _fits(x: list[Dim] | None, cos: list[Dim] | None, sin: list[Dim] | None) -> bool:
    if x is None or cos is None or cos != sin or len(x) != 4 or len(cos) not in (2, 3, 4):
        return False
    padded = [1] * (4 - len(cos)) + cos
    return padded[1] == 1 and padded[3] == x[3] and padded[2] == x[2] and padded[0] in (1, x[0])


def _first_half(before: ir.Node, value: ir.Value, size: int) -> ir.Value:
    half = [*(dims(value) or [])[:-1], size // 2]
    bounds = [int_constant(before, [each]) for each in (0, size // 2, -1)]
    return add(before, "Slice", [value, *bounds], shape=half)


def _angles(before: ir.Node, value: ir.Value, size: int) -> ir.Value:
    """Makes [1 or B, S, D / 2] of cos or sin."""
    first = _first_half(before, value, size)
    shape = dims(first) or []
    if len(shape) == 4:
        return add(before, "Squeeze", [first, int_constant(before, [1])], shape=[shape[0], *shape[2:]])
    if len(shape) == 2:
        return add(before, "Unsqueeze", [first, int_constant(before, [0])], shape=[1, *shape])
    return first


def _cache(before: ir.Node, value: ir.Value, size: int) -> ir.Value:
    """Makes [rows, D / 2] of cos or sin."""
    rows = [_first_half(before, value, size), int_constant(before, [-1, size // 2])]
    return add(before, "Reshape", rows, shape=[None, size // 2])


def _positions(before: ir.Node, cos: ir.Value) -> ir.Value:
    """Makes the cache's row of each token: [1] with the first one, or [B, S] for rows of each sequence."""
    shape = dims(cos) or []
    if len(shape) < 3 or shape[0] == 1:
        return int_constant(before, [0])
    whole = add(before, "Shape", [cos], dtype=ir.DataType.INT64, shape=[len(shape)])
    at = int_constant(before, [0, len(shape) - 2])
    sizes = add(before, "Gather", [whole, at], dtype=ir.DataType.INT64, shape=[2])
    number = add(before, "ReduceProd", [sizes], {"keepdims": 0}, dtype=ir.DataType.INT64, shape=[])
    zero, one = (int_constant(before, each) for each in (0, 1))
    rows = add(before, "Range", [zero, number, one], dtype=ir.DataType.INT64, shape=[None])
    return add(before, "Reshape", [rows, sizes], shape=[shape[0], shape[-2]])
