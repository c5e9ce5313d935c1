"""Fuses attention over caches that grow into one node of opset 23, on the CPU.

Matches: attention as `attention.py` does, whose keys and values are Concat(past, new) on heads [B, H, S, D],
where past is an input and the result an output. k and v may be repeated for groups of heads.
Writes: Attention, which joins past and new tokens, and neither repeats nor transposes anything.
Leaves alone: caches of other layouts. On CUDA it was not measured.
"""

import numpy as np
import onnx_ir as ir

from . import graph as g
from .attention import is_attention, masks_of_scores, match_attention, replace_output, zero_hidden_rows
from .heads import Heads, merged_heads, without_repeats
from .inputs import grows
from .rewrite import Rewrite, label
from .scores import known_of, scores_of, unscaled, untransposed

FUSED = "attention over a growing cache"
_OPSET = 23
_LOWEST = -1e30  # of each mask: the kernel takes fp32's for -inf, and rows of them have no mean


class GrowingCaches(
    Rewrite[ir.Node], key="growing_caches", op_types=("Softmax",), device="cpu", reports=False
):
    """Finds the matmul with v. `attention.py` says why another attention is not fused."""

    def __init__(self, context: g.RewriteContext) -> None:
        super().__init__(context)
        self.whole = dict[ir.Value, ir.Value]()  # masks with all S rows, by what they were

    def match(self, node: ir.Node) -> ir.Node | str:
        if self.context.nodes("GroupNormalization"):  # another operator since opset 21
            return f"the model has GroupNormalization, which opset {_OPSET} has in another form"
        return match_attention(node) if is_attention(node) else "no MatMul reads it"

    def apply(self, node: ir.Node, match: ir.Node) -> None:
        context, whole, probabilities = self.context, self.whole, match.inputs[0]
        scores = scores_of(node, match)
        (q, on_q), (k, on_k) = scores.query(match), untransposed(scores.matmul)
        assert match.inputs[1] is not None
        k, v = without_repeats(k), without_repeats(match.inputs[1])
        (past_k, new_k), (past_v, new_v) = (_joined(each, match, scores.masks) for each in (k, v))
        heads = merged_heads(q, match)
        same = heads is not None and (new_k.count, new_k.size) == (new_v.count, heads.size)
        if heads is None or not same or heads.count % new_k.count:
            raise g.Skipped("q, k and v differ in the number or size of heads")
        plain, before_split = unscaled(heads.value)
        bias, shown, _ = masks_of_scores(context, scores.masks, match, square=False)
        if shown is not None or (bias is not None and g.dims(bias) is None):
            raise g.Skipped("a mask of lengths, or of unknown rank")
        if bias is not None and bias not in whole:
            sizes = [g.int_constant(match, [1, 1]), g.length(match, plain), g.int_constant(match, [1])]
            shape = g.add(match, "Concat", sizes, {"axis": 0}, shape=[4])
            finite, _, _ = masks_of_scores(context, scores.masks, match, square=False, floor=_LOWEST)
            whole[bias] = g.add(match, "Expand", [finite, shape], shape=[None] * 4)
        scale = float(scores.scale * on_q * on_k * before_split)
        attributes = {"q_num_heads": heads.count, "kv_num_heads": new_k.count, "scale": scale}
        rows = [plain, new_k.value, new_v.value]
        given = [*rows, whole[bias] if bias is not None else None, past_k, past_v]
        result, all_k, all_v = g.add_like(match, "Attention", given, attributes, (plain, k, v))
        label(g.maker(result), FUSED)
        context.graph.opset_imports[""] = max(context.graph.opset_imports[""], _OPSET)
        result.shape = ir.Shape([*(g.dims(plain) or [None, None])[:2], heads.count * new_v.size])
        is_finite = probabilities is node.outputs[0] or all(known_of(each).is_finite for each in scores.masks)
        if bias is not None and not is_finite:
            result = zero_hidden_rows(bias, result, match)
        replace_output(match.outputs[0], result, Heads(result, heads.count, new_v.size))
        g.replace(k, all_k)
        g.replace(v, all_v)


def _joined(value: ir.Value, before: ir.Node, masks: list[ir.Value]) -> tuple[ir.Value, Heads]:
    """Returns the past [B, H, P, D] and the new heads of a cache that no mask is computed from."""
    join = g.producer(value, "Concat")
    if join is None or len(join.inputs) != 2 or g.attribute(join, "axis", 0) not in (-2, 2):
        raise g.Skipped("k or v is no Concat of past and new rows")
    past, new = join.inputs
    heads = merged_heads(new, before) if new is not None else None
    if past is None or heads is None or not grows(past) or g.rank(past) != 4:
        raise g.Skipped("k or v is no Concat of past and new rows, [B, H, S, D] each")
    for shape in [each for each in value.consumers() if each.op_type == "Shape"]:
        part = {name: each.value for name, each in shape.attributes.items()}
        rows = np.array([0, 0, 1, 0])[part.get("start") : part.get("end")]
        length = g.add(
            shape, "Mul", [g.add(shape, "Shape", [new], part), g.int_constant(shape, rows.tolist())]
        )
        g.replace(shape.outputs[0], g.add(shape, "Add", [g.add(shape, "Shape", [past], part), length]))
    if any(value in g.ancestors(mask, of_shapes=True) for mask in masks):
        raise g.Skipped("a mask is computed from the cache")
    return past, heads
