"""Replaces the attention of decoders by twinop's own, which norms, turns, caches and attends in one kernel.

Matches: GroupQueryAttention in 16 bits over caches that past and present share (`shared_caches` promises
it), with heads of 64, 96, 128 or 256. q, k and v are one tensor, or its parts, or products of one tensor,
which are merged; others are joined. RMS norms of q and k, which lie between, go along.
Writes: CustomAttentionCached. The caches that it returns are its inputs, with the new rows.
Leaves alone: positions and masks that the model computes, quantised caches, caches of a window, and what
reads the scores.
"""

from itertools import pairwise

import numpy as np
import onnx_ir as ir

from twinop.op_spec import DOMAIN

from . import graph as g
from . import quantised
from .merge_linear import is_plain, merge

SHARED_CACHES = "past and present share memory"
"""In the `meta` of a graph: its caches have rows for the whole context."""
HEAD_SIZES = (64, 96, 128, 256)
_ONLY = {"sliding_window_cache": 0, "causal": 1, "kv_cache_bit_width": 0, "qk_output": 0}
_NAMES = (
    "query", "key", "value", "past_key", "past_value", "position", "total", "cos", "sin", "position_ids",
    "attention_bias", "sinks", "k_scale", "v_scale", "q_norm", "k_norm",
)  # fmt: skip
_Tables = dict[tuple[ir.Value | None, ...], ir.Value]
"""What was made of values for one attention, for the next one."""


def rewrite(context: g.RewriteContext) -> None:
    tables: _Tables = {}
    for node in context.nodes("GroupQueryAttention", domain=g.MICROSOFT):
        try:
            _replace(context, node, tables)
        except g.UnsupportedPattern as reason:
            context.left[f"GroupQueryAttention: {reason}"] += 1


def _replace(context: g.RewriteContext, node: ir.Node, tables: _Tables) -> None:
    given = {name: value for name, value in zip(_NAMES, node.inputs, strict=False) if value is not None}
    heads, kv_heads = (g.attribute(node, name, 0) for name in ("num_heads", "kv_num_heads"))
    size = g.last_dim(given.get("past_key"))
    if not context.graph.meta.get(SHARED_CACHES):
        raise g.UnsupportedPattern("caches that grow (past and present are not known to share memory)")
    if unknown := [name for name in ("position_ids", "attention_bias", "k_scale") if name in given]:
        raise g.UnsupportedPattern(f"an input {unknown[0]}")
    if other := [name for name, value in _ONLY.items() if g.attribute(node, name, value) != value]:
        raise g.UnsupportedPattern(f"its attribute {other[0]}")
    if size not in HEAD_SIZES or "past_value" not in given or len(node.outputs) > 3:
        raise g.UnsupportedPattern(f"heads of {size} with {len(node.outputs)} outputs")
    qkv, norms, eps = _packed(context, node, given, [heads * size, kv_heads * size, kv_heads * size])
    position = given["position"]
    if g.rank(position) != 1:
        position = tables.get((position,)) or g.reshape(node, position, [-1])
        tables[given["position"],] = position
    cos_sin = _table(node, given, tables) if g.attribute(node, "do_rotary", 0) else None
    sinks = given.get("sinks")
    if sinks is None and g.attribute(node, "smooth_softmax", 0) == 1:
        sinks = g.initializer(context.graph, np.zeros(heads, np.float32), "sinks")
    past = [given["past_key"], given["past_value"]]
    attributes = {
        "scale": g.attribute(node, "scale", 0.0),
        "window": max(g.attribute(node, "local_window_size", -1), 0),
        "softcap": g.attribute(node, "softcap", 0.0),
        "interleaved": g.attribute(node, "rotary_interleaved", 0),
        "eps": eps,
    }
    inputs = [qkv, *past, position, given["total"], cos_sin, norms, sinks]
    while inputs[-1] is None:
        inputs.pop()
    name = context.records["attention_cached"].onnx_name
    made = ir.node(name, inputs, attributes, domain=DOMAIN, num_outputs=3)
    context.graph.insert_before(node, made)
    context.graph.opset_imports.setdefault(DOMAIN, 1)
    for new, like in zip(made.outputs, [node.outputs[0], *past], strict=True):
        new.type, new.shape = like.type or qkv.type, like.shape
    for old, new in list(zip(node.outputs, made.outputs, strict=False)):
        if g.is_read(old):
            g.replace(old, new)
    g.prune(node)
    context.made["attention over a cache"] += 1


