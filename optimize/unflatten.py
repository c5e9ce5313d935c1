"""Removes the reshapes around matrix products of flattened tokens.

Matches: x [B, S, K] or heads [B, S, H, D] reshaped to [B*S, K], a MatMul or Gemm with a constant weight, the
result reshaped to [B, S, N].
Writes: MatMul and Add on [B, S, K], so that other rewrites match what follows: activations, attention, sums.
nn.MultiheadAttention computes this product with the tokens first, [S, B, H, D]. The transpose moves behind
the product. If the model has the opposite one there, both disappear.
"""

import onnx_ir as ir

from . import graph as g
from .heads import SWAP_ROWS, SWAP_S_H
from .linear import bias_vector, plain_product, supported_linear


def rewrite(context: g.RewriteContext) -> None:
    for node in context.nodes("MatMul", "Gemm"):
        linear = supported_linear(node) if node.graph is not None else None
        before = g.producer(linear.x, "Reshape") if linear is not None else None
        after = g.only_user(linear.output) if linear is not None else None
        if linear is None or before is None or after is None or after.op_type != "Reshape":
            continue
        source, shape = before.inputs[0], g.dims(after.outputs[0]) or []
        outer, width = shape[:-1], g.last_dim(linear.x)
        if (
            source is None
            or len(outer) < 2
            or not g.same_dims([*outer, linear.width], shape)
            or width is None
        ):
            continue
        last, heads = after, _heads(source, outer, width)
        if heads is not None:
            is_swapped, source = heads
            if is_swapped:
                shape = [outer[1], outer[0], linear.width]
                last = _opposite(after)
            source = g.reshape(after, source, [0, 0, width], [*(g.dims(source) or [])[:2], width])
        elif not g.same_dims(g.dims(source), [*outer, width]):
            continue
        bias = bias_vector(context, linear.bias)
        result = plain_product(after, linear, linear.weight, bias, source, shape)
        if heads is not None and is_swapped and last is after:
            result = g.transpose(after, result, SWAP_ROWS)
        g.replace(last.outputs[0], result)


def _heads(source: ir.Value, outer: list[g.Dim], width: int) -> tuple[bool, ir.Value] | None:
    """Returns heads with the dimensions outer[0], outer[1], H, D as [B, S, H, D], and whether S was first."""
    shape = g.dims(source)
    if shape is None or len(shape) != 4 or not g.same_dims(shape[:2], outer):
        return None
    count, size = shape[2:]
    if not isinstance(count, int) or not isinstance(size, int) or count * size != width:
        return None
    transpose, heads = g.producer(source, "Transpose"), g.untransposed(source, [2, 0, 1, 3])
    if transpose is None or heads is None:
        return False, source
    return True, g.transpose(transpose, heads, SWAP_S_H)


def _opposite(node: ir.Node) -> ir.Node:
    """Returns the transpose that alone reads a node and swaps the first two dimensions, else the node."""
    user = g.only_user(node.outputs[0])
    return user if user is not None and g.has_permutation(user, SWAP_ROWS) else node
