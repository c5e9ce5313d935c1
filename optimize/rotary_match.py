"""Finds rotary position embeddings, however they are written, for `rotary.py`."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g

_ELEMENTWISE = ("Add", "Cast", "Cos", "Div", "Identity", "Mul", "Neg", "Sin", "Sub")
_KEEPS_ROWS = ("Expand", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True)
class RotaryMatch:
    """A rotation of x by the angles in cos and sin: one for each pair, or the same one twice."""

    node: ir.Node  # its output is the result, which `flattened` returns
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    layout: str  # as in CustomRope
    turns_back: bool = False  # by the negative angles


def match_rotation(node: ir.Node) -> RotaryMatch | None:
    """Returns the rotation that ends in an Add or Concat, or None."""
    return _whole(node) if node.op_type == "Add" else _in_parts(node)


def _whole(node: ir.Node) -> RotaryMatch | None:
    """Matches x * cos + rotated(x) * sin."""
    products = [each for value in node.inputs if (each := g.producer(value, "Mul")) is not None]
    for with_sin, with_cos in (products, products[::-1]) if len(products) == 2 else ():
        for rotated in with_sin.inputs:
            (x, turns_back), layout = _source_of_halves(rotated), "half"
            if x is None:
                x, layout = _source_of_interleaved(rotated), "interleaved"
            if x is None or rotated is None or not any(value is x for value in with_cos.inputs):
                continue
            cos, sin = g.other_input(with_cos, x), g.other_input(with_sin, rotated)
            if cos is not None and sin is not None:
                return RotaryMatch(node, x, cos, sin, layout, turns_back)
    return None


def _in_parts(node: ir.Node) -> RotaryMatch | None:
    """Matches concat(a * cos - b * sin, b * cos + a * sin), and stacked pairs of this."""
    if len(node.inputs) != 2:
        return None
    first, second = node.inputs
    columns = [g.producer(value, "Unsqueeze") for value in node.inputs]
    if columns[0] is not None and columns[1] is not None:
        first, second = columns[0].inputs[0], columns[1].inputs[0]
    difference, total = g.producer(first, "Sub"), g.producer(second, "Add")
    if difference is None or total is None:
        return None
    minuend, subtrahend, *terms = (g.producer(each, "Mul") for each in (*difference.inputs, *total.inputs))
    if minuend is None or subtrahend is None or None in terms:
        return None
    found = {frozenset(term.inputs) for term in terms if term is not None}
    for a, cos in (minuend.inputs, minuend.inputs[::-1]):
        for b, sin in (subtrahend.inputs, subtrahend.inputs[::-1]):
            if found != {frozenset((b, cos)), frozenset((a, sin))} or cos is None or sin is None:
                continue
            x, layout = _source_of_pairs(a, b)
            axis, rank = g.attribute(node, "axis", 0), g.rank(x)
            if x is None or (layout == "half") == (columns[0] is not None):
                continue
            if layout == "half" and axis in (-1, rank - 1):
                return RotaryMatch(node, x, cos, sin, layout)
            if layout == "interleaved" and (last := _last(node, x)) is not None:
                return RotaryMatch(last, x, cos, sin, layout)
    return None


def _source_of_pairs(a: ir.Value | None, b: ir.Value | None) -> tuple[ir.Value | None, str]:
    """Returns x and the layout, if a and b are the first and second elements of all its pairs."""
    if (x := g.whole_of((a, b), -1)) is not None:
        return (x if g.last_dim(a) == g.last_dim(b) else None), "half"
    sources = [_every_second(each, start) for start, each in enumerate((a, b))]
    return (sources[0] if sources[0] is sources[1] else None), "interleaved"


def _every_second(value: ir.Value | None, start: int) -> ir.Value | None:
    """Returns x of x[..., start::2]."""
    node = g.producer(value, "Slice")
    x = node.inputs[0] if node is not None else None
    shape, width = g.dims(x) or [], g.last_dim(x)
    if node is None or width is None or width % 2 or g.last_dim(value) != width // 2:
        return None
    found = [g.ints(node, name, index) for name, index in (("starts", 1), ("steps", 4))]
    return x if found == [[start], [2]] and g.ints(node, "axes", 3) in ([-1], [len(shape) - 1]) else None


def _last(stack: ir.Node, x: ir.Value) -> ir.Node | None:
    """Returns the Reshape of [..., D / 2, 2] to the shape of x, or the stack for `flattened`; else None."""
    pairs, shape, width = stack.outputs[0], g.dims(x), g.last_dim(x)
    readers = pairs.consumers()
    if shape is None or width is None or g.dims(pairs) != [*shape[:-1], width // 2, 2] or not readers:
        return None
    if pairs.is_graph_output() or any(each.op_type != "Reshape" for each in readers):
        return None
    is_flat = len(readers) == 1 and g.dims(readers[0].outputs[0]) == shape
    return readers[0] if is_flat else stack


def flattened(last: ir.Node, x: ir.Value) -> ir.Value:
    """Returns the result of a rotation in the shape of x, which the readers of stacked pairs then read: the
    exporter has joined the Reshape to this shape with others."""
    pairs, shape = last.outputs[0], g.dims(x) or []
    if g.rank(pairs) == len(shape):
        return pairs
    readers = pairs.consumers()
    kept = [size if isinstance(size, int) else 0 for size in shape[:-1]]
    flat = g.reshape(readers[0], pairs, [*kept, g.last_dim(x) or 0], shape)
    for reader in readers:
        if g.dims(reader.outputs[0]) == shape:
            g.replace(reader.outputs[0], flat)
        else:
            reader.replace_input_with(0, flat)
    return flat


def _source_of_halves(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """Returns x of concat(-x[..., half:], x[..., :half]); or of concat(x[..., half:], -x[..., :half]), and
    True: NanoChat turns back."""
    concat = g.producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None, False
    for index, other in enumerate(concat.inputs[::-1]):
        negative = g.producer(concat.inputs[index], "Neg")
        pair = (other, negative.inputs[0] if negative is not None else None)
        x, layout = _source_of_pairs(*pair[:: -1 if index else 1])
        if layout == "half" and g.attribute(concat, "axis", 0) in (-1, g.rank(x) - 1):
            return x, index == 1
    return None, False


def _source_of_interleaved(value: ir.Value | None) -> ir.Value | None:
    """Returns x of stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)."""
    nodes = g.chain(value, "Reshape", "Concat", "Unsqueeze", "Neg")
    second = g.producer(nodes[1].inputs[-1], "Unsqueeze") if nodes else None
    if second is None or len(nodes[1].inputs) != 2:
        return None
    x, layout = _source_of_pairs(second.inputs[0], nodes[3].inputs[0])
    shape, flat = g.dims(x), g.dims(value)
    if shape is None or flat is None or layout != "interleaved" or not isinstance(width := shape[-1], int):
        return None
    stacked = g.dims(nodes[1].outputs[0]) or []
    is_pairs = stacked[-2:] == [width // 2, 2] and len(stacked) == len(shape) + 1
    return x if is_pairs and flat[-1] == width and len(flat) == len(shape) else None


def _constant_part(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns a constant, or columns of one."""
    if (part := g.part_of(value, -1)) is None:
        return g.tensor(value)
    source, start, stop = part
    whole = g.tensor(source)
    return None if whole is None else weights.part(whole, -1, start, stop)


