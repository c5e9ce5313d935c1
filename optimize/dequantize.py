"""Reads matmuls of weights in blocks that DequantizeLinear makes floats as matmuls of quantised weights.

Matches: DequantizeLinear with a block size, of constant integers of 4 or 8 bits with constant scales and zero
points, that only MatMul and Gemm read: [K, N] with blocks along the first axis, as ONNX Runtime's quantizer
writes them, or [N, K] along the last one, which a Transpose or Gemm turns, as genai's builder does.
Writes: com.microsoft MatMulNBits, which `quantised.py` and what merges matmuls read, and the sum with the
bias of a Gemm. The integers go into its bytes; zero, if none is given, is the middle of their range.
Leaves alone: what `linear_q` has no kernel for, scales that float16 does not have, and mixtures of experts.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .linear import LAYOUT, supported_linear
from .quantised import MATMUL_NBITS, why_not
from .rewrite import Rewrite

_KINDS = {
    ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8,
}  # fmt: skip
_NORMAL = 2.0**-14  # float16 rounds larger numbers as finely as those near 1


@dataclass(frozen=True)
class _Weight:
    """A weight [N, K], its scales and zero points [N, K / block], and the matmuls that read it."""

    parts: list[ir.TensorProtocol | None]
    block: int
    matmuls: list[ir.Node]


class Dequantize(Rewrite[_Weight]):
    """Finds weights in blocks, and rewrites the matmuls that read them; sessions on the CPU do the same."""

    name, sixteen_bits_only = "dequantize", True
    op_types, microsoft = ("DequantizeLinear",), ("MoE", "QMoE")

    def match(self, node: ir.Node) -> _Weight | g.Skipped | str:
        if node.domain:
            return g.Skipped("a mixture of experts stays as it is")
        if not g.attribute(node, "block_size", 0) or not g.is_constant(node.inputs[0]):
            return "its integers are not constant, or not in blocks"
        return _match(node)

    def apply(self, node: ir.Node, match: _Weight) -> None:
        integers, scales, zeros = match.parts
        assert integers is not None and scales is not None
        bits, (n, k) = _KINDS[integers.dtype], weights.sizes(integers)
        blocks, name = k // match.block, str(node.inputs[0].name)  # type: ignore[union-attr]
        of_zeros = n, -(-blocks * bits // 8)
        packed = [weights.packed(integers, [n, blocks, match.block * bits // 8]), scales]
        if zeros is not None:
            packed.append(weights.packed(zeros, of_zeros))
        elif not integers.dtype.is_signed():
            packed.append(ir.tensor(np.zeros(of_zeros, np.uint8)))
        names = [f"{name}_{part}" for part in ("blocks", "scales", "zeros")]
        given = [*map(partial(g.initializer, self.context.graph), packed, names)]
        attributes = {"K": k, "N": n, "bits": bits, "block_size": match.block}
        for matmul in match.matmuls:
            x, _, *bias = matmul.inputs
            shape = g.dims(matmul.outputs[0]) or [*(g.dims(x) or [])[:-1], n]
            y = g.add(matmul, MATMUL_NBITS, [x, *given], attributes, domain=g.MICROSOFT, shape=shape)
            g.maker(y).meta.update(matmul.meta)
            if bias and bias[0] is not None:
                y = g.add(matmul, "Add", [y, bias[0]], shape=shape)
            self.replace(matmul.outputs[0], y, "matmul of dequantised weights")


def _match(node: ir.Node) -> _Weight:
    tensors = [*map(g.tensor, node.inputs)]
    weight, scales, zeros = [*tensors, None][:3]
    if weight is None or scales is None or (zeros is None and len(tensors) == 3):
        raise g.Skipped("scales or zero points that are not constant")
    sizes, axis = weights.sizes(weight), g.attribute(node, "axis", 1) % 2
    if len(sizes) != 2 or weight.dtype not in _KINDS:
        raise g.Skipped(f"a weight {[*sizes]} of {weight.dtype.name.lower()}")
    matmuls = _matmuls(node.outputs[0], axis)
    if not matmuls:
        raise g.Skipped("a weight that is read by others than matmuls with blocks along their K")
    parts = [each if each is None or axis else weights.transpose(each) for each in (weight, scales, zeros)]
    n, k = sizes if axis else sizes[::-1]
    block = g.attribute(node, "block_size", 0)
    if k % block:
        raise g.Skipped(f"K = {k}, which is no multiple of its blocks of {block}")
    if reason := why_not(n, k, _KINDS[weight.dtype], block):
        raise g.Skipped(reason)
    if not all(map(_has_float16, weights.strips(scales))):
        raise g.Skipped("scales that float16 does not have")
    return _Weight(parts, block, matmuls)


def _matmuls(weight: ir.Value, axis: int) -> list[ir.Node]:
    """Returns the matmuls that read a weight, and have their K along this axis; none if others read it."""
    users, layout = [*weight.consumers()], LAYOUT if axis else "kn"
    forms = [user.outputs[0] if user.op_type == "Transpose" else weight for user in users]
    readers = [node for form in dict.fromkeys(forms) for node in form.consumers()]
    nodes = [node for node in readers if node.op_type != "Transpose"]
    found = [supported_linear(node, lambda value: value is weight) for node in nodes]
    are_plain = all(each is not None and each.layout == layout for each in found)
    return nodes if are_plain and not weight.is_graph_output() else []


def _has_float16(scales: np.ndarray) -> bool:
    size = np.abs(scales.astype(np.float32))
    fits = (size >= _NORMAL) & (size <= np.finfo(np.float16).max)
    return bool((fits | (size.astype(np.float16).astype(np.float32) == size)).all())
