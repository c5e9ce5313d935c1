"""Replaces ONNX Runtime's matmuls with quantised weights on CUDA. Runs on the model in 16 bits.

Matches: com.microsoft MatMulNBits with constant weights of 4 or 8 bits in blocks of 32 or 128, a bias that is
added, and an activation after it; two such matmuls of one x and a gate, or one whose halves are gate and up.
Writes: CustomLinearQ and CustomLinearQSwiglu, which read the same weights, or those of several in one.
Leaves alone: blocks of other sizes, zero points in floats, columns in another order (g_idx), weights that are
packed for one kind of GPU (weight_prepacked).

`merge` puts one MatMulNBits in the place of several.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop.errors import TwinopError
from twinop.model import weights

from . import graph as g
from .gated import gate_of, halves
from .linear import Rows, activation_of, join_rows, matmul_of
from .merge_linear import MERGED
from .rewrite import LABELS, SKIPPED, Rewrite, label

MATMUL_NBITS = "MatMulNBits"
SUFFIXES = ("", "_scales", "_zeros", "_bias")  # of the names of its constants
_BITS, _BLOCKS = (4, 8), (32, 128)


def why_not(n: int, k: int, bits: int, block: int, zero_points: Any = np.uint8) -> str:
    """Returns why `linear_q` has no kernel for such a weight, or ""; `n`, `k`: the attributes N and K of
    MatMulNBits, `zero_points`: their dtype, uint8 where there are none."""
    if bits not in _BITS:
        return f"weights of {bits} bits; linear_q has those of 4 and 8"
    if block not in _BLOCKS:
        return f"blocks of {block}; linear_q has those of 32 and 128"
    if zero_points != np.uint8:
        return f"zero points of {np.dtype(zero_points).name}; linear_q has those of uint8"
    if n % 8 != 0 or k % 32 != 0:
        return f"N = {n} and K = {k}; linear_q needs multiples of 8 and 32"
    return ""


@dataclass(frozen=True)
class _Matmul:
    """A matmul with a quantised weight, and the sum with its bias."""

    node: ir.Node
    tensors: Rows  # B, scales, zero points, bias
    output: ir.Value

    @property
    def x(self) -> ir.Value | None:
        """Read late: other matmuls may have been replaced."""
        return self.node.inputs[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The attributes, as `why_not` takes them."""
        names = {"n": ("N", 0), "k": ("K", 0), "bits": ("bits", 4), "block": ("block_size", 32)}
        return {key: g.attribute(self.node, *each) for key, each in names.items()}

    def rows(self) -> Rows:
        """Returns the tensors in the shapes of linear_q; TwinopError: one has another number of elements than
        the attributes say."""
        n, k, bits, block = self.sizes.values()
        blocks, found = -(-k // block), list[ir.TensorProtocol | None]()
        shapes = {
            "B": (n, blocks, block * bits // 8), "scales": (n, blocks),
            "zero_points": (n, -(-blocks * bits // 8)), "bias": (n,),
        }  # fmt: skip
        for tensor, (name, shape) in zip(self.tensors, shapes.items(), strict=True):
            if tensor is not None and tensor.size != math.prod(shape):
                raise TwinopError(
                    f"{MATMUL_NBITS}: {name} has {tensor.size} elements, expected {math.prod(shape)}: "
                    f"N = {n}, K = {k}, {bits} bits, blocks of {block}"
                )
            found.append(None if tensor is None else weights.reshape(tensor, shape))
        return found


class QuantisedGates(Rewrite[tuple[list[_Matmul], str]]):
    """Finds the matmuls of gate and up, or the one that has both, and the activation of the gate."""

    name, op_types, ops = "quantised_gates", ("Mul",), ("swiglu", "swiglu_packed")
    sixteen_bits_only = True

    def match(self, node: ir.Node) -> tuple[list[_Matmul], str] | str:
        match = (node.inputs[-1], node.inputs[0], "silu") if node.domain else gate_of(self.context, node)
        gate, up, activation = match or (None, None, "")
        if gate is None or up is None:
            return "it does not multiply a GELU or SiLU that nothing else reads"
        parts = halves(gate, up)
        is_one = len(node.inputs) == 1 or (parts is not None and parts[1] == 0)
        if is_one and (whole := _matmul_of(parts[0] if parts else gate)) is not None:
            fits = g.only_user(whole.output) and whole.sizes["n"] % 16 == 0
            return ([whole], activation) if fits else "others read the matmul, or N is no multiple of 16"
        first, second = _matmul_of(gate), _matmul_of(up)
        if first is None or second is None or first is second:
            return "gate and up are not two matmuls that linear_q computes"
        graph, both = self.context.graph, (first, second)
        is_alone = all(g.has_only(each.node.inputs[1], graph, MATMUL_NBITS) for each in both)
        is_alone = is_alone and all(g.only_user(each.output) for each in both)
        if not is_alone or first.sizes != second.sizes or _kind(first) != _kind(second):
            return "gate and up differ in x or in the kind of weight, or others read them"
        return [first, second], activation

    def apply(self, node: ir.Node, match: tuple[list[_Matmul], str]) -> None:
        node.meta.pop(SKIPPED, None)  # `gated.py` knows no such matmuls
        new = _write(self.context, "linear_q_swiglu", match[0], node.outputs[0], match[1])
        self.replace(node.outputs[0], new, "linear_q_swiglu")


class Quantised(Rewrite[_Matmul], key="quantised", microsoft=(MATMUL_NBITS,), sixteen_bits_only=True):
    """Puts one node in the place of a matmul, its bias and its activation."""

    def match(self, node: ir.Node) -> _Matmul:
        return _checked(node)

    def apply(self, node: ir.Node, match: _Matmul) -> None:
        output, user = match.output, g.only_user(match.output)
        activation = activation_of(self.context, user)
        output = user.outputs[0] if user is not None and activation else output
        new = _write(self.context, "linear_q", [match], output, activation or "none")
        merged = [MERGED] * (MERGED in node.meta.get(LABELS, ()))
        self.replace(output, new, f"linear_q+{activation}" if activation else "linear_q", *merged)


def _checked(node: ir.Node) -> _Matmul:
    """Returns a matmul; raises Skipped if linear_q has no kernel for it, and TwinopError if it is broken."""
    matmul = _match(node)
    if {value.dtype for value in (*node.inputs[:1], *node.outputs) if value} == {ir.DataType.FLOAT}:
        raise g.Skipped("a matmul in fp32")
    zeros = matmul.tensors[2]
    dtype = ir.DataType.UINT8 if zeros is None else zeros.dtype
    if reason := why_not(**matmul.sizes, zero_points=dtype.numpy()):
        raise g.Skipped(reason)
    matmul.rows()
    return matmul


def _match(node: ir.Node) -> _Matmul:
    x, b, scales, zeros, order, bias = [*node.inputs, *[None] * 6][:6]
    tensors = [*map(g.tensor, (b, scales, zeros, bias))]
    if order is not None:
        raise g.Skipped("columns in another order (g_idx)")
    if g.attribute(node, "weight_prepacked", 0):  # ONNX Runtime's CPU kernel reads it as if it were not
        raise g.Skipped("weights packed for one kind of GPU (weight_prepacked)")
    if x is None or tensors[0] is None or tensors[1] is None:
        raise g.Skipped("a weight that is not constant")
    if (zeros is not None and tensors[2] is None) or (bias is not None and tensors[3] is None):
        raise g.Skipped("zero points or a bias that are not constant")
    output = node.outputs[0]
    if (add := g.only_user(output)) is not None and add.op_type == "Add" and not add.domain and bias is None:
        row = g.tensor(g.other_input(add, output))
        if row is not None and weights.sizes(row) == (g.attribute(node, "N", 0),):
            return _Matmul(node, [*tensors[:3], row], add.outputs[0])
    return _Matmul(node, tensors, output)


def _write(
    context: g.RewriteContext, op: str, matmuls: list[_Matmul], output: ir.Value, activation: str
) -> ir.Value:
    """Writes one node for matmuls and what follows them, up to an output."""
    first, sizes = matmuls[0], matmuls[0].sizes
    name = str(first.node.inputs[1].name)  # type: ignore[union-attr]
    given = join_rows(context, [each.rows() for each in matmuls], name, SUFFIXES)
    is_gated = op == "linear_q_swiglu"
    width = sum(each.sizes["n"] for each in matmuls) // (1 + is_gated)
    shape = g.dims(output) or [*(g.dims(first.x) or [])[:-1], width]
    numbers = {"bits": sizes["bits"], "block": sizes["block"], "activation": activation}
    return context.add_op(g.maker(output), op, [first.x, *given], shape, **numbers)


def merge(context: g.RewriteContext, before: ir.Node, values: list[ir.Value]) -> ir.Value | None:
    """Inserts one matmul in the place of several, of one x and kind of weight, whose outputs, with their
    biases, one node reads. Returns the output, in which they follow each other; None if there are other
    values."""
    found = [each for value in values if g.only_user(value) and (each := _matmul_of(value, _match))]
    is_alone = all(g.has_only(each.node.inputs[1], context.graph, MATMUL_NBITS) for each in found)
    if not is_alone or len(found) < len(values) or any(_kind(each) != _kind(found[0]) for each in found):
        return None
    first, width = found[0].node, sum(each.sizes["n"] for each in found)
    *joined, bias = join_rows(context, [each.tensors for each in found], "packed", SUFFIXES)
    attributes = {name: each.value for name, each in first.attributes.items()} | {"N": width}
    shape = [*(g.dims(values[0]) or [])[:-1], width]
    y = g.add(before, MATMUL_NBITS, [first.inputs[0], *joined], attributes, domain=g.MICROSOFT, shape=shape)
    y.producer().meta.update(first.meta)  # type: ignore[union-attr]
    label(g.maker(y), MERGED)
    return y if bias is None else g.add(before, "Add", [y, bias], shape=shape)


def _matmul_of(value: ir.Value, match: Callable[[ir.Node], _Matmul] = _checked) -> _Matmul | None:
    """Returns the matmul that a value is; by default if linear_q computes it."""
    return matmul_of(value, match, MATMUL_NBITS, domain=g.MICROSOFT)


def _kind(matmul: _Matmul) -> list[object]:
    """Returns what two matmuls have in common if their weights can be one."""
    attributes = {name: each.value for name, each in matmul.node.attributes.items() if name != "N"}
    forms = [None if each is None else (each.dtype, weights.sizes(each)[1:]) for each in matmul.tensors[:3]]
    return [matmul.x, attributes, matmul.node.meta.get("accuracy_level"), *forms]
