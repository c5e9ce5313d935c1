"""Fuses attention over caches that grow into one node of opset 23, on the CPU.

Matches: attention as `attention.py` does, whose keys and values are Concat(past, new) on heads [B, H, S, D],
where past is an input and the result an output. k and v may be repeated for groups of heads.
Writes: Attention, which joins past and new tokens, and neither repeats nor transposes anything.
Leaves alone: caches of other layouts. On CUDA it was not measured.
"""

from contextlib import suppress

import onnx_ir as ir

from . import graph as g
from .attention import after_nan_guard, attentions, masks_of_scores, replace_output, zero_hidden_rows
from .heads import Heads, merged_heads, without_repeats
from .inputs import grows
from .scores import known_of, scores_of, unscaled, untransposed

FUSED = "attention over a growing cache"
_OPSET = 23
_LOWEST = -1e30  # the kernel takes lower ones for -inf, and rows of them have no mean


def rewrite(context: g.RewriteContext) -> None:
    whole = dict[ir.Value, ir.Value]()  # masks with all S rows, by what they were
    if context.nodes("GroupNormalization"):  # another operator since opset 21
        return
    for softmax in list(attentions(context)):
        with suppress(g.UnsupportedPattern):  # `attention.py` says which
            _fuse(context, softmax, whole)


def _fuse(context: g.RewriteContext, softmax: ir.Node, whole: dict[ir.Value, ir.Value]) -> None:
    probabilities = after_nan_guard(softmax)
    matmul = g.only_user(probabilities)
    if matmul is None or matmul.inputs[0] is not probabilities:
        raise g.UnsupportedPattern
    scores = scores_of(softmax, matmul)
    (q, on_q), (k, on_k) = unscaled(scores.product.inputs[0]), untransposed(scores.product.inputs[1])
    assert matmul.inputs[1] is not None
    (k, times), (v, times_of_v) = without_repeats(k), without_repeats(matmul.inputs[1])
    (past_k, new_k), (past_v, new_v) = (_joined(each, matmul, scores.masks) for each in (k, v))
    heads = merged_heads(q, matmul)
    if heads is None or {new_k.count * times, new_v.count * times_of_v} != {heads.count}:
        raise g.UnsupportedPattern
    if new_k.count != new_v.count or new_k.size != heads.size:
        raise g.UnsupportedPattern
    plain, before_split = unscaled(heads.value)
    bias, lengths, _ = masks_of_scores(context, scores.masks, matmul, square=False)
    if lengths is not None or (bias is not None and g.dims(bias) is None):
        raise g.UnsupportedPattern
    if bias is not None and bias not in whole:
        ones = [g.int_constant(matmul, each) for each in ([1, 1], [1])]
        [length] = g.sizes_of(matmul, (plain, [1])) if context.broadcasts else [g.length(matmul, plain)]
        sizes = [ones[0], length, ones[1]]
        shape = g.add(matmul, "Concat", sizes, {"axis": 0}, shape=[4])
        finite = g.add(matmul, "Max", [bias, g.scalar_constant(matmul, _LOWEST, bias)])
        whole[bias] = g.add(matmul, "Expand", [finite, shape], shape=[None] * 4)
    scale = float(scores.scale * on_q * on_k * before_split)
    attributes = {"q_num_heads": heads.count, "kv_num_heads": new_k.count, "scale": scale}
    plain, k3, v3 = context.broadcast(matmul, [plain, new_k.value, new_v.value], [[0]] * 3)
    given = [plain, k3, v3, whole[bias] if bias is not None else None, past_k, past_v]
    result, all_k, all_v = g.add_like(matmul, "Attention", given, attributes, (plain, k, v))
    context.graph.opset_imports[""] = max(context.graph.opset_imports[""], _OPSET)
    result.shape = ir.Shape([*(g.dims(plain) or [None, None])[:2], heads.count * new_v.size])
    is_finite = probabilities is softmax.outputs[0] or all(known_of(each).is_finite for each in scores.masks)
    if bias is not None and not is_finite:
        result = zero_hidden_rows(bias, result, matmul)
    replace_output(matmul.outputs[0], result, Heads(result, heads.count, new_v.size))
    g.replace(k, all_k)
    g.replace(v, all_v)
    context.made[FUSED] += 1


def _joined(value: ir.Value, before: ir.Node, masks: list[ir.Value]) -> tuple[ir.Value, Heads]:
    """Returns the past [B, H, P, D] and the new heads of a cache that no mask is computed from."""
    join = g.producer(value, "Concat")
    if join is None or len(join.inputs) != 2 or g.attribute(join, "axis", 0) not in (-2, 2):
        raise g.UnsupportedPattern
    past, new = join.inputs
    heads = merged_heads(new, before) if new is not None else None
    if past is None or heads is None or not grows(past) or g.rank(past) != 4:
        raise g.UnsupportedPattern
    if any(value in g.ancestors(mask, of_shapes=True) for mask in masks):
        raise g.UnsupportedPattern
    return past, heads
