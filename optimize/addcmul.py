"""Fuses x + a * b.

Matches: x + a * b, where nothing else reads the product: gated residuals, scale and shift of a norm that
depend on the input (adaLN in diffusion transformers), layer scale in vision transformers.
Writes: CustomAddcmul. A norm after the sum stays a node of its own: two passes over memory instead of three.
"""

import onnx_ir as ir

from . import graph as g
from .rewrite import Rewrite


class Addcmul(Rewrite[tuple[ir.Value | None, ir.Node]], key="addcmul", op_types=("Add",), device="cuda"):
    """Finds x and the product."""

    def match(self, node: ir.Node) -> tuple[ir.Value | None, ir.Node] | str:
        result = node.outputs[0]
        if result.dtype is not ir.DataType.FLOAT or not g.dims(result):
            return "it is no sum of floats of a known shape"
        for product, x in (node.inputs, node.inputs[::-1]):
            multiply = g.producer(product, "Mul")
            if multiply is not None and product is not None and g.only_user(product) is node:
                return x, multiply
        return "neither term is a Mul that nothing else reads"

    def apply(self, node: ir.Node, match: tuple[ir.Value | None, ir.Node]) -> None:
        (x, multiply), result = match, node.outputs[0]
        new = self.context.add_op(node, "addcmul", [x, *multiply.inputs], g.dims(result))
        self.replace(result, new, self.name)
