"""Lets products norm what they read, instead of a kernel before them. Runs on the model in 16 bits.

Matches: CustomRmsNorm and CustomAddRmsNorm with a constant weight, in models with attention over a cache.
Only CustomLinear and CustomLinearSwiglu read it, with weights for which they have kernels of few rows.
Writes: the attribute `rms_eps` of these products, whose weights have been multiplied by that of the norm. The
sum before a norm becomes the residual of a product that is its term.
Leaves alone: large products, whose many blocks would each norm x; weights of integers, where this takes
longer than the norm's kernel; weights that others read, too, or whose products 16 bits do not have.
"""

import numpy as np
import onnx_ir as ir

from twinop.model import weights
from twinop.op_spec import DOMAIN

from . import graph as g
from .invariance import why_no_product

_MOST_ELEMENTS = 1 << 26
"""Of a weight. For more and one row of x, the norm's kernel costs less (measured on an H200)."""
_RESIDUAL = 3  # the input of CustomLinear


def rewrite(context: g.RewriteContext) -> None:
    for op, terms in (("rms_norm", 1), ("add_rms_norm", 2)) if context.op_nodes("attention_cached") else ():
        for norm in context.op_nodes(op):
            if _move(context, norm, terms):
                context.made["norms in products"] += 1


def _move(context: g.RewriteContext, norm: ir.Node, count: int) -> bool:
    """Lets the readers of a norm compute it, given the number of its terms; returns whether they can."""
    terms, (weight, *bias) = norm.inputs[:count], [*norm.inputs, None][count:]
    output, eps, row = norm.outputs[0], g.attribute(norm, "eps", 1e-6), g.constant(weight)
    readers = [use.node for use in output.uses()]
    is_last = g.attribute(norm, "axis", -1) in (-1, g.rank(terms[0]) - 1)
    if row is None or any(bias) or eps == 0 or not is_last or output.is_graph_output() or not readers:
        return False
    row = row.astype(np.float32) + g.attribute(norm, "offset", 0)
    x = terms[0] if count == 1 else _sum(context, norm)
    found = [_scaled(context, node, output, row) for node in readers] if x is not None else []
    weights = [array for array in found if array is not None]
    if x is None or len(weights) < len(readers):
        return False
    for node, array in zip(readers, weights, strict=True):
        node.replace_input_with(1, g.initializer(context.graph, array, f"{output.name}_weight"))
        node.replace_input_with(0, x)
        node.attributes["rms_eps"] = ir.AttrFloat32("rms_eps", eps)
    if count == 2:
        product, [other] = g.maker(x), [term for term in terms if term is not x]
        product.resize_inputs(_RESIDUAL + 1)
        product.replace_input_with(_RESIDUAL, other)
        x.name = f"{x.name}_sum"  # it is no longer the product alone
        for value in norm.outputs[1:]:
            g.replace(value, x)
        context.graph.sort()
    g.prune(norm)
    return True


def _scaled(
    context: g.RewriteContext, node: ir.Node, x: ir.Value, row: np.ndarray
) -> ir.TensorProtocol | None:
    """Returns the weight of a product times a row, or None if the product cannot norm its input x."""
    names = [context.records[op].onnx_name for op in ("linear", "linear_swiglu")]
    is_product = node.domain == DOMAIN and node.op_type in names and not why_no_product(node)
    if not is_product or g.attribute(node, "rms_eps", 0.0) > 0:
        return None
    weight, tensor = node.inputs[1], g.tensor(node.inputs[1])
    if weight is None or tensor is None or len(weight.uses()) > 1 or tensor.size >= _MOST_ELEMENTS:
        return None
    if [value for value in node.inputs if value is x] != [node.inputs[0]]:
        return None
    wide = weights.cast(tensor, ir.DataType.FLOAT)
    exact = weights.elementwise("Mul", wide, ir.tensor(row))
    unit, error, size = 2.0 ** (-11 if tensor.dtype is ir.DataType.FLOAT16 else -8), 0.0, 0.0
    with np.errstate(all="ignore"):
        for strip in weights.strips(exact):
            error += float(np.square(strip.astype(tensor.dtype.numpy()) - strip).sum())
            size += float(np.square(strip).sum())
    return weights.cast(exact, tensor.dtype) if error**0.5 <= unit * size**0.5 else None


def _sum(context: g.RewriteContext, norm: ir.Node) -> ir.Value | None:
    """Returns the term of a norm's sum that is a product to which the other one can be added, or None."""
    terms, name = norm.inputs[:2], context.records["linear"].onnx_name
    if terms[0] is terms[1] or any(value.is_graph_output() for value in norm.outputs[1:]):
        return None
    for term in terms:
        product = g.producer(term, name, domain=DOMAIN)
        if term is None or product is None or g.only_user(term) is not norm:
            continue
        if g.attribute(product, "activation", "none") == "none" and not any(product.inputs[_RESIDUAL:]):
            return term
    return None
