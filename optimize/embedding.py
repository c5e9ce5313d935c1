"""Folds embeddings of constant ids.

Matches: a sum with rows of a constant table, looked up by constant ids (positions) or by ids that are all the
same (default token types: slices and expansions of a buffer of zeros).
Writes: the sum with these rows as a constant. Consecutive sums with constants become one.
Leaves alone: ids that are inputs of the model; `norm_inputs.py` fuses their lookup with a norm.
"""

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .rewrite import LABELS, Rewrite

_PASS_THROUGH = ("Expand", "GatherElements", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_LABEL = "embedding of known ids"
_Match = tuple[ir.Value, ir.TensorProtocol, bool]


class Embeddings(Rewrite[_Match], key="embedding", op_types=("Add",)):
    """Finds what the rows are added to, the rows, and whether they were looked up."""

    def match(self, node: ir.Node) -> _Match | str:
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is None or not g.same_dims(g.dims(other), g.dims(node.outputs[0])):
                continue
            looked_up, before = _known_rows(value), _constant_term(other, node)
            rows = looked_up
            if before is not None:
                known = g.tensor(value) if rows is None else rows
                rows = None if known is None else weights.elementwise("Add", before[1], known)
            if rows is not None:
                has_label = before is not None and _LABEL in g.maker(other).meta.get(LABELS, ())
                return before[0] if before else other, rows, looked_up is not None or has_label
        return "neither term is a lookup of constant ids, or a second constant of one sum"

    def apply(self, node: ir.Node, match: _Match) -> None:
        (other, rows, is_lookup), result = match, node.outputs[0]
        total = g.initializer(self.context.graph, rows, f"{result.name}_rows")
        new = g.add(node, "Add", [other, total], shape=g.dims(result))
        self.replace(result, new, *[_LABEL] * is_lookup)


def _constant_term(value: ir.Value, reader: ir.Node) -> tuple[ir.Value, ir.TensorProtocol] | None:
    """Returns x and the constant of x + constant, if `reader` is its only reader."""
    node = g.producer(value, "Add")
    if node is None or g.only_user(value) is not reader:
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        rows = g.tensor(other)
        if x is not None and rows is not None and g.same_dims(g.dims(x), g.dims(value)):
            return x, rows
    return None


def _known_rows(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the rows of a lookup, or rows that broadcast to them, if they are constant."""
    gather = g.producer(value, "Gather")
    if gather is None or g.attribute(gather, "axis", 0) != 0:
        return None
    if not g.has_only(gather.inputs[0], gather.graph, "Gather"):  # else the table stays beside its rows
        return None
    table = g.tensor(gather.inputs[0])
    if table is None or len(weights.sizes(table)) != 2 or not table.dtype.is_floating_point():
        return None
    ids = _known_ids(gather.inputs[1])
    if ids is None or not ids.size:
        return None
    size, width = weights.sizes(table)
    order = ids.reshape(-1) % size
    rows = [
        (int(part[0]), int(part[-1]) + 1) for part in np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    ]
    found = weights.join([weights.part(table, 0, *each) for each in rows])
    return weights.reshape(found, [*ids.shape, width])


def _known_ids(value: ir.Value | None) -> np.ndarray | None:
    """Returns constant ids, or ids that broadcast to them; None if they are not constant."""
    expand = g.producer(value, "Expand")
    exact = g.constant(expand.inputs[0] if expand is not None else value)
    if exact is not None:
        return exact
    while (node := g.producer(value, *_PASS_THROUGH, "ConstantOfShape")) is not None:
        if node.op_type == "ConstantOfShape":
            fill = g.attribute(node, "value", None)
            found = fill.numpy() if fill is not None else np.zeros(1)
        else:
            found = g.constant(node.inputs[0])
        if found is not None:
            same = found.size and (found == found.flat[0]).all() and np.issubdtype(found.dtype, np.integer)
            return found.reshape(-1)[0] if same else None
        value = node.inputs[0]
    return None
