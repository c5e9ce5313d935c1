"""Fuses rotary position embedding.

Matches: x * cos + rotated(x) * sin on heads [B, H, S, D], with cos and sin [1 or B, 1, S, D] that the model
computes. The pairs are (i, i + D/2), as in Llama, or (2i, 2i + 1), as in RoFormer and Cohere; both elements
of a pair have the same angle. Only the first elements of a head may be rotated, as in GPT-NeoX.
Writes: CustomRope on q and k [B, S, H*D] of one attention together. It takes one cos and sin for each pair,
so nothing about positions is assumed. A single tensor, and every tensor on the CPU, gets ONNX Runtime's
RotaryEmbedding.
Leaves alone: other orders of the pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from .graph import (
    DOMAIN,
    MICROSOFT,
    Dim,
    Work,
    add,
    attribute,
    dims,
    int_constant,
    ints,
    last_dim,
    only_user,
    other_input,
    producer,
    replace,
)  # fmt: skip
from .heads import Heads, merged_heads, split_heads


@dataclass(frozen=True)
class _Rotation:
    node: ir.Node  # its output is the result
    heads: Heads
    cos: ir.Value
    sin: ir.Value
    layout: str  # as in CustomRope
    rotary_dim: int  # the first elements of a head, which are rotated


def rewrite(work: Work) -> None:
    found = list(_rotations(work))
    while found:
        first = found.pop(0)
        second = next(
            (each for each in found if work.device == "cuda" and _can_fuse(work, first, each)), None
        )
        if second is None:
            _replace(first, _single(first))
            work.made["rotary embedding"] += 1
        else:
            found.remove(second)
            for rotation, result in zip((first, second), _fused(work, first, second), strict=True):
                _replace(rotation, result)
            work.made["rotary embedding of q and k"] += 1


def _rotations(work: Work) -> Iterator[_Rotation]:
    for node in work.nodes("Add", domain=""):
        found = _match(node) if node.graph is not None else None
        if found is None:
            continue
        x, cos, sin, layout = found
        rotary_dim, whole = last_dim(x), _partial_rotation(node, x)
        if rotary_dim is None or not _fits(dims(x), dims(cos), dims(sin)):
            work.left["rotary embedding: of another layout than [B, H, S, D]"] += 1
            continue
        node, x = whole or (node, x)
        if (heads := merged_heads(x, node)) is None:
            work.left["rotary embedding: the number of heads is not known"] += 1
        else:
            yield _Rotation(node, heads, cos, sin, layout, rotary_dim)


def _can_fuse(work: Work, a: _Rotation, b: _Rotation) -> bool:
    """Whether one node can compute both: they have the same angles, and neither depends on the other."""
    if a.cos is not b.cos or a.sin is not b.sin or (a.heads.size, a.layout) != (b.heads.size, b.layout):
        return False  # the same cos: rotary_dim is the same
    if _differ(work, *((dims(each.heads.value) or [None])[0] for each in (a, b))):
        return False
    return not (_depends_on(a.heads.value, b.node) or _depends_on(b.heads.value, a.node))


def _differ(work: Work, a: Dim, b: Dim) -> bool:
    """Whether two sizes are known to differ. Symbolic names that inference invented may be equal."""
    given = {dim for value in work.graph.inputs for dim in dims(value) or () if dim is not None}
    return a != b and all(isinstance(each, int) or each in given for each in (a, b))


def _depends_on(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value is computed from what a node returns."""
    waiting, seen = [value], set[ir.Value]()
    while waiting:
        each = waiting.pop()
        source = each.producer()
        if each in seen or source is None:
            continue
        if source is node:
            return True
        seen.add(each)
        waiting += [read for read in source.inputs if read is not None]
    return False


def _fused(work: Work, a: _Rotation, b: _Rotation) -> list[ir.Value]:
    """Inserts CustomRope for two rotations, and returns its outputs."""
    angles = [_angles(a, each) for each in (a.cos, a.sin)]
    inputs = [a.heads.value, b.heads.value, *angles]
    attributes: dict[str, str | int] = {"layout": a.layout, "head_size": _head_size(a)}
    node = ir.node(work.records["rope"].onnx_name, inputs, attributes, domain=DOMAIN, num_outputs=2)
    for result, rotation in zip(node.outputs, (a, b), strict=True):
        source = rotation.heads.value
        result.type, result.shape = source.type, source.shape
    work.graph.insert_before(b.node, node)
    work.graph.opset_imports.setdefault(DOMAIN, 1)
    return list(node.outputs)


def _single(rotation: _Rotation) -> ir.Value:
    """Inserts RotaryEmbedding for one rotation, and returns its output."""
    node, heads = rotation.node, rotation.heads
    caches = [_cache(rotation, each) for each in (rotation.cos, rotation.sin)]
    inputs = [heads.value, _positions(node, rotation.cos), *caches]
    attributes = {
        "num_heads": heads.count,
        "interleaved": int(rotation.layout == "interleaved"),
        "rotary_embedding_dim": rotation.rotary_dim if _head_size(rotation) else 0,
    }
    return add(node, "RotaryEmbedding", inputs, attributes, domain=MICROSOFT, shape=dims(heads.value))


def _replace(rotation: _Rotation, result: ir.Value) -> None:
    node, heads = rotation.node, rotation.heads
    replace(node.outputs[0], split_heads(result, heads.count, heads.size, node))


def _head_size(rotation: _Rotation) -> int:
    """Returns the size of a head of which only a part is rotated, else 0."""
    return rotation.heads.size if rotation.heads.size != rotation.rotary_dim else 0


