"""Folds embeddings of constant ids, and fuses a lookup with the norm after it.

Matches: a sum with rows of a constant table, looked up by constant ids (positions) or by ids that are all the
same (default token types: slices and expansions of a buffer of zeros).
Writes: the sum with these rows as a constant. Consecutive sums with constants become one.
Leaves alone: ids that are inputs of the model. `fuse_norms` fuses the lookup of such ids [B, S], the sums
with rows [1 or B, S, C] and the layer norm after them into one CustomEmbedLayerNorm.
"""

import numpy as np
import onnx_ir as ir

from twinop.record import DOMAIN

from . import graph as g

_PASS_THROUGH = ("Expand", "GatherElements", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")


def rewrite(context: g.RewriteContext) -> None:
    for node in context.nodes("Add", domain=""):
        if node.graph is None:
            continue
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is None or not g.same_dims(g.dims(other), g.dims(node.outputs[0])):
                continue
            looked_up, before = _known_rows(value), _constant_term(other, node)
            rows = looked_up
            if before is not None:
                known = g.constant(value) if rows is None else rows
                rows, other = None if known is None else before[1] + known, before[0]
            if rows is None:
                continue
            total = g.initializer(context.graph, rows, f"{node.outputs[0].name}_rows")
            g.replace(node.outputs[0], g.add(node, "Add", [other, total], shape=g.dims(node.outputs[0])))
            context.made["embedding of known ids"] += looked_up is not None
            break


def fuse_norms(context: g.RewriteContext) -> None:
    """Fuses a lookup, the sums after it and a layer norm into one node."""
    record = context.records["embed_layer_norm"]
    for norm in context.nodes(context.records["layer_norm"].onnx_name, domain=DOMAIN):
        total, shape = norm.inputs[0], g.dims(norm.inputs[0])
        if (
            shape is None
            or len(shape) != 3
            or len(norm.inputs) < 2
            or g.attribute(norm, "axis", -1) not in (-1, 2)
        ):
            continue
        terms = _terms(total, norm)
        lookup = next((term for term in terms if _is_lookup(term, shape)), None)
        if lookup is None or len(terms) < 2:
            continue
        node = lookup.producer()
        assert node is not None and total is not None
        rows = _sum_of_terms(norm, [term for term in terms if term is not lookup], shape)
        if rows is None:
            continue
        inputs = [*node.inputs, rows, *norm.inputs[1:]]
        attributes = {"eps": g.attribute(norm, "eps", 1e-5)}
        fused = ir.node(record.onnx_name, inputs, attributes, domain=DOMAIN, num_outputs=2)
        last = total.producer()
        assert last is not None
        old = [*norm.outputs, total]
        ir.convenience.replace_nodes_and_values(
            context.graph, norm, [last, norm], [fused], old, fused.outputs
        )
        for term in terms:
            g.prune(term.producer())
        context.graph.sort()
        context.made["layer_norm"] -= 1
        context.made["embed_layer_norm"] += 1


def _terms(value: ir.Value | None, reader: ir.Node) -> list[ir.Value]:
    """Returns the terms of a sum. Only the whole sum may have readers other than `reader`."""
    node = g.producer(value, "Add")
    if node is None or value is None:
        return [] if value is None else [value]
    return [
        term
        for each in node.inputs
        if each is not None
        for term in (_terms(each, node) if g.only_user(each) is node else [each])
    ]


def _is_lookup(value: ir.Value, shape: list[g.Dim]) -> bool:
    """Whether a value is a lookup of ids [B, S] in a table, for one reader."""
    gather = g.producer(value, "Gather")
    if gather is None or g.attribute(gather, "axis", 0) != 0 or len(g.dims(gather.inputs[0]) or ()) != 2:
        return False
    if g.only_user(value) is None:  # the lookup would be computed twice
        return False
    return _are_ids(gather.inputs[1]) and g.same_dims(g.dims(gather.inputs[1]), shape[:2])


def _sum_of_terms(before: ir.Node, terms: list[ir.Value], shape: list[g.Dim]) -> ir.Value | None:
    """Returns the sum of the terms as [1 or B, S, C], or None if it is not known to have this shape."""
    terms = sorted(terms, key=lambda term: len(g.dims(term) or ()))
    total = terms[0]
    for term in terms[1:]:
        total = g.add(before, "Add", [total, term], shape=g.broadcast_dims(g.dims(total), g.dims(term)))
    found = g.dims(total)
    if found == shape[1:]:
        return g.add(before, "Unsqueeze", [total, g.int_constant(before, [0])], shape=[1, *shape[1:]])
    return total if found in (shape, [1, *shape[1:]]) and None not in shape else None


def _are_ids(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (ir.DataType.INT64, ir.DataType.INT32)


def _constant_term(value: ir.Value, reader: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """Returns x and the constant of x + constant, if `reader` is its only reader."""
    node = g.producer(value, "Add")
    if node is None or g.only_user(value) is not reader:
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        rows = g.constant(other)
        if x is not None and rows is not None and g.same_dims(g.dims(x), g.dims(value)):
            return x, rows
    return None


def _known_rows(value: ir.Value | None) -> np.ndarray | None:
    """Returns the rows of a lookup, or rows that broadcast to them, if they are constant."""
    gather = g.producer(value, "Gather")
    if gather is None or g.attribute(gather, "axis", 0) != 0:
        return None
    table = g.constant(gather.inputs[0])
    if table is None or table.ndim != 2 or not np.issubdtype(table.dtype, np.floating):
        return None
    ids = _known_ids(gather.inputs[1])
    return None if ids is None else table[ids]


def _known_ids(value: ir.Value | None) -> np.ndarray | None:
    """Returns constant ids, or ids that broadcast to them; None if they are not constant."""
    expand = g.producer(value, "Expand")
    exact = g.constant(expand.inputs[0] if expand is not None else value)
    if exact is not None:
        return exact
    node = g.producer(value, *_PASS_THROUGH, "ConstantOfShape")
    while node is not None:
        if node.op_type == "ConstantOfShape":
            fill = g.attribute(node, "value", None)
            found = fill.numpy() if fill is not None else np.zeros(1)
        else:
            found = g.constant(node.inputs[0])
        if found is not None:
            same = found.size and (found == found.flat[0]).all() and np.issubdtype(found.dtype, np.integer)
            return found.reshape(-1)[0] if same else None
        node = g.producer(node.inputs[0], *_PASS_THROUGH, "ConstantOfShape")
    return None
