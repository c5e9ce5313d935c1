"""Removes the reshapes around matmuls of flattened tokens.

Matches: x [B, S, K] or heads [B, S, H, D] reshaped to [B*S, K], a MatMul or Gemm with a constant weight, the
result reshaped to [B, S, N].
Writes: MatMul and Add on [B, S, K], so that other rewrites match what follows: activations, attention, sums.
nn.MultiheadAttention computes this matmul with the tokens first, [S, B, H, D]. The transpose moves behind
the matmul. If the model has the opposite one there, both disappear.
"""

import onnx_ir as ir

from . import graph as g
from .heads import SWAP_ROWS, SWAP_S_H
from .linear import Linear, bias_vector, plain_matmul, supported_linear
from .rewrite import Rewrite

_Match = tuple[Linear, ir.Value, ir.Node]


class Unflatten(Rewrite[_Match], key="unflatten", op_types=("MatMul", "Gemm"), device="cuda"):
    """Finds the matmul, what is reshaped before it, and the Reshape after it."""

    def match(self, node: ir.Node) -> _Match | str:
        linear = supported_linear(node)
        before = g.producer(linear.x, "Reshape") if linear is not None else None
        after = g.only_user(linear.output) if linear is not None else None
        if linear is None or before is None or after is None or after.op_type != "Reshape":
            return "it is no matmul with a constant weight between two Reshapes"
        source, shape = before.inputs[0], g.dims(after.outputs[0]) or []
        outer, width = shape[:-1], g.last_dim(linear.x)
        if source is None or len(outer) < 2 or not g.same_dims([*outer, linear.width], shape):
            return "the Reshape after it does not only split the tokens"
        are_heads = width is not None and _are_heads(source, outer, width)
        if not are_heads and not g.same_dims(g.dims(source), [*outer, width]):
            return "the Reshape before it does not only join the tokens, or heads"
        return linear, source, after

    def apply(self, node: ir.Node, match: _Match) -> None:
        linear, source, last = match
        shape, width, is_swapped = g.dims(last.outputs[0]) or [], g.last_dim(linear.x), False
        assert width is not None
        if _are_heads(source, shape[:-1], width):
            transpose, heads = g.producer(source, "Transpose"), g.untransposed(source, [2, 0, 1, 3])
            is_swapped = transpose is not None and heads is not None
            if transpose is not None and heads is not None:
                source = g.transpose(transpose, heads, SWAP_S_H)
                shape = [shape[1], shape[0], linear.width]
            source = g.reshape(last, source, [0, 0, width], [*(g.dims(source) or [])[:2], width])
        bias, user = bias_vector(self.context, linear.bias), g.only_user(last.outputs[0])
        result = plain_matmul(last, source, linear.weight, bias, linear.layout, shape)
        if is_swapped and user is not None and g.has_permutation(user, SWAP_ROWS):
            last = user  # the opposite transpose
        elif is_swapped:
            result = g.transpose(last, result, SWAP_ROWS)
        self.replace(last.outputs[0], result)


def _are_heads(source: ir.Value, outer: list[g.Dim], width: int) -> bool:
    """Whether a value is heads with the dimensions outer[0], outer[1], H, D."""
    shape = g.dims(source) or []
    if len(shape) != 4 or not g.same_dims(shape[:2], outer):
        return False
    count, size = shape[2:]
    return isinstance(count, int) and isinstance(size, int) and count * size == width
