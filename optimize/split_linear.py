"""Splits a matrix product whose parts are read, such as packed q, k and v: attention takes these one by one.

Matches: a product with a constant weight, whose readers are only Splits and Slices of the last dimension; a
Split of a constant, such as the packed weight of cross attention in nn.MultiheadAttention.
Writes: a product for each part, with its columns of the weight; a constant for each part.
Leaves alone: products that GroupQueryAttention reads: one of few rows takes less time than three; weights
that other nodes read, too, and so stay beside their parts.
"""

import onnx_ir as ir

from . import graph as g
from .linear import Linear, is_replaceable, plain_product, slice_columns, supported_linear


def rewrite(context: g.RewriteContext) -> None:
    for node in context.nodes("Split"):
        _split_constant(context, node)
    for node in context.nodes("MatMul", "Gemm"):
        linear = supported_linear(node) if node.graph is not None else None
        parts = _parts(linear) if linear is not None else None
        if linear is None or parts is None or not is_replaceable(linear, context.graph):
            continue
        for value, start, stop in parts:
            weight, bias = slice_columns(context, linear, start, stop)
            shape = [*(g.dims(linear.output) or [])[:-1], stop - start]
            g.replace(value, plain_product(g.maker(value), linear, weight, bias, linear.x, shape))
        context.made["packed product split"] += 1


def _split_constant(context: g.RewriteContext, node: ir.Node) -> None:
    whole, axis = g.constant(node.inputs[0]), g.attribute(node, "axis", 0)
    if whole is None or not g.has_only(node.inputs[0], context.graph, "Split"):
        return
    if any(value.is_graph_output() for value in node.outputs):
        return
    parts = [(value, g.part_of(value, axis)) for value in node.outputs if value.uses()]
    for value, part in parts:
        if part is not None:
            array = whole.take(range(*part[1:]), axis)
            g.replace(value, g.initializer(context.graph, array, str(value.name)))


def _parts(linear: Linear) -> list[tuple[ir.Value, int, int]] | None:
    """Returns each part of the last dimension as (value, start, stop), if all readers read such parts."""
    parts: list[tuple[ir.Value, int, int]] = []
    if linear.output.is_graph_output():
        return None
    for node in {use.node: None for use in linear.output.uses()}:
        for value in node.outputs:
            found = g.part_of(value, -1)
            if found is None or found[0] is not linear.output or found[1] == found[2]:
                return None
            if any(use.node.op_type == "GroupQueryAttention" for use in value.uses()):
                return None
            if g.is_read(value):
                parts.append((value, *found[1:]))
    return parts or None
