"""Fuses GELU and SiLU, however they are written, and squares after Relu.

Matches: a Mul or Div whose region (`regions.py`) computes GELU (erf or tanh form) or SiLU; ONNX's `Gelu`, and
`Swish` with its default alpha; on CUDA Pow(Relu(x), 2), also as a Mul, which Nemotron has.
Writes: CustomGelu, CustomSilu, CustomSquare. `linear.py` fuses the first two and Relu with the matrix product
before them.
Leaves alone: quick GELU, x * sigmoid(1.702 x), and SiLU after a convolution, because ONNX Runtime fuses them;
GELU on the CPU, because ONNX Runtime fuses it with the bias.
"""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from . import graph as g
from .regions import REDUCTIONS, erf, regions

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


def rewrite(context: g.RewriteContext) -> None:
    order = {node: index for index, node in enumerate(context.graph)}
    for node in reversed(context.nodes("Mul", "Div")):
        found = _match(node, order) if node.graph is not None else None
        if found is not None:
            _replace(context, node, *found)
    for node in context.nodes("Gelu", "Swish"):
        name = "gelu_tanh" if g.attribute(node, "approximate", "none") == "tanh" else "gelu"
        if node.op_type == "Swish":
            name = "silu" if g.attribute(node, "alpha", 1.0) == 1.0 else "swish with an alpha"
        _replace(context, node, name, node.inputs[0])
    for node in context.nodes("Mul", "Pow") if context.device == "cuda" else ():
        x, other = node.inputs
        is_square = other is x if node.op_type == "Mul" else g.scalar(other) == 2
        if x is not None and is_square and g.producer(x, "Relu") and x.dtype is ir.DataType.FLOAT:
            g.replace(node.outputs[0], context.add_op(node, "square", [x]))
            context.made["square"] += 1


def _match(node: ir.Node, order: Mapping[ir.Node, int]) -> tuple[str, ir.Value] | None:
    for region in regions(node.outputs[0], order):
        if not region.has("Erf", "Tanh", "Sigmoid", "Exp"):
            continue
        numbers = [g.scalar(value) for value in region.constants()]
        if None in numbers or region.has(*REDUCTIONS):
            return None
        tolerance = _TOLERANCE_16_BITS if _are_16_bits(np.array(numbers, np.float32)) else _TOLERANCE
        result = region(_X)
        for name, expected in _EXPECTED.items():
            near_0 = np.allclose(result[: len(_NEAR_0)], expected[: len(_NEAR_0)], rtol=tolerance, atol=0)
            if near_0 and np.allclose(result, expected, rtol=tolerance, atol=tolerance):
                return name, region.source
    return None


def _are_16_bits(numbers: np.ndarray) -> bool:
    """Whether fp16 or bfloat16 has all of these numbers exactly."""
    return any((numbers.astype(kind) == numbers).all() for kind in (np.float16, ml_dtypes.bfloat16))


def _replace(context: g.RewriteContext, node: ir.Node, name: str, x: ir.Value | None) -> None:
    assert x is not None
    op = name.removesuffix("_tanh")
    if name == "quick_gelu":
        context.left["quick GELU: ONNX Runtime fuses it"] += 1
    elif op not in context.records:
        context.left[f"{name}: no op computes it"] += 1
    elif op == "gelu" and context.device == "cpu":
        context.left[f"{name}: ONNX Runtime fuses it with the bias before it"] += 1
    elif name == "silu" and g.producer(x, "Conv", "BatchNormalization", "ConvTranspose"):
        context.left["silu after a convolution: ONNX Runtime fuses it"] += 1
    else:
        attributes = {"approximate": "tanh"} if name == "gelu_tanh" else {}
        g.replace(node.outputs[0], context.add_op(node, op, [x], **attributes))
        context.made[name] += 1
