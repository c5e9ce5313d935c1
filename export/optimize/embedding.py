"""Embeddings whose ids are known.

Matches: a sum with rows of a constant table, looked up by constant ids (positions) or by ids that are all
the same (token types that nobody gives: slices and expansions of a buffer of zeros).
Writes: the sum with these rows as a constant. Constants that are added one after the other become one.
Leaves alone: ids that are inputs of the model.
"""

import numpy as np
import onnx_ir as ir

from .graph import Work, add, attribute, constant, dims, initializer, made_by, only_user, replace, same_dims

_CARRIERS = ("Expand", "GatherElements", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")


def rewrite(work: Work) -> None:
    """Applies this rewrite."""
    for node in work.nodes("Add", domain=""):
        if node.graph is None:
            continue
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is None or not same_dims(dims(other), dims(node.outputs[0])):
                continue
            looked_up, before = _rows(value), _sum_before(other, node)
            rows = looked_up
            if before is not None:
                known = constant(value) if rows is None else rows
                rows, other = None if known is None else before[1] + known, before[0]
            if rows is None:
                continue
            total = initializer(work.graph, rows, f"{node.outputs[0].name}_rows")
            replace(node.outputs[0], add(node, "Add", [other, total], shape=dims(node.outputs[0])))
            work.made["embedding of known ids"] += looked_up is not None
            break


def _sum_before(value: ir.Value, reader: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """Returns x and the constant of a sum x + constant that this node alone reads."""
    node = made_by(value, "Add")
    if node is None or only_user(value) is not reader:
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        rows = constant(other)
        if x is not None and rows is not None and same_dims(dims(x), dims(value)):
            return x, rows
    return None


def _rows(value: ir.Value | None) -> np.ndarray | None:
    """Returns the rows of a lookup, to be broadcast."""
    gather = made_by(value, "Gather")
    if gather is None or attribute(gather, "axis", 0) != 0:
        return None
    table = constant(gather.inputs[0])
    if table is None or table.ndim != 2 or not np.issubdtype(table.dtype, np.floating):
        return None
    ids = _ids(gather.inputs[1])
    return None if ids is None else table[ids]


def _ids(value: ir.Value | None) -> np.ndarray | None:
    """Returns ids as a constant that broadcasts to them, if they are known."""
    expand = made_by(value, "Expand")
    exact = constant(expand.inputs[0] if expand is not None else value)
    if exact is not None:
        return exact
    node = made_by(value, *_CARRIERS, "ConstantOfShape")
    while node is not None:
        if node.op_type == "ConstantOfShape":
            fill = attribute(node, "value", None)
            found = fill.numpy() if fill is not None else np.zeros(1)
        else:
            found = constant(node.inputs[0])
        if found is not None:
            same = found.size and (found == found.flat[0]).all() and np.issubdtype(found.dtype, np.integer)
            return found.reshape(-1)[0] if same else None
        node = made_by(node.inputs[0], *_CARRIERS, "ConstantOfShape")
    return None
