"""Removes the reshapes around matrix products of flattened tokens.

Matches: x [B, S, K] reshaped to [B*S, K], a MatMul or Gemm with a constant weight, the result reshaped to
[B, S, N].
Writes: MatMul and Add on [B, S, K], so that other rewrites match what follows: activations, attention, sums.
"""

import onnx_ir as ir

from .graph import UnsupportedPattern, Work, add, dims, only_user, producer, replace, same_dims
from .linear import bias_vector, match_linear


def rewrite(work: Work) -> None:
    for node in work.nodes("MatMul", "Gemm", domain=""):
        try:
            linear = match_linear(node) if node.graph is not None else None
        except UnsupportedPattern:
            continue
        before = producer(linear.x, "Reshape") if linear is not None else None
        after = only_user(linear.output) if linear is not None else None
        if linear is None or before is None or after is None or after.op_type != "Reshape":
            continue
        source, shape = before.inputs[0], dims(after.outputs[0])
        outer = (dims(source) or [])[:-1]
        if source is None or len(outer) < 2 or not same_dims([*outer, linear.width], shape):
            continue
        if not same_dims(dims(source), [*outer, (dims(linear.x) or [None])[-1]]):
            continue
        weight: ir.Value = linear.weight
        if linear.layout == "nk":
            weight = add(after, "Transpose", [weight], {"perm": [1, 0]})
        result = add(after, "MatMul", [source, weight], shape=shape)
        if linear.bias is not None:
            result = add(after, "Add", [result, bias_vector(work, linear.bias)], shape=shape)
        replace(after.outputs[0], result)