def has_equal_pairs(value: ir.Value | None, layout: str) -> bool:
    """Whether both elements of each pair of the last dimension are known to be equal."""
    tensor, width = _constant_part(value), g.last_dim(value)
    last = (weights.sizes(tensor) or (0,))[-1] if tensor is not None else 0
    if tensor is not None and last > 1:
        if last % 2:
            return False
        if layout == "half":
            return weights.same(
                *(weights.part(tensor, -1, start, start + last // 2) for start in (0, last // 2))
            )
        return all(np.array_equal(each[..., ::2], each[..., 1::2]) for each in weights.strips(tensor))
    if width == 1 or g.dims(value) == []:
        return True
    node = value.producer() if value is not None else None
    if node is None or node.domain or width is None:
        return False
    if node.op_type in _ELEMENTWISE:
        return all(has_equal_pairs(each, layout) for each in node.inputs)
    if node.op_type == "Concat":
        if g.attribute(node, "axis", 0) not in (-1, g.rank(value) - 1):
            return all(has_equal_pairs(each, layout) for each in node.inputs)
        return layout == "half" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    source = node.inputs[0]
    in_pairs = (g.dims(source) or [])[-2:] == [width // 2, 2]
    if node.op_type == "Reshape" and layout == "interleaved" and in_pairs:
        return _is_repeated(source)
    if node.op_type == "Tile" and layout == "half" and g.last_dim(source) == width // 2:
        return True
    if node.op_type not in _KEEPS_ROWS or g.last_dim(source) != width:
        return False
    return _keeps_last(node, g.rank(source)) and has_equal_pairs(source, layout)


def _is_repeated(value: ir.Value | None) -> bool:
    """Whether the elements of each row of the last dimension are equal."""
    node = g.producer(value, "Expand", "Tile", "Concat")
    if node is None or g.last_dim(node.inputs[0]) != 1:
        return False
    is_last = g.attribute(node, "axis", -1) in (-1, g.rank(value) - 1)
    return is_last and (node.op_type != "Concat" or len({*node.inputs}) == 1)


def _keeps_last(node: ir.Node, rank: int) -> bool:
    """Whether a node whose input and output have equally long rows keeps the order in these."""
    last = (-1, rank - 1)
    if node.op_type == "Transpose":
        return list(g.attribute(node, "perm", ()))[-1:] == [rank - 1]
    if node.op_type == "Gather":
        return g.attribute(node, "axis", 0) not in last
    if node.op_type not in ("Slice", "Squeeze", "Unsqueeze"):
        return True
    axes = g.ints(node, "axes", 3 if node.op_type == "Slice" else 1)
    if axes is None:
        return False
    if node.op_type == "Slice" and (len(node.inputs) < 5 or g.ints(node, "steps", 4) == [1] * len(axes)):
        return True
    return not set(axes) & ({-1, rank + len(axes) - 1} if node.op_type == "Unsqueeze" else set(last))
