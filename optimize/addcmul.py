"""Fuses x + a * b.

Matches: x + a * b, where nothing else reads the product: gated residuals, scale and shift of a norm that
depend on the input (adaLN in diffusion transformers), layer scale in vision transformers.
Writes: CustomAddcmul. A norm after the sum stays a node of its own: two passes over memory instead of three.
"""

import onnx_ir as ir

from .graph import DOMAIN, Work, add, dims, only_user, producer, replace


def rewrite(work: Work) -> None:
    op_type = work.records["addcmul"].onnx_name
    for node in work.nodes("Add", domain=""):
        result = node.outputs[0]
        if node.graph is None or result.dtype is not ir.DataType.FLOAT or not dims(result):
            continue
        for product, x in (node.inputs, node.inputs[::-1]):
            multiply = producer(product, "Mul")
            if multiply is None or product is None or only_user(product) is not node:
                continue
            new = add(node, op_type, [x, *multiply.inputs], domain=DOMAIN, shape=dims(result))
            replace(result, new)
            work.made["addcmul"] += 1
            break