def _packed(
    context: g.RewriteContext, node: ir.Node, given: dict[str, ir.Value], widths: list[int]
) -> tuple[ir.Value, ir.Value | None, float]:
    """Returns q, k and v as one tensor, and the weights [2, D] and the epsilon of the norms of q and k."""
    if "key" not in given:
        return given["query"], *_joined_norms(context, [given.get("q_norm"), given.get("k_norm")], node)
    values = [given[name] for name in ("query", "key", "value")]
    weights, eps = [given.get("q_norm"), given.get("k_norm")], g.attribute(node, "qk_norm_epsilon", 1e-6)
    normed = [found for value in values[:2] if (found := _normed(context, value)) is not None]
    if weights == [None, None] and len(normed) == 2 and normed[0][2] == normed[1][2]:
        values[:2], weights, eps = [each[0] for each in normed], [each[1] for each in normed], normed[0][2]
    norms, _ = _joined_norms(context, weights, node)
    parts = [g.part_of(value, -1) for value in values]
    ends = np.cumsum([0, *widths]).tolist()
    if parts[0] is not None and g.last_dim(parts[0][0]) == ends[-1]:
        whole = parts[0][0]
        if parts == [(whole, start, stop) for start, stop in pairwise(ends)]:
            return whole, norms, eps
    products = [g.producer(value, context.records["linear"].onnx_name, domain=DOMAIN) for value in values]
    plain = [each for each in products if each is not None and is_plain(each)]
    alike = {(each.inputs[0], len(each.inputs)) for each in plain}
    if len(plain) == 3 and len(alike) == 1 and all(g.only_user(each.outputs[0]) for each in plain):
        return merge(context, plain), norms, eps
    if (merged := quantised.merge(context, node, values)) is not None:
        return merged, norms, eps
    shape = [*(g.dims(values[0]) or [None])[:-1], ends[-1]]
    return g.add(node, "Concat", values, {"axis": -1}, shape=shape), norms, eps


def _joined_norms(
    context: g.RewriteContext, weights: list[ir.Value | None], node: ir.Node
) -> tuple[ir.Value | None, float]:
    eps = g.attribute(node, "qk_norm_epsilon", 1e-6)
    if weights == [None, None]:
        return None, eps
    arrays = [g.constant(each) for each in weights]
    if arrays[0] is None or arrays[1] is None:
        raise g.UnsupportedPattern("norms whose weights the model computes")
    return g.initializer(context.graph, np.stack([arrays[0], arrays[1]]), "norms"), eps


def _normed(context: g.RewriteContext, value: ir.Value) -> tuple[ir.Value, ir.Value, float] | None:
    """Returns what a norm of the heads of a value [B, S, H * D] norms, its weight and epsilon."""
    after = g.producer(value, "Reshape")
    norm = g.producer(
        after.inputs[0] if after else None, context.records["rms_norm"].onnx_name, domain=DOMAIN
    )
    before = g.producer(norm.inputs[0], "Reshape") if norm is not None else None
    if norm is None or before is None or len(norm.inputs) != 2 or g.attribute(norm, "offset", 0.0) != 0:
        return None
    x, weight = before.inputs[0], norm.inputs[1]
    is_whole = g.last_dim(x) == g.last_dim(value) and g.attribute(norm, "axis", -1) == -1
    if x is None or weight is None or not is_whole:
        return None
    return x, weight, g.attribute(norm, "eps", 1e-6)


def _table(node: ir.Node, given: dict[str, ir.Value], tables: _Tables) -> ir.Value:
    """Returns cosines and sines as one table, a constant where they are constants."""
    pair = given["cos"], given["sin"]
    if pair not in tables:
        arrays = [g.constant(each) for each in pair]
        graph = node.graph
        assert graph is not None
        if arrays[0] is not None and arrays[1] is not None:
            tables[pair] = g.initializer(graph, np.concatenate([arrays[0], arrays[1]], 1), "cos_sin")
        else:
            tables[pair] = g.add(node, "Concat", pair, {"axis": 1})
    return tables[pair]
