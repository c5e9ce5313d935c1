"""Recognises what a few nodes compute by evaluating them, however it is written.

Exporters and models write one function in many ways: GELU as x * 0.5 * (1 + erf(x / sqrt(2))), or with the
factors in another order; an RMS norm with Pow, Sqrt and Reciprocal, or with Mul and Div. A region is a set
of nodes that computes one value from another value and constants. The rewrites evaluate it on numbers, and
compare the results with the formulas of twinop's ops.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import graph as g

_MAX_NODES = 20  # nodes of a region: the tanh form of GELU has 12, a layer norm with all its casts 14
erf = np.vectorize(math.erf, otypes=[float])

_ELEMENTWISE: Mapping[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Cast": lambda x: x,
    "Div": np.divide,
    "Erf": erf,
    "Exp": np.exp,
    "Identity": lambda x: x,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Pow": np.power,
    "Reciprocal": np.reciprocal,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Tanh": np.tanh,
}
_REDUCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "GlobalAveragePool": lambda x: x.mean(-1, keepdims=True),
    "ReduceL2": lambda x: np.sqrt((x**2).sum(-1, keepdims=True)),
    "ReduceMean": lambda x: x.mean(-1, keepdims=True),
    "ReduceSum": lambda x: x.sum(-1, keepdims=True),
    "ReduceSumSquare": lambda x: (x**2).sum(-1, keepdims=True),
}
REDUCTIONS = tuple(_REDUCTIONS)
_RESTORES = ("Expand", "Reshape", "Unsqueeze")  # the last dimension after a reduction: NumPy broadcasts it


@dataclass(frozen=True)
class Region:
    """Nodes that compute `output` from `source` and constants, the last node first."""

    output: ir.Value
    source: ir.Value
    nodes: Sequence[ir.Node]

    def has(self, *op_types: str) -> bool:
        return any(node.op_type in op_types for node in self.nodes)

    def constants(self) -> list[ir.Value]:
        values = (value for node in self.nodes for value in _read(node))
        return [value for value in values if value is not None and g.is_constant(value)]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns the output in fp64 for x, rows of the source."""
        found = {self.source: x.astype(np.float64)}

        def read(value: ir.Value | None) -> np.ndarray:
            if value in found:
                return found[value]
            array = g.constant(value)
            assert array is not None
            return array.astype(np.float64).reshape(-1 if array.size > 1 else ())

        with np.errstate(all="ignore"):
            for node in reversed(self.nodes):
                function = _REDUCTIONS.get(node.op_type) or _ELEMENTWISE.get(node.op_type, np.asarray)
                found[node.outputs[0]] = function(*(read(v) for v in _read(node) if v is not None))
        return found[self.output]


def _read(node: ir.Node) -> Sequence[ir.Value | None]:
    """Returns the inputs of a node without axes and shapes."""
    return node.inputs[:1] if node.op_type in REDUCTIONS + _RESTORES else node.inputs


def _readers(value: ir.Value) -> list[ir.Node]:
    """Returns the nodes that read the numbers of a value, and not only its shape."""
    return [use.node for use in value.uses() if use.node.op_type != "Shape"]


def regions(output: ir.Value, order: Mapping[ir.Node, int]) -> Iterator[Region]:
    """Yields the regions that compute a value, the smallest first; `order`: the indices of nodes."""
    frontier, nodes = {output}, list[ir.Node]()
    while len(nodes) < _MAX_NODES:
        value = max(frontier, key=lambda each: order.get(each.producer(), -1))  # type: ignore[arg-type]
        node = value.producer()
        if node is None or not _computable(node):
            return
        if nodes and (value.is_graph_output() or any(node not in nodes for node in _readers(value))):
            return
        nodes.append(node)
        frontier = (frontier - {value}) | {
            each for each in _read(node) if each is not None and not g.is_constant(each)
        }
        if len(frontier) == 1:
            yield Region(output, next(iter(frontier)), tuple(nodes))
        if not frontier:
            return


def _computable(node: ir.Node) -> bool:
    if node.domain:
        return False
    if node.op_type in REDUCTIONS:
        axes, rank = g.ints(node, "axes", 1), g.rank(node.inputs[0])
        if node.op_type == "GlobalAveragePool":  # tf2onnx's mean of [B, S, D]
            axes = [-1] if rank == 3 else None
        is_kept = g.attribute(node, "keepdims", 1) == 1 or all(map(_restores, _readers(node.outputs[0])))
        return axes is not None and axes in ([-1], [rank - 1]) and is_kept
    if node.op_type in _RESTORES:
        return _restores(node)
    dtype = node.outputs[0].dtype
    if node.op_type not in _ELEMENTWISE or dtype is None or not dtype.is_floating_point():
        return False
    return all(value is None or not g.is_constant(value) or _is_row(value) for value in node.inputs)


def _restores(node: ir.Node) -> bool:
    """Whether a node appends the last dimension that a reduction removed, or repeats its one element."""
    before, after = g.dims(node.inputs[0]), g.dims(node.outputs[0])
    if node.op_type not in _RESTORES or before is None or after is None:
        return False
    if node.op_type == "Expand":
        return before[-1:] == [1] and g.same_dims(before[:-1], after[:-1])
    reduction = g.producer(node.inputs[0], *REDUCTIONS)
    was_removed = reduction is not None and g.attribute(reduction, "keepdims", 1) == 0
    return was_removed and g.same_dims([*before, 1], after)


def _is_row(value: ir.Value) -> bool:
    """Whether a constant is one number or one row of numbers."""
    shape = g.dims(value)
    is_row = shape is not None and all(dim == 1 for dim in shape[:-1])
    return g.scalar(value) is not None or (is_row and g.constant(value) is not None)
