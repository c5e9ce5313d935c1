"""Fuses attention into one node of ONNX Runtime.

Matches: softmax(q @ k^T * scale + mask) @ v on heads [B, H, S, D], as torch's eager code and its exporters
write it. The scale may be before or after the matmul, on q, on k or on both. Masks are added or selected by
Where, and there may be several. k and v may be repeated for groups of heads. A guard may replace the NaN of
fully masked rows.
Writes: com.microsoft MultiHeadAttention with q, k and v as [B, S, H*D], the layout with the fast kernels. The
mask is `attention_bias` [1 or B, 1 or H, S, T]. A causal mask becomes `unidirectional`. A mask of padding on
the right, if that was promised (`masks.py`), becomes the length of each sequence. Where attention is causal,
it goes: no token sees the padding, and with lengths ONNX Runtime refuses more than 1,024 tokens unless cuDNN
runs. A `key_padding_mask` [B, T] and packed inputs are never written, because their kernels are slow.
Attention on [..., S, D], such as Hiera's windows, becomes sequences of one head; a mask has the shape of the
scores, as SAM's positions have.
Leaves alone: scores that are capped or whose softmax is returned, an unknown number of heads, other ranks,
keys or values of a cache, quantised probabilities, which the node would not round.
"""

import math
from functools import reduce
from math import inf

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from . import graph as g
from .heads import SWAP_S_H, Heads, merged_heads, repeat_heads, split_heads, without_repeats
from .rewrite import Rewrite, label
from .scores import LOWEST, Scores, bounded, known_of, scores_of, unscaled, untransposed

