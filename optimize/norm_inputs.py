"""Fuses a norm with what it reads: a sum, or the lookup of an embedding.

Matches: CustomLayerNorm and CustomRmsNorm with a weight, over the last dimension. Before it, the sum of two
tensors of one shape; or, before a layer norm, a lookup of ids [B, S] that are an input of the model, and sums
with rows [1 or B, S, C].
Writes: CustomAddLayerNorm, CustomAddRmsNorm, CustomEmbedLayerNorm. They return the sum, too, and round it as
an Add does: no bit changes, with one pass over memory less.
Leaves alone: sums that broadcast, such as that with a bias, or of shapes that are not known.
"""

from collections.abc import Sequence

import onnx_ir as ir

from twinop.op_spec import DOMAIN

from . import graph as g


def fuse_sums(context: g.RewriteContext) -> None:
    """Fuses the sum of two tensors and a norm."""
    add = context.records["add"].onnx_name
    for norm in ("layer_norm", "rms_norm"):
        for node in context.op_nodes(norm):
            total = node.inputs[0]
            addition = g.producer(total, "Add") or g.producer(total, add, domain=DOMAIN)
            if addition is None or total is None or not _is_fusible(node):
                continue
            if not g.has_precision_of(addition, node):
                continue
            is_alike = all(g.same_dims(g.dims(each), g.dims(total)) for each in addition.inputs)
            terms = [each for each in addition.inputs if each is not None]
            if is_alike and len(terms) == 2:
                terms = context.broadcast(node, terms, [[*range(g.rank(total))]] * 2)
                _fuse(context, norm, node, total, f"add_{norm}", terms)


def fuse_lookups(context: g.RewriteContext) -> None:
    """Fuses a lookup, the sums after it and a layer norm."""
    for norm in context.op_nodes("layer_norm"):
        total, shape = norm.inputs[0], g.dims(norm.inputs[0]) or []
        if total is None or len(shape) != 3 or not _is_fusible(norm):
            continue
        terms = _terms(total, norm)
        lookup = next((term for term in terms if _is_lookup(term, shape)), None)
        gather = lookup.producer() if lookup is not None and len(terms) > 1 else None
        rows = [term for term in terms if term is not lookup]
        if gather is not None and (rest := _sum_of_terms(norm, rows, shape)) is not None:
            table, ids = gather.inputs
            assert ids is not None
            axes = [[0, 1]] * 2 if (g.dims(rest) or [1])[0] != 1 else [[1]] * 2
            ids, rest = context.broadcast(norm, [ids, rest], axes)
            _fuse(context, "layer_norm", norm, total, "embed_layer_norm", [table, ids, rest])


def _is_fusible(norm: ir.Node) -> bool:
    """Whether a norm has a weight and is over the last dimension."""
    has_weight = len(norm.inputs) > 1 and norm.inputs[1] is not None
    return has_weight and g.attribute(norm, "axis", -1) in (-1, g.rank(norm.inputs[0]) - 1)


def _fuse(
    context: g.RewriteContext,
    norm: str,
    node: ir.Node,
    total: ir.Value,
    op: str,
    inputs: Sequence[ir.Value | None],
) -> None:
    """Puts one node of `op` in the place of a norm and the sum that it reads."""
    record, old = context.records[op], [node.outputs[0], total]
    kept = {name: each.value for name, each in node.attributes.items() if record.attribute(name) is not None}
    fused = g.add_like(node, record.onnx_name, [*inputs, *node.inputs[1:]], kept, old, domain=DOMAIN)
    normal, total_again = fused
    if g.FP32 in g.maker(total).meta and g.FP32 not in node.meta:  # the readers of the norm have 16 bits
        normal = g.add(node, "Sum", [normal], shape=g.dims(normal))
    for value, new in zip(old, (normal, total_again), strict=True):
        g.replace(value, new)
    context.graph.sort()  # other readers of the sum may stand before the norm
    context.made[norm] -= 1
    context.made[op] += 1


def _terms(value: ir.Value, reader: ir.Node) -> list[ir.Value]:
    """Returns the terms of a sum. Only the whole sum may have readers other than `reader`."""
    node = g.producer(value, "Add")
    if node is None:
        return [value]
    return [
        term
        for each in node.inputs
        if each is not None
        for term in (_terms(each, node) if g.only_user(each) is node else [each])
    ]


def _is_lookup(value: ir.Value, shape: list[g.Dim]) -> bool:
    """Whether a value is a lookup of ids [B, S] in a table, for one reader."""
    gather = g.producer(value, "Gather")
    if gather is None or g.attribute(gather, "axis", 0) != 0 or g.rank(gather.inputs[0]) != 2:
        return False
    ids = gather.inputs[1]
    is_alone = g.only_user(value) is not None  # else the lookup would be computed twice
    are_ids = ids is not None and ids.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return is_alone and are_ids and g.same_dims(g.dims(ids), shape[:2])


def _sum_of_terms(before: ir.Node, terms: list[ir.Value], shape: list[g.Dim]) -> ir.Value | None:
    """Returns the sum of the terms as [1 or B, S, C], or None if it is not known to have this shape."""
    total, *others = sorted(terms, key=g.rank)
    for term in others:
        total = g.add(before, "Add", [total, term])
    found = g.dims(total)
    if found == shape[1:]:
        return g.add(before, "Unsqueeze", [total, g.int_constant(before, [0])], shape=[1, *shape[1:]])
    return total if found in (shape, [1, *shape[1:]]) and None not in shape else None
