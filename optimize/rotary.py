"""Fuses rotary position embedding.

Matches: x * cos + rotated(x) * sin on heads [B, H, S, D] or [B, S, H, D], with cos and sin [1 or B, 1, S, D]
or [1 or B, S, 1, D] that the model computes; also on [S, H, D], as in Qwen2-VL's vision tower. The pairs are
(i, i + D/2), as in Llama, or (2i, 2i + 1), as in RoFormer and Cohere. Only the first elements of a head may
be rotated, as in GPT-NeoX. The two elements of each pair may also be computed apart, from cos and sin with
D/2 columns, and then joined. The first tokens may be left unrotated, as the class token in EVA-02, if cos
and sin have known sizes. They get angles of zero.
Writes: CustomRope on q and k [B, S, H*D] of one attention together. It takes one cos and sin for each pair,
so nothing about positions is assumed. A single tensor, and every tensor on the CPU, gets ONNX Runtime's
RotaryEmbedding.
Leaves alone: other orders of the pairs; cos and sin with D columns that are not known to be the same for both
elements of each pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .heads import merged_heads, merged_tokens, split_heads, split_tokens
from .rewrite import Rewrite, label
from .rotary_match import RotaryMatch, flattened, has_equal_pairs, match_rotation


@dataclass(frozen=True)
class _Rotation:
    """A rotation of heads."""

    match: RotaryMatch  # cos and sin are those of the model
    node: ir.Node  # its output is the result
    heads: ir.Value  # what is rotated in part, [B, H, S, D], [B, S, H, D] or [S, H, D]
    more: int  # the number of tokens in front that stay as they are
    tokens_first: bool  # the heads are [B, S, H, D] or [S, H, D]
    count: int  # of heads
    size: int  # of a head
    width: int  # of the first elements of a head, which are rotated


class Rotary(
    Rewrite[_Rotation], key="rotary", op_types=("Add", "Concat"), pattern="rotary embedding", at_once=True
):
    """Fuses a rotation, and on CUDA another one of the same angles with it."""

    def match(self, node: ir.Node) -> _Rotation | g.Skipped | str:
        if (match := match_rotation(node)) is None:
            return "it is not the last node of x * cos + rotated(x) * sin"
        x, width = match.x, g.last_dim(match.x)
        shapes = g.dims(x), g.dims(match.cos), g.dims(match.sin)
        tokens_first = not _fits(*shapes, 2) and _fits(*shapes, 1)
        if width is None or not (tokens_first or _fits(*shapes, 2)):
            return g.Skipped("of another layout than [B, H, S, D], [B, S, H, D] or [S, H, D]")
        is_twice = g.last_dim(match.cos) == width
        if is_twice and not all(has_equal_pairs(each, match.layout) for each in (match.cos, match.sin)):
            return g.Skipped("the angles of a pair may differ")
        last, heads = _rejoined(match.node, x, -1, 0) or (match.node, x)
        axis, sizes = 1 if tokens_first else 2, shapes[1] or []
        tokens, more = _rejoined(last, heads, axis, 1) if g.rank(x) == 4 else None, 0
        if tokens is not None and len(sizes) >= 4 - axis and all(isinstance(size, int) for size in sizes):
            more = _size(tokens[1], axis) - _size(heads, axis)
            last, heads = tokens
        count, size = [1, *(g.dims(heads) or [None] * 4)][-4:][3 - axis :: axis]
        if not isinstance(count, int) or not isinstance(size, int):
            return g.Skipped("the number of heads is not known")
        return _Rotation(match, last, heads, more, tokens_first, count, size, width)

    def apply(self, node: ir.Node, match: _Rotation) -> None:
        others = [each for _, each in self.matches if each.node.graph is not None and each is not match]
        others = others if self.context.device == "cuda" else []
        pair = [match, *islice((each for each in others if _can_fuse(self.context, match, each)), 1)]
        merge = merged_tokens if match.tokens_first else merged_heads  # which is the same of both
        merged = [merge(each.heads, each.node) for each in pair]
        heads = [each.value for each in merged if each is not None]
        angles = [_angles(match, match.match.cos, 1.0), _angles(match, match.match.sin, 0.0)]
        if match.match.turns_back:
            angles[1] = g.add(match.node, "Neg", angles[1:], shape=g.dims(angles[1]))
        if len(pair) == 1:
            results: Sequence[ir.Value] = [_single(match, heads[0], angles)]
        else:
            inputs = [*heads, *(_sequences(match, each) for each in angles)]
            attributes: dict[str, str | int] = {"layout": match.match.layout, "head_size": _head_size(match)}
            name = self.context.type_of("rope")
            results = g.add_like(pair[1].node, name, inputs, attributes, heads, domain=DOMAIN)
        label(g.maker(results[0]), "rotary embedding" + " of q and k" * (len(pair) == 2))
        for each, result in zip(pair, results, strict=True):
            split = split_tokens if each.tokens_first else split_heads
            old = flattened(each.node, each.match.x)
            new = split(result, each.count, each.size, g.maker(old))
            shape = g.dims(old) or []
            if len(shape) == 3:
                new = g.reshape(g.maker(old), new, [-1, each.count, each.size], shape)
            self.replace(old, new)


def _angles(rotation: _Rotation, value: ir.Value, number: float) -> ir.Value:
    """Returns cos or sin for all tokens of the heads; those in front get a number."""
    if not rotation.more:
        return value
    node, axis = rotation.node, (1 if rotation.tokens_first else 2) - 4 + g.rank(value)
    sizes = [_size(value, i) for i in range(g.rank(value))]
    first, whole = (
        [*sizes[:axis], size, *sizes[axis + 1 :]] for size in (rotation.more, rotation.more + sizes[axis])
    )
    row = g.scalar_constant(node, number, value)
    start = g.add(node, "Expand", [row, g.int_constant(node, first)], shape=first)
    return g.add(node, "Concat", [start, value], {"axis": axis}, shape=whole)


def _can_fuse(context: g.RewriteContext, a: _Rotation, b: _Rotation) -> bool:
    """Whether one node can compute both: they have the same angles, and neither depends on the other."""
    shared = [replace(each.match, node=a.node, x=a.heads) for each in (a, b)]
    forms = [(each.size, each.width, each.more, each.tokens_first) for each in (a, b)]
    if shared[0] != shared[1] or forms[0] != forms[1]:
        return False
    if context.may_differ(*((g.dims(each.heads) or [None])[0] for each in (a, b))):
        return False
    return not any(set(x.node.outputs) & g.ancestors(y.heads, of_shapes=True) for x, y in ((a, b), (b, a)))


def _single(rotation: _Rotation, heads: ir.Value, angles: Sequence[ir.Value]) -> ir.Value:
    """Inserts RotaryEmbedding for one rotation, and returns its output."""
    node, half = rotation.node, rotation.width // 2
    caches = [g.reshape(node, _one_per_pair(rotation, each), [-1, half]) for each in angles]
    inputs = [heads, _positions(node, angles[0], 1 if rotation.tokens_first else 2), *caches]
    attributes = {
        "num_heads": rotation.count,
        "interleaved": int(rotation.match.layout == "interleaved"),
        "rotary_embedding_dim": rotation.width if _head_size(rotation) else 0,
    }
    return g.add(node, "RotaryEmbedding", inputs, attributes, domain=g.MICROSOFT, shape=g.dims(heads))


def _head_size(rotation: _Rotation) -> int:
    """Returns the size of a head of which only a part is rotated, else 0."""
    return rotation.size if rotation.size != rotation.width else 0


def _rejoined(node: ir.Node, x: ir.Value, axis: int, position: int) -> tuple[ir.Node, ir.Value] | None:
    """Returns the Concat of rotated x, which `node` computes and which is at a position, 0 or 1, and of the
    rest; and the tensor that both are parts of, if there is one."""
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


def _fits(x: list[g.Dim] | None, cos: list[g.Dim] | None, sin: list[g.Dim] | None, tokens: int) -> bool:
    """Whether cos and sin belong to x [B, H, S, D] or [B, S, H, D], where `tokens` is the axis of S, or to
    x [S, H, D]."""
    x = [1, *x] if x is not None and len(x) == 3 and tokens == 1 else x
    if x is None or cos is None or cos != sin or len(x) != 4 or len(cos) not in (2, 3, 4):
        return False
    padded = [1] * (4 - len(cos)) + cos
    width = x[3] if isinstance(x[3], int) else 0
    if padded[3 - tokens] != 1 or padded[tokens] != x[tokens] or padded[3] not in (width, width // 2):
        return False
    return padded[0] in (1, x[0])


def _one_per_pair(rotation: _Rotation, value: ir.Value) -> ir.Value:
    """Returns cos or sin as [..., D / 2], one element for each pair."""
    node, size = rotation.node, rotation.width
    if g.last_dim(value) == size // 2:
        return value
    start_stop_step = (0, size // 2, 1) if rotation.match.layout == "half" else (0, size, 2)
    start, stop, step = (g.int_constant(node, [each]) for each in start_stop_step)
    inputs = [value, start, stop, g.int_constant(node, [-1]), step]
    return g.add(node, "Slice", inputs, shape=[*(g.dims(value) or [])[:-1], size // 2])


def _sequences(rotation: _Rotation, value: ir.Value) -> ir.Value:
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


def _positions(before: ir.Node, cos: ir.Value, tokens: int) -> ir.Value:
    """Returns position_ids of cos: [1] with the first row, or [B, S] if each sequence has its rows."""
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
