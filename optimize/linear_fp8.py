"""Runs the matmuls of files in float8 in 8 bits, as modelopt, ONNX Runtime's quantizer and torch write them.

Matches: MatMul and Gemm, with a bias and an activation after them. x is DequantizeLinear of e4m3 with one
constant scale; the weight that of a constant, or of QuantizeLinear of one, with one scale or one a channel.
Writes: CustomLinear of the dequantised x and weight [N, K], which is compared in fp32; and in the model in 16
bits CustomLinearFp8 of what these were made of. QuantizeLinear stays; its scale becomes one a row.
Leaves alone: other dtypes and zero points, blocks, scales that are computed or along K, K or N that is no
multiple of 16, x in 16 bits, weights that others read, too, and matmuls in fp32: the op returns 16 bits.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from twinop.model import weights
from twinop.record.op_spec import DOMAIN

from . import graph as g
from .invariance import INVARIANT
from .linear import LAYOUT, Linear, Linears, match_linear
from .precision import DTYPES
from .rewrite import LABELS, Rewrite

LINEAR_8 = "CustomLinearFp8"
STEP = 16  # K and N of its weights are multiples of it
_E4M3 = ir.DataType.FLOAT8E4M3FN


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    """Returns the DequantizeLinear whose numbers a value has, perhaps in 16 bits where they were in fp32."""
    node = g.producer(value, "Cast", "Sum")
    narrows = node is not None and (node.op_type == "Cast" or g.is_border(node))
    return g.producer(node.inputs[0] if node is not None and narrows else value, "DequantizeLinear")


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is DequantizeLinear of a constant in float8, or of QuantizeLinear of a constant."""
    source = None if (node := _dequantize(value)) is None else node.inputs[0]
    quantize = g.producer(source, "QuantizeLinear")
    is_8 = source is not None and source.dtype is not None and source.dtype.name.startswith("FLOAT8")
    return is_8 and g.is_constant(quantize.inputs[0] if quantize is not None else source)


def _is_moved_weight(value: ir.Value | None) -> bool:
    """Whether a value is a constant that was in float8 and then in another order or shape, or before."""
    is_8, moves = False, ("DequantizeLinear", "QuantizeLinear", "Reshape", "Transpose")
    while (node := g.producer(value, *moves)) is not None:
        value = node.inputs[0]
        is_8 |= value is not None and value.dtype is not None and value.dtype.name.startswith("FLOAT8")
    return is_8 and g.is_constant(value)


class LinearFp8(Linears, key="linear_fp8", sixteen_bits_only=True):
    """Finds matmuls whose x and weight are in 8 bits."""

    def match(self, node: ir.Node) -> Linear | str:
        match = match_linear(node, is_weight)
        if isinstance(match, str):
            if node.op_type in ("MatMul", "Gemm") and _is_moved_weight(node.inputs[1]):
                raise g.Skipped("its weight is reshaped, or transposed in 8 bits")
            return match
        if self.context.graph.meta.get(INVARIANT):
            raise g.Skipped("sums in 8 bits have no fixed order")
        dequantize = _dequantize(match.x)
        if dequantize is None or g.producer(dequantize.inputs[0], "QuantizeLinear") is None:
            raise g.Skipped("x is not in 8 bits")
        if _scales_of(dequantize).size > 1:
            raise g.Skipped("a scale for each channel of x")
        _weight_of(match)
        return match

    def weight_of(self, match: Linear) -> tuple[ir.Value, str]:
        given = [g.initializer(self.context.graph, each, "weight_fp8") for each in _weight_of(match)]
        shape, wide = g.dims(given[0]), ir.DataType.FLOAT
        return g.add(match.node, "DequantizeLinear", given, {"axis": 0}, dtype=wide, shape=shape), LAYOUT


