"""Replaces the attention of decoders by twinop's own, which norms, turns, caches and attends in one kernel.

Matches: GroupQueryAttention in 16 bits over caches that past and present share (`shared_caches` promises
it), with heads of 64, 96, 128 or 256. q, k and v are one tensor, or its parts, or matmuls of one tensor,
which are merged; others are joined. RMS norms of q and k, which lie between, go along.
Writes: CustomAttentionCached. The caches that it returns are its inputs, with the new rows. Positions that
the builder counts in a mask of padding come from CustomLastPosition.
Leaves alone: inputs position_ids and attention_bias, quantised caches, caches of a window, and what
reads the scores.
"""

import numpy as np
import onnx_ir as ir

from twinop.model import weights
from twinop.record.op_spec import DOMAIN

from . import graph as g
from . import quantised
from .merge_linear import matmuls_of_one, merge
from .rewrite import Rewrite, label

SHARED_CACHES = "past and present share memory"
"""In the `meta` of a graph: its caches have rows for the whole context."""
HEAD_SIZES = (64, 96, 128, 256)
_ONLY = {"sliding_window_cache": 0, "causal": 1, "kv_cache_bit_width": 0, "qk_output": 0}
_NAMES = (
    "query", "key", "value", "past_key", "past_value", "position", "total", "cos", "sin", "position_ids",
    "attention_bias", "sinks", "k_scale", "v_scale", "q_norm", "k_norm",
)  # fmt: skip
_NORM = "CustomRmsNorm"
_OF_MASKS = (ir.DataType.INT64, ir.DataType.INT32)


class CachedAttention(
    Rewrite[bool], key="cached_attention", microsoft=("GroupQueryAttention",), sixteen_bits_only=True
):
    """Puts the op in the place of GroupQueryAttention."""

    def match(self, node: ir.Node) -> bool | g.Skipped:
        given, size = _given(node), g.last_dim(_given(node).get("past_key"))
        if not self.context.graph.meta.get(SHARED_CACHES):
            return g.Skipped("caches that grow (past and present are not known to share memory)")
        if unknown := [name for name in ("position_ids", "attention_bias", "k_scale") if name in given]:
            return g.Skipped(f"an input {unknown[0]}")
        if other := [name for name, value in _ONLY.items() if g.attribute(node, name, value) != value]:
            return g.Skipped(f"its attribute {other[0]}")
        if size not in HEAD_SIZES or "past_value" not in given or len(node.outputs) > 3:
            return g.Skipped(f"heads of {size} with {len(node.outputs)} outputs")
        if any(name in given and not g.is_constant(given[name]) for name in ("q_norm", "k_norm")):
            return g.Skipped("norms whose weights the model computes")
        return True

    def apply(self, node: ir.Node, match: bool) -> None:
        context = self.context
        join_norms(node)
        given = _given(node)
        heads, kv_heads = (g.attribute(node, name, 0) for name in ("num_heads", "kv_num_heads"))
        size = g.last_dim(given["past_key"]) or 0
        qkv = _packed(context, node, given, (heads + 2 * kv_heads) * size)
        gains = [array for name in ("q_norm", "k_norm") if (array := g.constant(given.get(name))) is not None]
        norms = g.initializer(context.graph, np.stack(gains), "norms") if gains else None
        position = _positions(context, node, given["position"])
        cos_sin = _table(context, node, given) if g.attribute(node, "do_rotary", 0) else None
        sinks = given.get("sinks")
        if sinks is None and g.attribute(node, "smooth_softmax", 0):  # one key more, of score 0
            sinks = g.initializer(context.graph, np.zeros(heads, np.float32), "sinks")
        past = [given["past_key"], given["past_value"]]
        attributes = {
            "scale": g.attribute(node, "scale", 0.0),
            "window": max(g.attribute(node, "local_window_size", -1), 0),
            "softcap": g.attribute(node, "softcap", 0.0),
            "interleaved": g.attribute(node, "rotary_interleaved", 0),
            "eps": g.attribute(node, "qk_norm_epsilon", 1e-6),
        }
        inputs = [qkv, *past, position, given["total"], cos_sin, norms, sinks]
        name, likes = context.type_of("attention_cached"), [node.outputs[0], *past]
        made = g.add_like(node, name, inputs, attributes, likes, domain=DOMAIN)
        label(g.maker(made[0]), "attention over a cache")
        made[0].type = made[0].type or qkv.type
        for old, new in list(zip(node.outputs, made, strict=False)):
            if g.is_read(old):
                g.replace(old, new)
        g.prune(node)


