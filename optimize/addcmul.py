"""Fuses x + a * b.

Matches: x + a * b, where nothing else reads the product: gated residuals, scale and shift of a norm that
depend on the input (adaLN in diffusion transformers), layer scale in vision transformers.
Writes: CustomAddcmul. A norm after the sum stays a node of its own: two passes over memory instead of three.
"""

import onnx_ir as ir

from . import graph as g


def rewrite(context: g.RewriteContext) -> None:
    for node in context.nodes("Add"):
        result = node.outputs[0]
        if node.graph is None or result.dtype is not ir.DataType.FLOAT or not g.dims(result):
            continue
        for product, x in (node.inputs, node.inputs[::-1]):
            multiply = g.producer(product, "Mul")
            if multiply is None or product is None or g.only_user(product) is not node:
                continue
            new = context.add_op(node, "addcmul", [x, *multiply.inputs], g.dims(result))
            g.replace(result, new)
            context.made["addcmul"] += 1
            break