_GROWS = {"Concat", "ScatterElements", "ScatterND", "TensorScatter", "Where"}
_MOVES = _GROWS | {
    "Cast", "DequantizeLinear", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators that move numbers; the first ones add new tokens to a cache."""

_MAX_BATCH = 65_535
"""Sequences of one launch of attention kernels on CUDA. A size that is not known counts as 64."""


class Attention(Rewrite[ir.Node], key="attention", op_types=("Softmax",), pattern="attention"):
    """Finds the matmul with v."""

    def match(self, node: ir.Node) -> ir.Node | g.Skipped:
        if not is_attention(node):
            return g.Skipped("no MatMul reads it", "softmax")
        return match_attention(node)

    def apply(self, node: ir.Node, match: ir.Node) -> None:
        if g.rank(node.outputs[0]) == 4:
            _fuse(self.context, node, match)
        else:
            _fuse_windows(scores_of(node, match), match)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = super().call(model)
        CommonSubexpressionEliminationPass()(model)  # what was moved before the matmuls of q, k and v
        return result


def is_attention(softmax: ir.Node) -> bool:
    """Whether a softmax is over the last dimension, and a MatMul reads its result, perhaps reshaped."""
    readers = [use.node for use in after_nan_guard(softmax).uses()]
    readers += [each for node in readers if node.op_type == "Reshape" for each in node.outputs[0].consumers()]
    is_last = g.attribute(softmax, "axis", -1) in (-1, g.rank(softmax.outputs[0]) - 1)
    return is_last and any(node.op_type == "MatMul" for node in readers)


def match_attention(softmax: ir.Node) -> ir.Node:
    """Returns the matmul with v of an attention; raises Skipped for forms that are not supported."""
    probabilities = after_nan_guard(softmax)
    matmul = g.only_user(probabilities)
    if matmul is None or matmul.op_type != "MatMul" or matmul.inputs[0] is not probabilities:
        raise g.Skipped("the softmax has other readers")
    scores_of(softmax, softmax)
    return matmul


def masks_of(softmax: ir.Node) -> list[ir.Value]:
    """Returns the masks of an attention, or none if its form is not supported."""
    try:
        return scores_of(softmax, softmax).masks
    except g.Skipped:
        return []


def after_nan_guard(softmax: ir.Node) -> ir.Value:
    """Returns the probabilities p, after the guard Where(IsNaN(p), 0, p) if there is one."""
    value = softmax.outputs[0]
    users = [use.node for use in value.uses()]
    choice = next((node for node in users if node.op_type == "Where"), None)
    if choice is None or {node.op_type for node in users} != {"Where", "IsNaN"}:
        return value
    guards = g.producer(choice.inputs[0], "IsNaN") and g.scalar(choice.inputs[1]) == 0
    return choice.outputs[0] if guards else value


def _fuse(context: g.RewriteContext, softmax: ir.Node, matmul: ir.Node) -> None:
    """Replaces the attention around a softmax with one node."""
    scores = scores_of(softmax, matmul)
    probabilities = matmul.inputs[0]
    q, on_q = scores.query(matmul)
    k, on_k = untransposed(scores.matmul)
    scale = scores.scale * on_q * on_k
    v = matmul.inputs[1]
    assert v is not None
    _refuse_cache(q, k, v)
    k, v = without_repeats(k), without_repeats(v)
    q3, k3, v3 = (merged_heads(each, matmul) for each in (q, k, v))
    if q3 is None or k3 is None or v3 is None:
        raise g.Skipped("the number or size of the heads is not known")
    # In multi-query attention, MatMul broadcasts the only head.
    k3, v3 = (repeat_heads(context, each, q3.count // each.count or 1, matmul) for each in (k3, v3))
    if not q3.count == k3.count == v3.count or q3.size != k3.size:
        raise g.Skipped("q, k and v differ in the number or size of heads")
    (q_plain, on_q), (k_plain, on_k) = unscaled(q3.value), unscaled(k3.value)  # before the split into heads
    rows = [(g.dims(each.value) or [None, None])[1] for each in (q3, k3)]
    if context.may_differ(*((g.dims(each) or [None])[0] for each in (q, k))):  # as reshaped to heads
        raise g.Skipped("q and k of batches that may differ")
    bias, shown, causal = masks_of_scores(context, scores.masks, matmul, square=not context.may_differ(*rows))
    lengths = _lengths(context, shown, matmul) if shown is not None and not causal else None
    is_finite = all(known_of(each).is_finite or _chooses_finite(each) for each in scores.masks)
    guarded = bias if probabilities is not softmax.outputs[0] and not is_finite else None
    attributes: dict[str, int | float] = {"num_heads": q3.count, "scale": scale * on_q * on_k}
    attributes |= {"unidirectional": 1} if causal else {}
    attributes |= {"mask_filter_value": LOWEST} if lengths is not None else {}  # large scores exceed -10000
    finite = bias
    if guarded is not None:  # the softmax of a row of -inf is NaN
        finite = g.add(matmul, "Max", [guarded, g.scalar_constant(matmul, LOWEST, guarded)])
    added = spread(finite, q3.value, k3.value, matmul) if finite is not None else None
    if shown is not None and lengths is not None:
        context.lengths[lengths] = shown
    inputs = [q_plain, k_plain, v3.value, None, lengths, added]
    shape = [*(g.dims(q3.value) or [None, None])[:2], v3.count * v3.size]
    result = g.add(matmul, "MultiHeadAttention", inputs, attributes, domain=g.MICROSOFT, shape=shape)
    label(g.maker(result), "attention")
    if guarded is not None:
        result = zero_hidden_rows(guarded, result, matmul)
    if shown is not None and causal:
        context.promised.add(str(shown.name))
    replace_output(matmul.outputs[0], result, v3)


def _fuse_windows(scores: Scores, matmul: ir.Node) -> None:
    """Replaces attention on [..., S, D] without a mask or with [..., S, T], such as windows [B, H, W, S, D]:
    each element of the dimensions before S becomes a sequence with one head, so nothing is transposed."""
    q, on_q = scores.query(matmul)
    turned, on_k = unscaled(scores.matmul.inputs[1])
    transpose, v = g.producer(turned, "Transpose"), matmul.inputs[1]
    k = transpose.inputs[0] if transpose is not None else None
    shapes = [g.dims(each) or [] for each in (q, k, v)]
    rank = len(shapes[0])
    if rank < 3 or any(len(shape) != rank for shape in shapes):
        raise g.Skipped("scores that are not [B, H, S, T]")
    if any(not g.same_dims(g.dims(mask), g.dims(scores.matmul.outputs[0])) for mask in scores.masks):
        raise g.Skipped("a mask of windows that broadcasts")
    if scores.masks and g.producer(matmul.inputs[0], "Softmax") is None:
        raise g.Skipped("a guard against rows of NaN in windows")
    assert transpose is not None and k is not None and v is not None
    _refuse_cache(q, k, v)
    *outer, rows, size = shapes[0]
    if not g.has_permutation(transpose, [*range(rank - 2), rank - 1, rank - 2]):
        raise g.Skipped("k is not transposed")
    are_alike = all(shape[:-2] == outer for shape in shapes) and None not in outer and shapes[1][-1] == size
    if not are_alike:
        raise g.Skipped("q, k and v of windows that may differ")
    named = [each for each in outer if not isinstance(each, int)]
    known = math.prod(each for each in outer if isinstance(each, int))
    sizes = [[size for size in shape[-2:] if isinstance(size, int)] for shape in shapes]
    is_known = len(named) < 2 and all(len(each) == 2 for each in sizes)
    if not is_known or known > (_MAX_BATCH >> 6 if named else _MAX_BATCH):
        raise g.Skipped("windows of an unknown number or size")
    pairs = zip((q, k, v), sizes, strict=True)
    inputs: list[ir.Value | None] = [
        each if rank == 3 else g.reshape(matmul, each, [-1, *last]) for each, last in pairs
    ]
    if scores.masks:
        bias = reduce(lambda a, b: g.add(matmul, "Add", [a, b]), scores.masks)
        whole = [-1, 1, *sizes[0][:1], *sizes[1][:1]]
        inputs += [None, None, g.reshape(matmul, bias, whole, [None, *whole[1:]])]
    attributes = {"num_heads": 1, "scale": scores.scale * on_q * on_k}
    shape = [*outer, rows, shapes[2][-1]]
    like = [None, *shape[-2:]]
    result = g.add(matmul, "MultiHeadAttention", inputs, attributes, domain=g.MICROSOFT, shape=like)
    label(g.maker(result), "attention")
    if rank != 3:
        target = [each if isinstance(each, int) else -1 for each in shape]
        result = g.reshape(matmul, result, target, shape)
    g.replace(matmul.outputs[0], result)


def _refuse_cache(q: ir.Value, k: ir.Value, v: ir.Value) -> None:
    if not _is_cached(q) and (_is_cached(k) or _is_cached(v)):
        raise g.Skipped("keys or values of a cache")


def _is_cached(heads: ir.Value) -> bool:
    """Whether heads are an input of the graph, perhaps with new tokens beside it: MultiHeadAttention would
    take the whole cache in another layout, in each step."""
    waiting, seen, grows = [heads], set[ir.Value](), False
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_input():
            rank = g.rank(value)
            if rank > 3 or (grows and rank == 3):
                return True
        elif node is not None and node.op_type in _MOVES:
            grows = grows or node.op_type in _GROWS
            moved = [*filter(None, node.inputs if node.op_type in _GROWS else node.inputs[:1])]
            waiting += [each for each in moved if node.op_type not in _GROWS or each.dtype == value.dtype]
        elif node is not None and node.op_type == "If":  # the branches of a first and of a later step
            return True
    return False


def masks_of_scores(
    context: g.RewriteContext, masks: list[ir.Value], before: ir.Node, square: bool, floor: float = -inf
) -> tuple[ir.Value | None, ir.Value | None, bool]:
    """Returns the mask to add, the graph input whose zeros end each sequence, and whether it is causal;
    `square`: there are as many queries as keys; `floor`: no mask of the sum is to have lower numbers."""
    known = {mask: known_of(mask) for mask in masks}
    masks = [mask for mask in masks if known[mask].is_causal or known[mask].hides != "nothing"]
    causal = [mask for mask in masks if known[mask].is_causal]
    added = [mask for mask in masks if not (square if mask in causal else known[mask].hides == "right")]
    if added:  # together with a causal mask, they may hide whole rows: that takes the sum of their numbers
        added += [mask for mask in causal if mask not in added]
    inputs = {value.name: value for value in context.graph.inputs}
    bias: ir.Value | None = None
    for mask in added:
        if known[mask].hides == "any":
            mask = padding_bias(inputs[known[mask].shown], known[mask].number, mask, before)
        mask = bounded(mask, floor, before)
        bias = mask if bias is None else g.add(before, "Add", [bias, mask])
    left = [mask for mask in masks if mask not in added]
    shown = next((inputs[known[mask].shown] for mask in left if known[mask].hides == "right"), None)
    return bias, shown, any(known[mask].is_causal for mask in left)


def _chooses_finite(mask: ir.Value) -> bool:
    """Whether a mask is Where(condition, a, b) of two finite numbers, as torch makes it of a boolean one."""
    where = g.producer(mask, "Where")
    numbers = [g.scalar(each) for each in where.inputs[1:]] if where is not None else [None]
    return all(number is not None and math.isfinite(number) for number in numbers)


def _lengths(context: g.RewriteContext, shown: ir.Value, before: ir.Node) -> ir.Value:
    """Returns the number of tokens of each sequence, int32[B], from a mask [B, T] of ones, then zeros. Where
    another input has T, too, a mask [B, 1] counts for all of them, as in the original."""
    wide = g.add(before, "Cast", [shown], {"to": ir.DataType.INT32})
    tokens = (g.dims(shown) or [None])[-1]
    others = [each for each in context.graph.inputs if each is not shown and tokens in (g.dims(each) or ())]
    if isinstance(tokens, str) and others:
        other = others[0]
        sizes = [g.int_constant(before, [1]), g.length(before, other, (g.dims(other) or []).index(tokens))]
        whole = g.add(before, "Concat", sizes, {"axis": 0}, shape=[2])
        wide = g.add(before, "Expand", [wide, whole], shape=g.dims(shown))
    return g.add(before, "ReduceSum", [wide, g.int_constant(before, [1])], {"keepdims": 0}, shape=[None])


def spread(bias: ir.Value, q: ir.Value, k: ir.Value, before: ir.Node) -> ir.Value:
    """Returns a mask as [1 or B, 1 or H, S, T], for q [B, S, ...] and k [B, T, ...]."""
    shape, rows, columns = g.dims(bias), (g.dims(q) or [0, None])[1], (g.dims(k) or [0, None])[1]
    if shape is None or len(shape) > 4:
        raise g.Skipped("a mask of unknown rank")
    if len(shape) == 4 and None not in (rows, columns) and shape[2:] == [rows, columns]:
        return bias
    if isinstance(rows, int) and isinstance(columns, int):
        target = g.int_constant(before, [1, 1, rows, columns])
    else:
        sizes = [g.int_constant(before, [1, 1]), *(g.length(before, each) for each in (q, k))]
        target = g.add(before, "Concat", sizes, {"axis": 0}, shape=[4])
    outer = [*([1] * (4 - len(shape))), *shape][:2]
    return g.add(before, "Expand", [bias, target], shape=[*outer, rows, columns])


def padding_bias(shown: ir.Value, lowest: float, like: ir.Value, before: ir.Node) -> ir.Value:
    """Returns an additive mask [B, 1, 1, T] of `like`'s dtype from a mask [B, T] of ones and zeros."""
    batch, tokens = g.dims(shown) or [None, None]
    kept = g.add(before, "Cast", [shown], {"to": ir.DataType.BOOL})
    values = [g.scalar_constant(before, number, like) for number in (0.0, lowest)]
    bias = g.add(before, "Where", [kept, *values])
    return g.add(before, "Unsqueeze", [bias, g.int_constant(before, [1, 2])], shape=[batch, 1, 1, tokens])


def zero_hidden_rows(mask: ir.Value, result: ir.Value, before: ir.Node) -> ir.Value:
    """Sets the rows of the result to 0 that a mask hides with -inf altogether, as the NaN guard did."""
    shape = g.dims(mask) or []
    rank = len(shape)
    if rank not in (2, 4) or shape[:-2][1:] not in ([], [1]):
        raise g.Skipped("a mask that may hide whole rows of some heads")
    lowest, zero = (g.scalar_constant(before, number, mask) for number in (-inf, 0.0))
    largest = g.add(before, "ReduceMax", [mask, g.int_constant(before, [rank - 1])], shape=[*shape[:-1], 1])
    if rank == 4:
        inputs = [largest, g.int_constant(before, [1])]
        largest = g.add(before, "Squeeze", inputs, shape=[shape[0], shape[2], 1])
    row = g.add(before, "LessOrEqual", [largest, lowest])
    return g.add(before, "Where", [row, zero, result], shape=g.dims(result))


def replace_output(old: ir.Value, result: ir.Value, heads: Heads) -> None:
    """Replaces [B, H, S, D] with the result [B, S, H*D]; most readers transpose it back at once."""
    transpose = next((node for node in old.consumers() if g.has_permutation(node, SWAP_S_H)), None)
    for reshape in transpose.outputs[0].consumers() if transpose is not None else ():
        shape = g.dims(reshape.outputs[0]) if reshape.op_type == "Reshape" else None
        rows = zip(shape or (), g.dims(result) or (), strict=False)
        regroups = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in rows)
        if (shape or [])[2:] == [heads.count * heads.size] and not regroups:
            g.replace(reshape.outputs[0], result)
        elif (shape or [])[1:] == [heads.count * heads.size]:  # all tokens as rows
            reshape.replace_input_with(0, result)
    if g.maker(old).graph is not None:  # others read it, too
        g.replace(old, split_heads(result, heads.count, heads.size, g.maker(old)))