def _given(node: ir.Node) -> dict[str, ir.Value]:
    return {name: value for name, value in zip(_NAMES, node.inputs, strict=False) if value is not None}


def _packed(context: g.RewriteContext, node: ir.Node, given: dict[str, ir.Value], width: int) -> ir.Value:
    """Returns q, k and v as one tensor."""
    if "key" not in given:
        return given["query"]
    values = [given[name] for name in ("query", "key", "value")]
    if (whole := g.whole_of(values, -1)) is not None:
        return whole
    if matmuls := matmuls_of_one(values):
        return merge(context, matmuls)
    shape = [*(g.dims(values[0]) or [None])[:-1], width]
    merged = quantised.merge(context, node, values)
    return merged or g.add(node, "Concat", values, {"axis": -1}, shape=shape)


def join_norms(node: ir.Node) -> None:
    """Gives attention the norms of q and k that are nodes of their own, if it can compute both."""
    found = [norm for value in node.inputs[:2] if (norm := _norm_of(value)) is not None]
    if len(found) != 2 or len({g.attribute(norm, "eps", 1e-6) for norm in found}) != 1:
        return
    first = _NAMES.index("q_norm")
    node.resize_inputs(first + 2)
    eps = g.attribute(found[0], "eps", 1e-6)
    node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", eps)
    for index, norm in enumerate(found):
        last, (apart, weight) = node.inputs[index], norm.inputs
        node.replace_input_with(first + index, weight)
        node.replace_input_with(index, apart.producer().inputs[0])  # type: ignore[union-attr]
        g.prune(last.producer())  # type: ignore[union-attr]


def _norm_of(value: ir.Value | None) -> ir.Node | None:
    """Returns the norm of the heads of a value [B, S, H * D], if it has one."""
    after = g.producer(value, "Reshape")
    norm = g.producer(after.inputs[0], _NORM, domain=DOMAIN) if after is not None else None
    before = g.producer(norm.inputs[0], "Reshape") if norm is not None and len(norm.inputs) == 2 else None
    if norm is None or before is None or g.attribute(norm, "offset", 0.0) != 0:
        return None
    is_whole = g.last_dim(before.inputs[0]) == g.last_dim(value) and g.attribute(norm, "axis", -1) == -1
    return norm if is_whole and g.is_constant(norm.inputs[1]) else None


def _positions(context: g.RewriteContext, node: ir.Node, position: ir.Value) -> ir.Value:
    """Returns the positions as [B]. Where the builder counts them in a mask, one kernel replaces three."""
    shaped = g.producer(position, "Reshape")
    nodes = g.chain(position if shaped is None else shaped.inputs[0], "Cast", "Sub", "ReduceSum")
    mask = nodes[2].inputs[0] if nodes else None
    if (
        mask is None
        or mask.dtype not in _OF_MASKS
        or g.rank(mask) != 2
        or g.scalar(nodes[1].inputs[1]) != 1
        or g.ints(nodes[2], "axes", 1) not in ([1], [-1])
    ):
        return position if g.rank(position) == 1 else g.reshape(node, position, [-1])
    last = context.add_op(nodes[0], "last_position", [mask], (g.dims(mask) or [])[:1])
    last.type = ir.TensorType(ir.DataType.INT32)
    if g.rank(position) == 1:  # attention that stays reads it, too
        g.replace(position, last)
    return last


def _table(context: g.RewriteContext, node: ir.Node, given: dict[str, ir.Value]) -> ir.Value:
    """Returns cosines and sines as one table, a constant where they are constants."""
    pair = given["cos"], given["sin"]
    tensors = [each for each in map(g.tensor, pair) if each is not None]
    if len(tensors) < 2:
        return g.add(node, "Concat", pair, {"axis": 1})
    return g.initializer(context.graph, weights.join(tensors, 1), "cos_sin")
