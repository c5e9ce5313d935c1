"""Fuses layer norms and RMS norms, however they are written.

Matches: chains of operators over the last dimension (`regions.py`), with means, sums or lengths of rows;
LayerNormalization and RMSNormalization.
Writes: CustomLayerNorm and CustomRmsNorm, with weight and bias.
Leaves alone: norms over several dimensions, with one number as weight, or whose other outputs are read;
x / (length + eps) and x / max(length, eps), which differ for rows that are almost zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import graph as g
from .regions import REDUCTIONS, Region, regions
from .rewrite import Rewrite

_SEED = 0
_LARGEST_EPS = 0.01


@dataclass(frozen=True)
class _Norm:
    """A norm of x. Arrays become new constants, unless one of `constants` has the numbers."""

    op: str  # layer_norm or rms_norm
    source: ir.Value
    eps: float
    rows: Sequence[ir.Value | np.ndarray | None]  # weight and bias
    constants: Sequence[ir.Value] = ()  # those that the norm reads


class Norms(Rewrite[_Norm]):
    """Finds norms that are one node, and those that are many."""

    name, backwards = "norm", True
    op_types = ("Mul", "Add", "Div", "LayerNormalization", "RMSNormalization")

    def match(self, node: ir.Node) -> _Norm | g.Skipped | str:
        if not node.op_type.endswith("Normalization"):
            return _match(node.outputs[0], self.order) or "it is the last node of no formula of a norm"
        source, *rows = node.inputs
        assert source is not None
        is_last = g.attribute(node, "axis", -1) in (-1, g.rank(source) - 1)
        if not is_last or any(len(g.dims(row) or [0]) != 1 for row in rows if row is not None):
            return g.Skipped("over several dimensions")
        if rows and g.dims(rows[0]) == [1] and g.last_dim(source) != 1:
            return g.Skipped("one number as weight")
        if any(map(g.is_read, node.outputs[1:])):
            return g.Skipped("its statistics are read")
        op = "layer_norm" if node.op_type == "LayerNormalization" else "rms_norm"
        return _Norm(op, source, float(g.attribute(node, "epsilon", 1e-5)), rows)

    def apply(self, node: ir.Node, match: _Norm) -> None:
        rows = [
            self._parameter(row, match, name) if isinstance(row, np.ndarray) else row
            for row, name in zip(match.rows, ("weight", "bias"), strict=False)
        ]
        new = self.context.add_op(node, match.op, [match.source, *rows], eps=match.eps)
        self.replace(node.outputs[0], new, match.op)

    def _parameter(self, array: np.ndarray, norm: _Norm, name: str) -> ir.Value:
        """Returns the constant of the model with these values, or a new one."""
        for value in norm.constants:
            found = g.constant(value)
            assert found is not None
            same_dtype = value.dtype is norm.source.dtype
            if same_dtype and found.shape == array.shape and np.allclose(found, array, rtol=1e-6, atol=1e-13):
                return value
        dtype = norm.source.dtype
        assert dtype is not None
        return g.initializer(self.context.graph, array.astype(dtype.numpy()), f"{norm.source.name}_{name}")


def _match(output: ir.Value, order: Mapping[ir.Node, int]) -> _Norm | None:
    best = None
    for region in regions(output, order):
        if not region.has(*REDUCTIONS) or region.source.dtype is not output.dtype:
            continue
        if region.has("Erf", "Tanh", "Sigmoid", "Exp"):
            break
        vectors = [value for value in region.constants() if (value.shape or [1])[-1] != 1]
        width = g.last_dim(region.source) or (g.last_dim(vectors[0]) if vectors else None)
        if width is not None and width > 1 and (found := _fit(region, width)) is not None:
            if found.op == "layer_norm":
                return found
            best = best or found  # an RMS norm of centred rows may be part of a layer norm: go on
    return best


def _fit(region: Region, width: int) -> _Norm | None:
    """Returns the norm that a region computes, with the weight and bias that follow from its results."""
    rows = np.random.default_rng(_SEED).standard_normal((8, width)) + 0.5
    numbers = {number for value in region.constants() if (number := g.scalar(value)) is not None}
    for eps in sorted(number for number in numbers if 0 < number < _LARGEST_EPS):
        for op in ("rms_norm", "layer_norm"):
            centred = rows - rows.mean(-1, keepdims=True) * (op == "layer_norm")
            square = (centred**2).mean(-1, keepdims=True)
            normal = centred / np.sqrt(square + eps)
            result = region(rows)
            if result.shape != rows.shape:
                return None
            bias = region(np.zeros_like(rows))[0]  # exactly: the norm of a row of zeros is 0
            largest = np.abs(normal).argmax(0), np.arange(width)
            weight = (result - bias)[largest] / normal[largest]
            small = region(rows * eps**0.5)  # eps makes a difference here
            expected = centred / np.sqrt(square + 1) * weight + bias
            fits = _close(result, normal * weight + bias) and _close(small, expected)
            if fits and (op == "layer_norm" or not bias.any()):
                found = [weight, bias] if bias.any() else [weight]
                return _Norm(op, region.source, float(eps), found, region.constants())
    return None


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether numbers differ no more than a norm's constants do that were rounded to fp32."""
    return np.allclose(found, expected, rtol=1e-5, atol=1e-8 * np.abs(expected).max())
