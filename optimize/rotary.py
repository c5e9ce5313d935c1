"""Fuses rotary position embedding.

Matches: x * cos + rotated(x) * sin on heads [B, H, S, D] or [B, S, H, D], with cos and sin [1 or B, 1, S, D]
or [1 or B, S, 1, D] that the model computes. The pairs are (i, i + D/2), as in Llama, or (2i, 2i + 1), as in
RoFormer and Cohere. Only the first elements of a head may be rotated, as in GPT-NeoX. The two elements of
each pair may also be computed apart, from cos and sin with D/2 columns, and then joined. The first tokens may
be left unrotated, as the class token in EVA-02, if cos and sin have known sizes. They get angles of zero.
Writes: CustomRope on q and k [B, S, H*D] of one attention together. It takes one cos and sin for each pair,
so nothing about positions is assumed. A single tensor, and every tensor on the CPU, gets ONNX Runtime's
RotaryEmbedding.
Leaves alone: other orders of the pairs; cos and sin with D columns that are not known to be the same for both
elements of each pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .heads import Heads, merged_heads, merged_tokens, split_heads, split_tokens
from .rewrite import Rewrite, label
from .rotary_match import has_equal_pairs, match_rotation

_Extended = dict[tuple[ir.Value, int, float, int], ir.Value]
"""cos or sin for more tokens, by the original, the number of these tokens, what they get and their axis."""


@dataclass(frozen=True)
class _Rotation:
    node: ir.Node  # its output is the result
    heads: Heads
    cos: ir.Value
    sin: ir.Value
    layout: str  # as in CustomRope
    rotary_dim: int  # the first elements of a head, which are rotated
    tokens_first: bool  # the result is [B, S, H, D], not [B, H, S, D]


class Rotary(
    Rewrite[_Rotation], name="rotary", op_types=("Add", "Concat"), pattern="rotary embedding", at_once=True
):
    """Fuses a rotation, and on CUDA another one of the same angles with it."""

    def __init__(self, context: g.RewriteContext) -> None:
        super().__init__(context)
        self.extended, self.whole_angles = _Extended(), dict[ir.Value, ir.Value]()

    def match(self, node: ir.Node) -> _Rotation | g.Skipped | str:
        match = match_rotation(node)
        if match is None:
            return "it is not the last node of x * cos + rotated(x) * sin"
        last, x, cos, sin = match.node, match.x, match.cos, match.sin
        rotary_dim, whole = g.last_dim(x), _rejoined(last, x, -1, 0)
        shapes = g.dims(x), g.dims(cos), g.dims(sin)
        tokens_first = not _fits(*shapes, 2) and _fits(*shapes, 1)
        if rotary_dim is None or not (tokens_first or _fits(*shapes, 2)):
            return g.Skipped("of another layout than [B, H, S, D] or [B, S, H, D]")
        is_twice = g.last_dim(cos) == rotary_dim
        if is_twice and not all(has_equal_pairs(each, match.layout) for each in (cos, sin)):
            return g.Skipped("the angles of a pair may differ")
        last, x = whole or (last, x)
        axis, sizes = 1 if tokens_first else 2, g.dims(cos) or []
        if self.context.may_broadcast(x, cos, sin):
            cos, sin = (_as_large_as(self.whole_angles, node, each, x, axis) for each in (cos, sin))
        tokens = _rejoined(last, x, axis, 1)
        if tokens is not None and len(sizes) >= 4 - axis and all(isinstance(size, int) for size in sizes):
            count = _size(tokens[1], axis) - _size(x, axis)
            cos, sin = (_extend(self.extended, node, each, count, axis) for each in ((cos, 1.0), (sin, 0.0)))
            last, x = tokens
        heads = merged_tokens(x, last) if tokens_first else merged_heads(x, last)
        if heads is None:
            return g.Skipped("the number of heads is not known")
        return _Rotation(last, heads, cos, sin, match.layout, rotary_dim, tokens_first)

    def apply(self, node: ir.Node, match: _Rotation) -> None:
        if match.node.graph is None:  # it was fused with another one
            return
        others = [each for _, each in self.matches if each.node.graph is not None and each is not match]
        others = others if self.context.device == "cuda" else []
        second = next((each for each in others if _can_fuse(self.context, match, each)), None)
        if second is None:
            result = _single(match)
            label(g.maker(result), "rotary embedding")
            self._put(match, result)
            return
        first, other = _fused(self.context, match, second)
        label(g.maker(first), "rotary embedding of q and k")
        self._put(match, first)
        self._put(second, other)

    def _put(self, rotation: _Rotation, result: ir.Value) -> None:
        node, heads = rotation.node, rotation.heads
        split = split_tokens if rotation.tokens_first else split_heads
        self.replace(node.outputs[0], split(result, heads.count, heads.size, node))


def _can_fuse(context: g.RewriteContext, a: _Rotation, b: _Rotation) -> bool:
    """Whether one node can compute both: they have the same angles, and neither depends on the other."""
    kinds = [(each.heads.size, each.layout, each.rotary_dim, each.tokens_first) for each in (a, b)]
    if a.cos is not b.cos or a.sin is not b.sin or kinds[0] != kinds[1]:
        return False
    if context.may_broadcast(a.heads.value, b.heads.value):
        return False
    if context.may_differ(*((g.dims(each.heads.value) or [None])[0] for each in (a, b))):
        return False
    return not any(
        set(x.node.outputs) & g.ancestors(y.heads.value, of_shapes=True) for x, y in ((a, b), (b, a))
    )


def _fused(context: g.RewriteContext, a: _Rotation, b: _Rotation) -> Sequence[ir.Value]:
    """Inserts CustomRope for two rotations, and returns its outputs."""
    angles = [_angles(a, each) for each in (a.cos, a.sin)]
    inputs = [a.heads.value, b.heads.value, *angles]
    attributes: dict[str, str | int] = {"layout": a.layout, "head_size": _head_size(a)}
    name = context.records["rope"].onnx_name
    return g.add_like(b.node, name, inputs, attributes, inputs[:2], domain=DOMAIN)


def _single(rotation: _Rotation) -> ir.Value:
    """Inserts RotaryEmbedding for one rotation, and returns its output."""
    node, heads = rotation.node, rotation.heads
    caches = [_cache(rotation, each) for each in (rotation.cos, rotation.sin)]
    inputs = [heads.value, _positions(node, rotation), *caches]
    attributes = {
        "num_heads": heads.count,
        "interleaved": int(rotation.layout == "interleaved"),
        "rotary_embedding_dim": rotation.rotary_dim if _head_size(rotation) else 0,
    }
    return g.add(node, "RotaryEmbedding", inputs, attributes, domain=g.MICROSOFT, shape=g.dims(heads.value))


def _head_size(rotation: _Rotation) -> int:
    """Returns the size of a head of which only a part is rotated, else 0."""
    return rotation.heads.size if rotation.heads.size != rotation.rotary_dim else 0


def _rejoined(node: ir.Node, x: ir.Value, axis: int, position: int) -> tuple[ir.Node, ir.Value] | None:
    """Returns the Concat of rotated x and the rest, and the tensor that both are parts of, if there is one.

    Args:
        node: computes rotated x.
        position: that of rotated x, 0 or 1.
    """
    concat = g.only_user(node.outputs[0])
    if concat is None or concat.op_type != "Concat" or len(concat.inputs) != 2:
        return None
    if concat.inputs[position] is not node.outputs[0]:
        return None
    rest = concat.inputs[1 - position]
    whole = g.whole_of((x, rest) if position == 0 else (rest, x), axis)
    if whole is None or g.attribute(concat, "axis", 0) not in (axis % 4, axis % 4 - 4):
        return None
    return concat, whole


def _size(value: ir.Value, axis: int) -> int:
    """Returns a size that is known."""
    size = (g.dims(value) or [])[axis]
    assert isinstance(size, int)
    return size


def _extend(
    extended: _Extended, before: ir.Node, angles: tuple[ir.Value, float], count: int, tokens: int
) -> ir.Value:
    """Returns cos or sin with `count` tokens in front of its own, which get the number beside it."""
    value, number = angles
    key = value, count, number, tokens
    if key not in extended:
        sizes = [_size(value, axis) for axis in range(g.rank(value))]
        axis = tokens - 4 + len(sizes)
        first = [*sizes[:axis], count, *sizes[axis + 1 :]]
        row = g.scalar_constant(before, number, value)
        start = g.add(before, "Expand", [row, g.int_constant(before, first)], shape=first)
        whole = [*sizes[:axis], count + sizes[axis], *sizes[axis + 1 :]]
        extended[key] = g.add(before, "Concat", [start, value], {"axis": axis}, shape=whole)
    return extended[key]


def _as_large_as(
    known: dict[ir.Value, ir.Value], before: ir.Node, angles: ir.Value, x: ir.Value, tokens: int
) -> ir.Value:
    """Returns cos or sin with the tokens and sequences of x, where one of them may stand for all."""
    if angles not in known:
        shape = g.dims(angles) or []
        sizes = [g.int_constant(before, [1])] * len(shape)
        [sizes[tokens - 4]] = g.sizes_of(before, (x, [tokens]))
        if len(shape) == 4 and shape[0] != 1:
            [sizes[0]] = g.sizes_of(before, (x, [0]))
        known[angles] = g.expand(before, angles, sizes)
    return known[angles]


def _fits(x: list[g.Dim] | None, cos: list[g.Dim] | None, sin: list[g.Dim] | None, tokens: int) -> bool:
    """Whether cos and sin belong to x [B, H, S, D] or [B, S, H, D], where `tokens` is the axis of S."""
    if x is None or cos is None or cos != sin or len(x) != 4 or len(cos) not in (2, 3, 4):
        return False
    padded = [1] * (4 - len(cos)) + cos
    width = x[3] if isinstance(x[3], int) else 0
    if padded[3 - tokens] != 1 or padded[tokens] != x[tokens] or padded[3] not in (width, width // 2):
        return False
    return padded[0] in (1, x[0])


def _one_per_pair(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [..., D / 2], one element for each pair."""
    node, size = rotation.node, rotation.rotary_dim
    if g.last_dim(value) == size // 2:
        return value
    start_stop_step = (0, size // 2, 1) if rotation.layout == "half" else (0, size, 2)
    start, stop, step = (g.int_constant(node, [each]) for each in start_stop_step)
    inputs = [value, start, stop, g.int_constant(node, [-1]), step]
    return g.add(node, "Slice", inputs, shape=[*(g.dims(value) or [])[:-1], size // 2])


def _angles(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [1 or B, S, D / 2], for CustomRope."""
    node, single = rotation.node, _one_per_pair(rotation, value)
    shape = g.dims(single) or []
    if len(shape) == 4 or (len(shape) == 3 and rotation.tokens_first):
        heads = len(shape) - (2 if rotation.tokens_first else 3)
        shape = [*shape[:heads], *shape[heads + 1 :]]
        single = g.add(node, "Squeeze", [single, g.int_constant(node, [heads])], shape=shape)
    if len(shape) == 2:
        return g.add(node, "Unsqueeze", [single, g.int_constant(node, [0])], shape=[1, *shape])
    return single


def _cache(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [rows, D / 2], for RotaryEmbedding."""
    node, half = rotation.node, rotation.rotary_dim // 2
    return g.reshape(node, _one_per_pair(rotation, value), [-1, half])


def _positions(before: ir.Node, rotation: _Rotation) -> ir.Value:
    """Returns position_ids for `_cache`: [1] with the first row, or [B, S] if each sequence has its rows."""
    cos, tokens = rotation.cos, 1 if rotation.tokens_first else 2
    shape = g.dims(cos) or []
    if len(shape) < 4 or shape[0] == 1:
        return g.int_constant(before, [0])
    whole = g.add(before, "Shape", [cos], shape=[len(shape)])
    at = g.int_constant(before, [0, tokens])
    sizes = g.add(before, "Gather", [whole, at], shape=[2])
    number = g.add(before, "ReduceProd", [sizes], {"keepdims": 0}, shape=[])
    zero, one = (g.int_constant(before, each) for each in (0, 1))
    rows = g.add(before, "Range", [zero, number, one], shape=[None])
    return g.add(before, "Reshape", [rows, sizes], shape=[shape[0], shape[tokens]])
