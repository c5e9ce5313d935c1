"""Rotary position embedding in one node.

Matches: x * cos + rotate_half(x) * sin on heads [B, H, S, D], with cos and sin [1 or B, 1, S, D] as the
model computes them, the two halves of each row being equal.
Writes: ONNX Runtime's RotaryEmbedding on [B, S, H*D], whose cache are the rows of cos and sin that the
model has computed: nothing about positions is assumed.
Leaves alone: parts of a head (the rest passes as it is), other orders of the rotated pairs.
"""

import onnx_ir as ir

from .graph import MICROSOFT, Dim, Work, add, dims, int_constant, ints, made_by, other_input, replace
from .heads import joined, split


def rewrite(work: Work) -> None:
    """Applies this rewrite."""
    for node in work.nodes("Add", domain=""):
        found = _parts(node) if node.graph is not None else None
        if found is None:
            continue
        x, cos, sin = found
        shapes = [dims(x), dims(cos), dims(sin)]
        if not _fits(*shapes):
            work.left["rotary embedding: of another layout than [B, H, S, D]"] += 1
            continue
        heads = joined(x, node)
        if heads is None:
            work.left["rotary embedding: the number of heads is not known"] += 1
            continue
        caches = [_cache(node, each, heads.size) for each in (cos, sin)]
        inputs = [heads.value, _positions(node, cos), *caches]
        rotated = add(
            node,
            "RotaryEmbedding",
            inputs,
            {"num_heads": heads.count},
            domain=MICROSOFT,
            shape=dims(heads.value),
        )
        replace(node.outputs[0], split(rotated, heads.count, heads.size, node))
        work.made["rotary embedding"] += 1


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


def _cache(before: ir.Node, value: ir.Value, size: int) -> ir.Value:
    """Makes [rows, D / 2] of cos or sin."""
    half = [*(dims(value) or [])[:-1], size // 2]
    bounds = [int_constant(before, [each]) for each in (0, size // 2, -1)]
    first = add(before, "Slice", [value, *bounds], shape=half)
    return add(before, "Reshape", [first, int_constant(before, [-1, size // 2])], shape=[None, size // 2])


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
