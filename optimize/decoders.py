"""Reads decoders with a KV cache, as onnxruntime-genai's builder writes them: GroupQueryAttention.

`runs` returns sizes of inputs that fit each other. `make_runnable` also writes norms of q and k as nodes of
their own, which the CPU needs; `cached_attention.join_norms` undoes it for CUDA.
"""

from collections.abc import Callable, Iterable

import onnx_ir as ir

from . import graph as g
from .cached_attention import SHARED_CACHES
from .inputs import Sizes, grows, is_mask
from .symbolic_shapes import infer_shapes
from .unfuse_ort import rms_norm

ATTENTION = "GroupQueryAttention"
ACCURACY = "accuracy_level"  # also in the `meta` of nodes that `make_runnable` takes it from
_BATCH, _PAST, _PROMPT = 3, 9, 7
_Q_NORM = 14  # the input; that of k follows


def set_sizes(model: ir.Model) -> None:
    """Corrects declared sizes: of heads, which genai's builder gives a name, and of masks, which cover the
    tokens in a cache, too: optimum's merged files name their size as that of new tokens."""
    if any(map(grows, model.graph.inputs)):
        for mask in filter(is_mask, model.graph.inputs):
            batch, length = g.dims(mask) or [None, None]
            if length in _new_tokens(model):
                mask.shape = ir.Shape([batch, f"{mask.name}_1"])
    if not any(node.op_type == ATTENTION for node in model.graph):
        return
    shaped = model.clone()
    infer_shapes(shaped)
    caches = {str(value.name): value for value in model.graph.inputs}
    for node in [node for node in shaped.graph if node.op_type == ATTENTION]:
        width, heads = g.last_dim(node.inputs[0]), g.attribute(node, "num_heads", 0)
        heads += 2 * g.attribute(node, "kv_num_heads", 0) if node.inputs[1] is None else 0
        for cache in filter(None, node.inputs[3:5]):
            shape, value = g.dims(cache), caches.get(str(cache.name))
            if value is not None and shape and isinstance(shape[-1], str) and width and heads:
                value.shape = ir.Shape([*shape[:-1], width // heads])


def runs(model: ir.Model) -> tuple[list[Sizes], bool]:
    """Returns the sizes of steps of one token, of a prompt, and of tokens after it, none without caches; and
    whether masks may hide tokens. For GroupQueryAttention they may not, and tokens do not follow a prompt."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION]
    if (sizes := run_sizes(model)) is None:
        return [], True
    if window := cache_window(model):  # what follows the tokens in one that is not full is not known
        return [sizes(1, window + _PAST, 1), sizes(1, window, 1)], False
    steps = [sizes(_BATCH, _PAST, 1), sizes(1, 2 * _PAST, 1), sizes(2, 0, _PROMPT)]
    if nodes:
        return steps, False
    return [*steps, sizes(2, _PAST, _PROMPT)], any(map(is_mask, model.graph.inputs))


def cache_window(model: ir.Model) -> int:
    """Returns the window of caches that hold a window, and nothing else; 0 if there are none."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION]
    held = [node for node in nodes if g.attribute(node, "sliding_window_cache", 0)]
    return max((g.attribute(node, "local_window_size", 0) for node in held), default=0)


def run_sizes(model: ir.Model) -> Callable[..., Sizes] | None:
    """Returns what makes sizes of a run, if a model has caches, from the batch, the number of tokens before
    and of new ones, and the rows of the caches: by default as many as are needed."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION]
    past = {name for value in model.graph.inputs if (name := grows(value))}
    if not nodes and not past:
        return None
    fixed = dict[str, int]()
    for node in nodes:
        shapes = [shape for cache in node.inputs[3:5] if (shape := g.dims(cache))]
        lengths = [shape[-2] for shape in shapes if isinstance(shape[-2], str)]
        if g.attribute(node, "sliding_window_cache", 0):
            fixed |= dict.fromkeys(lengths, g.attribute(node, "local_window_size", 0))
        else:
            past.update(lengths)
    others = {dim for value in model.graph.inputs if g.rank(value) > 2 for dim in g.dims(value) or ()}
    tokens, total = _new_tokens(model), _lengths(filter(is_mask, model.graph.inputs), 2) - others

    def sizes(batch: int, before: int, new: int, rows: int = 0) -> Sizes:
        length = max(before + new, rows) if model.graph.meta.get(SHARED_CACHES) else before
        names = fixed | dict.fromkeys(past, length) | dict.fromkeys(tokens, new)
        known = *names.items(), *((name, before + new) for name in total)
        return Sizes(batch, _PROMPT, fixed=known, total=before + new)

    return sizes


def is_decoder(model: ir.Model) -> bool:
    """Whether a model, also as it was written, has caches: then it computes steps of one token."""
    kinds = (ATTENTION, "CustomAttentionCached")
    return any(node.op_type in kinds for node in model.graph) or any(map(grows, model.graph.inputs))


def caches(model: ir.Model) -> dict[str, str]:
    """Returns the outputs that are the caches after a run, by the inputs that are those before it."""
    found = dict[str, str]()
    for value in model.graph.inputs:
        for node, index in value.uses():
            if node.op_type == ATTENTION and index in (3, 4):
                after = node.outputs[index - 2]
            elif node.op_type == "Concat" and grows(value) and not index:
                after = node.outputs[0]
            else:
                continue
            if after.is_graph_output():
                found[str(value.name)] = str(after.name)
    return found


def _new_tokens(model: ir.Model) -> set[str]:
    """Returns the names of the lengths of new tokens: of what a cache's new rows are computed from. The first
    layer adds its rows before it reads what an encoder has returned."""
    given = {value for value in model.graph.inputs if not is_mask(value)}
    readers = [node for value in given if grows(value) for node in value.consumers()]
    joins = [node for node in readers if node.op_type == "Concat"]
    sources = [g.ancestors(*filter(None, join.inputs[1:])) & given for join in joins]
    first = sorted(sources, key=len)[:2]  # of keys, and of values
    return _lengths(set.union(*first) if first else given, 2, 3)


def _lengths(values: Iterable[ir.Value], *ranks: int) -> set[str]:
    """Returns the names of the lengths of masks and ids [B, S] and of embeddings [B, S, H]."""
    shapes = [g.dims(value) or [] for value in values]
    return {shape[1] for shape in shapes if len(shape) in ranks and isinstance(shape[1], str)}


def make_runnable(model: ir.Model) -> int:
    """Gives nodes the form that the CPU runs, and returns how many change. Quantised matmuls compute in
    floats: integers would turn last bits into steps, which no comparison can tell from defects."""
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits" and ACCURACY in node.attributes]
    for node in nodes:
        node.meta[ACCURACY] = node.attributes.pop(ACCURACY)
    return len(nodes) + split_query_norms(model)


def split_query_norms(model: ir.Model) -> int:
    """Writes the norms of q and k as nodes of their own; returns the number of attentions that had them."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION and node.inputs[1] is not None]
    nodes = [node for node in nodes if len([*filter(None, node.inputs[_Q_NORM : _Q_NORM + 2])]) == 2]
    for node in nodes:
        for index in (0, 1):
            x, weight = node.inputs[index], node.inputs[_Q_NORM + index]
            assert x is not None and weight is not None and weight.const_value is not None
            size = weight.const_value.size
            apart = g.reshape(node, x, [0, 0, -1, size])
            wide = g.add(node, "Cast", [apart], {"to": ir.DataType.FLOAT})
            normal, _ = rms_norm(node, wide, [-1], g.attribute(node, "qk_norm_epsilon", 1e-6))
            narrow = g.add(node, "CastLike", [normal, x], dtype=weight.dtype)  # that of x need not be known
            scaled = g.add(node, "Mul", [narrow, weight])
            node.replace_input_with(index, g.reshape(node, scaled, [0, 0, -1]))
            node.replace_input_with(_Q_NORM + index, None)
        node.resize_inputs(_Q_NORM)
        node.attributes.pop("qk_norm_epsilon", None)
    return len(nodes)
