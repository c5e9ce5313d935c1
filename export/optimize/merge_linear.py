"""Merges matrix products of one input, such as q, k and v.

Matches: CustomLinear nodes with the same input, without activation and residual, if the number of rows is
known and small.
Writes: one CustomLinear with the concatenated weights, and a Split, which costs less than several products.
"""

import math
from collections import defaultdict

import numpy as np
import onnx_ir as ir

from .graph import (
    DOMAIN,
    Work,
    add,
    attribute,
    constant,
    dims,
    initializer,
    int_constant,
    is_constant,
    last_dim,
    replace,
)  # fmt: skip
from .linear import LAYOUT

_MAX_ELEMENTS = 3 << 20
"""Elements of the merged output. With more, the Split costs more than it saves (measured on an H200)."""


def rewrite(work: Work) -> None:
    groups = defaultdict[tuple[ir.Value, int], list[ir.Node]](list)
    for node in work.nodes(work.records["linear"].onnx_name, domain=DOMAIN):
        x, *constants = node.inputs
        if x is None or _rows(x) == 0 or not all(is_constant(each) for each in constants):
            continue
        plain = (
            attribute(node, "activation", "none") == "none" and attribute(node, "layout", LAYOUT) == LAYOUT
        )
        if plain and len(constants) <= 2:
            groups[x, len(constants)].append(node)
    for (x, _), nodes in groups.items():
        width = sum(last_dim(node.outputs[0]) or 0 for node in nodes)
        if len(nodes) > 1 and _rows(x) * width <= _MAX_ELEMENTS:
            _pack(work, x, nodes)


def _rows(x: ir.Value) -> int:
    """Returns the number of rows, or 0 if it is not known."""
    rows = (dims(x) or [None])[:-1]
    known = [size for size in rows if isinstance(size, int)]
    return math.prod(known) if 0 < len(known) == len(rows) else 0


def _pack(work: Work, x: ir.Value, nodes: list[ir.Node]) -> None:
    """Writes one product before the first one, and replaces all of them."""
    first = nodes[0]
    parts = [[constant(value) for value in node.inputs[1:]] for node in nodes]
    widths = [last_dim(node.outputs[0]) or 0 for node in nodes]
    packed = [initializer(work.graph, np.concatenate(each), "packed") for each in zip(*parts, strict=True)]
    rows = (dims(x) or [])[:-1]
    y = add(first, first.op_type, [x, *packed], first.attributes, domain=DOMAIN, shape=[*rows, sum(widths)])
    split = ir.node("Split", [y, int_constant(first, widths)], {"axis": -1}, num_outputs=len(nodes))
    work.graph.insert_before(first, split)
    for node, width, part in zip(nodes, widths, split.outputs, strict=True):
        part.type, part.shape = y.type, ir.Shape([*rows, width])
        replace(node.outputs[0], part)
    work.made["products of one input merged"] += 1