def _partial_rotation(node: ir.Node, x: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """Returns concat(rotated x, rest), and the tensor that x and the rest are parts of, if there is one."""
    concat = only_user(node.outputs[0])
    if concat is None or concat.op_type != "Concat" or len(concat.inputs) != 2:
        return None
    rest = concat.inputs[1]
    parts = [producer(each, "Slice", "Split") for each in (x, rest)]
    if parts[0] is None or parts[1] is None or rest is None or concat.inputs[0] is not node.outputs[0]:
        return None
    whole = parts[0].inputs[0]
    rotary_dim, rest_dim, size = (last_dim(each) for each in (x, rest, whole))
    if parts[1].inputs[0] is not whole or whole is None or rotary_dim is None or rest_dim is None:
        return None
    if rotary_dim + rest_dim != size or attribute(concat, "axis", 0) not in (-1, 3):
        return None
    if parts[0].op_type == "Split":
        in_order = parts[0] is parts[1] and list(parts[0].outputs) == [x, rest]
    else:
        in_order = all(ints(part, "steps", 4) in (None, [1]) for part in parts if part is not None)
        in_order &= ints(parts[0], "starts", 1) == [0] and ints(parts[1], "starts", 1) == [rotary_dim]
    return (concat, whole) if in_order else None


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, str] | None:
    """Returns x, cos, sin and the layout of a rotation that ends in this Add."""
    products = [producer(value, "Mul") for value in node.inputs]
    if products[0] is None or products[1] is None:
        return None
    for with_sin, with_cos in (products, products[::-1]):
        assert with_sin is not None and with_cos is not None
        for rotated in with_sin.inputs:
            x, layout = _source_of_halves(rotated), "half"
            if x is None:
                x, layout = _source_of_interleaved(rotated), "interleaved"
            if x is None or rotated is None or not any(value is x for value in with_cos.inputs):
                continue
            cos, sin = other_input(with_cos, x), other_input(with_sin, rotated)
            if cos is not None and sin is not None:
                return x, cos, sin, layout
    return None


def _source_of_halves(value: ir.Value | None) -> ir.Value | None:
    """Returns x of concat(-x[..., half:], x[..., :half])."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None
    negative = producer(concat.inputs[0], "Neg")
    if negative is None:
        return None
    second, first = negative.inputs[0], concat.inputs[1]
    halves = [producer(each, "Slice", "Split") for each in (second, first)]
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
    if any(ints(each, "steps", 4) not in (None, [1]) for each in halves if each is not None):
        return None
    return x if ints(halves[1], "starts", 1) == [0] and ints(halves[0], "starts", 1) != [0] else None


def _source_of_interleaved(value: ir.Value | None) -> ir.Value | None:
    """Returns x of stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)."""
    reshape = producer(value, "Reshape")
    concat = producer(reshape.inputs[0], "Concat") if reshape is not None else None
    if concat is None or len(concat.inputs) != 2:
        return None
    columns = [producer(each, "Unsqueeze") for each in concat.inputs]
    negative = producer(columns[0].inputs[0], "Neg") if columns[0] is not None else None
    if negative is None or columns[1] is None:
        return None
    odd, even = producer(negative.inputs[0], "Slice"), producer(columns[1].inputs[0], "Slice")
    if odd is None or even is None or odd.inputs[0] is not even.inputs[0]:
        return None
    x = odd.inputs[0]
    shape, stacked, flat = dims(x) or [None], dims(concat.outputs[0]) or [None], dims(value) or [None]
    width = shape[-1]
    if not isinstance(width, int) or stacked[-2:] != [width // 2, 2] or flat[-1] != width:
        return None
    every_second = all(
        ints(node, "starts", 1) == [start]
        and ints(node, "steps", 4) == [2]
        and ints(node, "axes", 3) in ([-1], [len(shape) - 1])
        for node, start in ((odd, 1), (even, 0))
    )
    return x if every_second and len(flat) == len(shape) and len(stacked) == len(shape) + 1 else None


def _fits(x: list[Dim] | None, cos: list[Dim] | None, sin: list[Dim] | None) -> bool:
    if x is None or cos is None or cos != sin or len(x) != 4 or len(cos) not in (2, 3, 4):
        return False
    padded = [1] * (4 - len(cos)) + cos
    return padded[1] == 1 and padded[3] == x[3] and padded[2] == x[2] and padded[0] in (1, x[0])


def _one_per_pair(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [..., D / 2], one element for each pair."""
    node, size = rotation.node, rotation.rotary_dim
    start_stop_step = (0, size // 2, 1) if rotation.layout == "half" else (0, size, 2)
    start, stop, step = (int_constant(node, [each]) for each in start_stop_step)
    inputs = [value, start, stop, int_constant(node, [-1]), step]
    return add(node, "Slice", inputs, shape=[*(dims(value) or [])[:-1], size // 2])


def _angles(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [1 or B, S, D / 2], for CustomRope."""
    node, single = rotation.node, _one_per_pair(rotation, value)
    shape = dims(single) or []
    if len(shape) == 4:
        return add(node, "Squeeze", [single, int_constant(node, [1])], shape=[shape[0], *shape[2:]])
    if len(shape) == 2:
        return add(node, "Unsqueeze", [single, int_constant(node, [0])], shape=[1, *shape])
    return single


def _cache(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [rows, D / 2], for RotaryEmbedding."""
    node, half = rotation.node, rotation.rotary_dim // 2
    rows = [_one_per_pair(rotation, value), int_constant(node, [-1, half])]
    return add(node, "Reshape", rows, shape=[None, half])


def _positions(before: ir.Node, cos: ir.Value) -> ir.Value:
    """Returns position_ids for `_cache`: [1] with the first row, or [B, S] if each sequence has its rows."""
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
