"""Lets matmuls norm what they read, instead of a kernel before them. Runs on the model in 16 bits.

Matches: CustomRmsNorm and CustomAddRmsNorm with a constant weight, in models with attention over a cache.
Only CustomLinear and CustomLinearSwiglu read it, with weights for which they have kernels of few rows.
Writes: the attribute `rms_eps` of these matmuls, whose weights have been multiplied by that of the norm. The
sum before a norm becomes the residual of a matmul that is its term.
Leaves alone: large matmuls, whose many blocks would each norm x; weights of integers, where this takes
longer than the norm's kernel; weights that others read, too, or whose matmuls 16 bits do not have.
"""

import numpy as np
import onnx_ir as ir

from twinop.model import weights
from twinop.record.op_spec import DOMAIN

from . import graph as g
from .invariance import why_not_invariant
from .rewrite import Rewrite, label

_MOST_ELEMENTS = 1 << 26
"""Of a weight. For more and one row of x, the norm's kernel costs less (measured on an H200)."""
_RESIDUAL = 3  # the input of CustomLinear
_Match = tuple[ir.Value, list[ir.TensorProtocol]]


class NormIntoMatmul(
    Rewrite[_Match], key="norm_into_matmul", ops=("rms_norm", "add_rms_norm"), sixteen_bits_only=True
):
    """Finds what the matmuls are to norm, and their new weights."""

    def match(self, node: ir.Node) -> _Match | str:
        if not self.context.op_nodes("attention_cached"):
            return "the model has no attention over a cache"
        count = _terms(node)
        terms, (weight, *bias) = node.inputs[:count], [*node.inputs, None][count:]
        output, row = node.outputs[0], g.constant(weight)
        is_last = g.attribute(node, "axis", -1) in (-1, g.rank(terms[0]) - 1)
        if row is None or any(bias) or not is_last or g.attribute(node, "eps", 1e-6) == 0:
            return "it has no constant weight, a bias or no eps, or is not over the last dimension"
        if output.is_graph_output() or not output.uses():
            return "it is an output of the graph"
        row = row.astype(np.float32) + g.attribute(node, "offset", 0)
        x = terms[0] if count == 1 else _sum(node)
        if x is None:
            return "no term is a matmul to which the other one can be added"
        found = [_scaled(use.node, output, row) for use in output.uses()]
        if any(tensor is None for tensor in found):
            return "a reader is no matmul that can norm its input"
        return x, [tensor for tensor in found if tensor is not None]

    def apply(self, node: ir.Node, match: _Match) -> None:
        (x, weights), output = match, node.outputs[0]
        for reader, tensor in zip([use.node for use in output.uses()], weights, strict=True):
            new = g.initializer(self.context.graph, tensor, f"{output.name}_weight")
            reader.replace_input_with(1, new)
            reader.replace_input_with(0, x)
            reader.attributes["rms_eps"] = ir.AttrFloat32("rms_eps", g.attribute(node, "eps", 1e-6))
            label(reader, "norms in matmuls")
        if _terms(node) == 2:
            matmul, [other] = g.maker(x), [term for term in node.inputs[:2] if term is not x]
            matmul.resize_inputs(_RESIDUAL + 1)
            matmul.replace_input_with(_RESIDUAL, other)
            x.name = f"{x.name}_and_residual"  # it is no longer what the original calls so
            for value in node.outputs[1:]:
                value.name, x.name = f"{value.name}_before", value.name
                ir.convenience.replace_all_uses_with(value, x)
        g.prune(node)


def _terms(norm: ir.Node) -> int:
    return 2 if norm.op_type == "CustomAddRmsNorm" else 1


def _scaled(node: ir.Node, x: ir.Value, row: np.ndarray) -> ir.TensorProtocol | None:
    """Returns the weight of a matmul times a row, or None if the matmul cannot norm its input x."""
    is_matmul = node.domain == DOMAIN and node.op_type in ("CustomLinear", "CustomLinearSwiglu")
    is_matmul = is_matmul and not why_not_invariant(node)
    if not is_matmul or g.attribute(node, "rms_eps", 0.0) > 0:
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


def _sum(norm: ir.Node) -> ir.Value | None:
    """Returns the term of a norm's sum that is a matmul to which the other one can be added, or None."""
    terms = norm.inputs[:2]
    if terms[0] is terms[1] or any(value.is_graph_output() for value in norm.outputs[1:]):
        return None
    for term in terms:
        matmul = g.producer(term, "CustomLinear", domain=DOMAIN)
        if term is None or matmul is None or g.only_user(term) is not norm:
            continue
        if g.attribute(matmul, "activation", "none") == "none" and not any(matmul.inputs[_RESIDUAL:]):
            return term
    return None