class InFp8(Rewrite[list[ir.Node]], key="in_fp8", ops=("linear",), sixteen_bits_only=True):
    """Lets what `LinearFp8` has written multiply in 8 bits. Runs on the model in 16 bits."""

    def match(self, node: ir.Node) -> list[ir.Node] | str:
        of_x, of_weight = map(_dequantize, node.inputs[:2])
        quantize = g.producer(of_x.inputs[0], "QuantizeLinear") if of_x is not None else None
        if quantize is None or of_x is None or of_weight is None:
            return "its x or its weight is not in 8 bits"
        if node.outputs[0].dtype not in DTYPES.values():
            raise g.Skipped("a matmul in fp32")
        return [quantize, of_x, of_weight]

    def apply(self, node: ir.Node, match: list[ir.Node]) -> None:
        quantize, *others = match
        (q, scale), (weight, scales) = (each.inputs[:2] for each in others)
        x = quantize.inputs[0]  # the CPU has no Shape of float8
        shape = g.add(node, "Shape", [x], {"start": 0, "end": -1}, shape=[g.rank(x) - 1])
        rows = g.add(node, "Expand", [scale, shape], shape=(g.dims(x) or [])[:-1])
        new = write(node, LINEAR_8, [q, rows, weight, scales])
        self.replace(node.outputs[0], new, *node.meta.get(LABELS, ()))


def write(node: ir.Node, op_type: str, given: Sequence[ir.Value | None]) -> ir.Value:
    """Inserts a matmul in 8 bits before a CustomLinear or CustomLinearSwiglu, and returns its output;
    `given`: x and its scales, if it is in 8 bits, the weight and its scales."""
    [y], (bias, residual) = node.outputs, [*node.inputs, None, None][2:4]
    assert y.dtype is not None and node.graph is not None
    if bias is None:
        zeros = np.zeros(g.dims(given[-1]) or 0, y.dtype.numpy())  # type: ignore[arg-type]
        bias = g.initializer(node.graph, zeros, "zeros")
    kept = ("activation",) if op_type == LINEAR_8 else ("activation", "rms_eps", "few_rows")
    attributes = {name: each.value for name, each in node.attributes.items() if name in kept}
    [new] = g.add_like(node, op_type, [*given, bias, residual], attributes, [y], domain=DOMAIN)
    return new


def _scales_of(node: ir.Node) -> np.ndarray:
    """Returns the scales of QuantizeLinear or DequantizeLinear; raises Skipped for what the op lacks."""
    source, scale, zero = [*node.inputs, None][:3]
    found, offset = g.tensor(scale), g.tensor(zero)
    if _E4M3 not in [each.dtype for each in (source, *node.outputs) if each is not None]:
        raise g.Skipped("x or a weight in other 8 bits than e4m3fn")
    if found is None or (zero is not None and offset is None):
        raise g.Skipped("scales or zero points that are not constant")
    if offset is not None and offset.numpy().astype(np.float32).any():
        raise g.Skipped("zero points other than 0")
    if g.attribute(node, "block_size", 0):
        raise g.Skipped("scales of blocks")
    return found.numpy().astype(np.float32).reshape(-1)


def _weight_of(match: Linear) -> tuple[ir.TensorProtocol, np.ndarray]:
    """Returns a weight [N, K] in e4m3, and its scales [N]; raises Skipped for what the op lacks."""
    node, axis = _dequantize(match.weight), 0 if match.layout == LAYOUT else 1
    assert node is not None
    scales, quantize = _scales_of(node), g.producer(node.inputs[0], "QuantizeLinear")
    shape = [each for each in g.dims(match.weight) or () if isinstance(each, int)]
    n, k = shape[axis], shape[1 - axis]
    if scales.size > 1 and g.attribute(node, "axis", 1) % 2 != axis:
        raise g.Skipped("scales along K")
    if n % STEP or k % STEP:
        raise g.Skipped(f"K = {k} and N = {n}, of which one is no multiple of {STEP}")
    if {user.op_type for user in node.outputs[0].consumers()} - {"Gemm", "MatMul", "Sum", "Transpose"}:
        raise g.Skipped("others read its weight, too")
    tensor = g.tensor(node.inputs[0])
    if quantize is not None and node.graph is not None:
        _scales_of(quantize)
        given, opset = [*map(g.tensor, quantize.inputs)], node.graph.opset_imports[""]
        tensor = weights.node(quantize, given, opset, _E4M3, shape)
    assert tensor is not None
    return weights.transpose(tensor) if axis else tensor, np.resize(scales, n)
