"""Fuses GELU and SiLU, however they are written, and squares after Relu.

Matches: a Mul or Div whose region (`regions.py`) computes GELU (erf or tanh form) or SiLU; ONNX's `Gelu`, and
`Swish` with its default alpha; on CUDA Pow(Relu(x), 2), also as a Mul, which Nemotron has.
Writes: CustomGelu, CustomSilu, CustomSquare. `linear.py` fuses the first two and Relu with the matrix product
before them.
Leaves alone: quick GELU, x * sigmoid(1.702 x), and SiLU after a convolution, because ONNX Runtime fuses them;
on the CPU GELU, and SiLU that is no gate.
"""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from . import graph as g
from .regions import REDUCTIONS, erf, regions
from .rewrite import Rewrite

_NEAR_0 = np.array([0, 1e-30, -1e-12, 1e-7, -1e-5, 1e-3])
_X = np.concatenate([_NEAR_0, np.linspace(-12, 12, 192), [-0.3, 0.7, -1e4, -50, 50, 1e4]])
_FORMULAS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}
with np.errstate(over="ignore"):
    _EXPECTED = {name: formula(_X) for name, formula in _FORMULAS.items()}
# erf and tanh GELU differ by 4.7e-4. Constants rounded to 16 bits cost up to 1e-4, to five digits 3e-6.
_TOLERANCE, _TOLERANCE_16_BITS = 1e-5, 1e-4
# The time of a new file by that of its source, on two cores of an AMD EPYC, fp32, ONNX Runtime 1.31.1: silu
# alone 1.02 to 1.32, as ONNX Runtime makes it QuickGelu; its product with a tensor 0.87 to 0.97, halves of
# one 0.56 to 0.96; norms 0.53 to 1.05 from 128 columns on, 1.03 to 1.36 with 64; with a sum 0.61 to 0.99,
# 1.06 to 1.16 with 64 columns and 128 rows or more; embed_layer_norm 0.52 to 1.08, ada_layer_norm 0.41 to
# 0.97, RotaryEmbedding 0.42 to 1.01, MultiHeadAttention 0.19 to 1.03.
_FUSES = "ONNX Runtime fuses it"
_SLOWER_ON_CPU = {"gelu": f"{_FUSES} with the bias before it", "silu": _FUSES}
_Match = tuple[str, ir.Value]


class Activations(
    Rewrite[_Match], key="activation", op_types=("Mul", "Div", "Gelu", "Swish", "Pow"), backwards=True
):
    """Finds the name of a function and its x."""

    def match(self, node: ir.Node) -> _Match | g.Skipped | str:
        found = self._function(node)
        if found is None:
            return "it is the last node of no formula of GELU, SiLU or a square after Relu"
        name, x = found
        op = name.removesuffix("_tanh")
        if name == "quick_gelu":
            return g.Skipped("ONNX Runtime fuses it", "quick GELU")
        reason = _SLOWER_ON_CPU.get(op) if self.context.device == "cpu" else None
        if reason and not (name == "silu" and _is_gate(node.outputs[0])):
            return g.Skipped(reason, name)
        if name == "silu" and g.producer(x, "Conv", "BatchNormalization", "ConvTranspose"):
            return g.Skipped("ONNX Runtime fuses it", "silu after a convolution")
        return found

    def apply(self, node: ir.Node, match: _Match) -> None:
        name, x = match
        attributes = {"approximate": "tanh"} if name == "gelu_tanh" else {}
        new = self.context.add_op(node, name.removesuffix("_tanh"), [x], **attributes)
        self.replace(node.outputs[0], new, name)

    def _function(self, node: ir.Node) -> _Match | None:
        x = node.inputs[0]
        assert x is not None
        if node.op_type == "Gelu":
            return "gelu_tanh" if g.attribute(node, "approximate", "none") == "tanh" else "gelu", x
        if node.op_type == "Swish":
            return "silu" if g.attribute(node, "alpha", 1.0) == 1.0 else "swish with an alpha", x
        if node.op_type != "Pow" and (found := _match(node, self.order)) is not None:
            return found
        is_square = node.inputs[1] is x if node.op_type == "Mul" else g.scalar(node.inputs[1]) == 2
        is_square = is_square and node.op_type != "Div" and self.context.device == "cuda"
        return ("square", x) if is_square and g.producer(x, "Relu") and x.dtype is ir.DataType.FLOAT else None


def _is_gate(value: ir.Value) -> bool:
    """Whether a product with a tensor of its shape reads it, which `gated.py` fuses."""
    user = g.only_user(value)
    if user is None or user.op_type != "Mul" or user.domain or user.inputs[0] is user.inputs[1]:
        return False
    return g.same_dims(*map(g.dims, user.inputs))


def _match(node: ir.Node, order: Mapping[ir.Node, int]) -> _Match | None:
    for region in regions(node.outputs[0], order):
        if not region.has("Erf", "Tanh", "Sigmoid", "Exp"):
            continue
        numbers = [g.scalar(value) for value in region.constants()]
        if None in numbers or region.has(*REDUCTIONS):
            return None
        wide, narrow_types = np.array(numbers, np.float32), (np.float16, ml_dtypes.bfloat16)
        are_16_bits = any((wide.astype(kind) == wide).all() for kind in narrow_types)
        tolerance, result = _TOLERANCE_16_BITS if are_16_bits else _TOLERANCE, region(_X)
        for name, expected in _EXPECTED.items():
            near_0 = np.allclose(result[: len(_NEAR_0)], expected[: len(_NEAR_0)], rtol=tolerance, atol=0)
            if near_0 and np.allclose(result, expected, rtol=tolerance, atol=tolerance):
                return name, region.source
    return None
