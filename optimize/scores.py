"""Walks from the softmax of an attention back to the matmul of q and k."""

from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .heads import SWAP_ROWS

KNOWN = "what a mask hides"  # in the `meta` of masks: a `KnownMask`
HIDES = "where a condition hides scores"  # in the `meta` of conditions of Where: on True, with which number
LOWEST = float(np.finfo(np.float32).min)
_HIDDEN = -6e4  # a score of this or less is 0 after the softmax; -65504 is fp16's lowest number


@dataclass
class Scores:
    """What a softmax reads: the matmul of q and k^T, times `scale` and `factor`, plus the masks."""

    matmul: ir.Node
    scale: float = 1.0
    masks: list[ir.Value] = field(default_factory=list)
    factor: ir.Value | None = None  # a number for each head, [..., 1, 1]

    def query(self, before: ir.Node) -> tuple[ir.Value, float]:
        """Returns q times the factor, and what else q was multiplied by."""
        q, scale = unscaled(self.matmul.inputs[0])
        return q if self.factor is None else g.add(before, "Mul", [q, self.factor], shape=g.dims(q)), scale


@dataclass(frozen=True)
class KnownMask:
    """What `masks.py` has found out about a mask, and keeps in its `meta`. Beside the future it hides
    "nothing"; where `shown` is 0, "right" for ends of sequences, "any" for all tokens; "" if that is not
    known."""

    is_causal: bool = False  # it hides the future
    hides: str = ""
    is_finite: bool = False  # it hides with finite numbers, so that no row of a softmax is NaN
    shown: str = ""  # the name of a graph input [B, T]
    number: float = -inf  # the largest one that it hides with


def known_of(mask: ir.Value) -> KnownMask:
    """Returns what is known of a mask."""
    known: KnownMask = mask.meta.get(KNOWN, KnownMask())
    return known


def scores_of(softmax: ir.Node, after: ir.Node) -> Scores:
    """Walks from a softmax back to the matmul of q and k. Nodes for masks are inserted before `after`, none
    before the softmax itself. Skipped: there is no such matmul, or something unknown before the softmax."""
    value, found_scale, masks, floor = softmax.inputs[0], 1.0, list[ir.Value](), -inf
    by_head, grouped = None, list[g.Dim]()
    while True:
        node = value.producer() if value is not None else None
        if node is None or node.domain:
            raise g.Skipped("no matmul of q and k")
        if node.op_type == "MatMul":
            if any(map(g.is_constant, node.inputs)):
                raise g.Skipped("no matmul of q and k")
            if floor > -inf and len(masks) > 1:
                raise g.Skipped("a bound of scores with several masks")
            masks = _flat([bounded(mask, floor, after) for mask in masks], grouped, node, after)
            return Scores(node, found_scale, masks, by_head)
        if (factor := _factor(node)) is not None:
            value, found_scale = factor[0], found_scale * factor[1]
        elif by_head is None and (product := _of_heads(node)) is not None:
            value, by_head = product
        elif by_head is not None or node.op_type in ("Div", "Mul", "Tanh"):
            raise g.Skipped("the scores are capped or scaled by a tensor")
        elif node.op_type == "Reshape" and not grouped and (found := _grouped(node.inputs[0], value)):
            value, *added = found
            grouped = g.dims(node.inputs[0]) or []
            masks = [*masks, *(_scaled(mask, found_scale, after) for mask in added)]
        elif _less_its_maximum(node) or (node.op_type == "Reshape" and after is softmax):
            value = node.inputs[0]  # `batched_heads.py` removes the Reshape, after `masks_of`
        elif node.op_type in ("Add", "Sub"):
            scores = node.inputs if node.op_type == "Add" else node.inputs[:1]
            sides = [each for each in scores if _leads_to_matmul(_unzeroed(node, each))]
            mask = g.other_input(node, sides[0]) if len(sides) == 1 and sides[0] is not None else None
            if mask is None:
                raise g.Skipped("no matmul of q and k")
            times = found_scale if node.op_type == "Add" else -found_scale
            value, masks = _unzeroed(node, sides[0]), [*masks, _scaled(mask, times, after)]
        elif node.op_type == "Max" and not masks and found_scale > 0 and (bound := _bound(node)) is not None:
            value, floor = bound[0], bound[1] * found_scale
        elif node.op_type == "Where" and found_scale > 0:
            value, mask = _mask_of_where(node, found_scale, after)
            masks = [*masks, mask]
        else:
            raise g.Skipped(f"{node.op_type} between the matmul and the softmax")


def _less_its_maximum(node: ir.Node) -> bool:
    """Whether a node subtracts the maximum of each row, as LayoutLMv3 does, and the softmax again."""
    scores, column = node.inputs[0], node.inputs[-1]
    found = g.chain(column, "Unsqueeze", "ReduceMax") or g.chain(column, "ReduceMax")
    if node.op_type != "Sub" or not found or found[-1].inputs[0] is not scores:
        return False
    last = g.rank(scores) - 1
    return g.ints(found[-1], "axes", 1) in ([-1], [last]) and (g.dims(column) or [])[last:] == [1]


def _leads_to_matmul(value: ir.Value | None) -> bool:
    """Whether a value is a MatMul of two tensors that are not constant, perhaps scaled or masked."""
    for _ in range(6):
        node = value.producer() if value is not None else None
        if node is None:
            return False
        if node.op_type == "MatMul":
            return g.rank(node.outputs[0]) >= 3 and not any(map(g.is_constant, node.inputs))
        if (factor := _factor(node)) is not None:
            value = factor[0]
        elif node.op_type == "Tanh":
            value = node.inputs[0]
        elif (product := _of_heads(node)) is not None:
            value = product[0]
        elif node.op_type == "Add":
            return any(_leads_to_matmul(_unzeroed(node, each)) for each in node.inputs)
        elif node.op_type == "Where":
            value = node.inputs[2] if g.scalar(node.inputs[1]) is not None else node.inputs[1]
        else:
            return False
    return False


def _of_heads(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Returns the scores and the tensor [..., 1, 1] of their product, as in SwinV2's cosine attention."""
    for scores, factor in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
        is_whole = g.same_dims(g.dims(scores), g.dims(node.outputs[0]))
        if is_whole and (g.dims(factor) or [])[-2:] == [1, 1] and g.rank(scores) > 2:
            assert scores is not None and factor is not None
            return scores, factor
    return None


def _grouped(total: ir.Value | None, scores: ir.Value | None) -> list[ir.Value]:
    """Returns scores before a Reshape, and what is added behind it, if another Reshape goes back: Swin adds a
    mask for each window of an image so, and ViTDet the positions of rows and columns."""
    node, shape = g.producer(total, "Reshape", "Add"), g.dims(total)
    if node is None or (source := node.inputs[0]) is None:
        return []
    if node.op_type == "Reshape":
        ends = [(g.dims(each) or [None])[1:] for each in (source, scores)]
        return [source] if g.same_dims(*ends) else []
    for each, mask in (node.inputs, node.inputs[::-1]):
        fits = g.same_dims(shape, g.dims(each)) and g.rank(mask) == g.rank(total)
        if mask is not None and fits and (found := _grouped(each, scores)):
            return [*found, mask]
    return []


def _flat(masks: list[ir.Value], grouped: list[g.Dim], matmul: ir.Node, before: ir.Node) -> list[ir.Value]:
    """Returns masks of grouped scores as one of the scores' own rank. `masks_of` inserts no nodes."""
    shape = g.dims(matmul.outputs[0]) or []
    wide = [mask for mask in masks if g.rank(mask) > len(shape)]
    if not wide or before.op_type == "Softmax":
        return masks
    total = reduce(lambda a, b: g.add(before, "Add", [a, b]), wide)
    is_whole = (wanted := g.dims(total) or []) == grouped  # else one for each window of an image
    inner = shape[1:] if is_whole else wanted[2:]
    known = [size for size in inner if isinstance(size, int)]
    if known != inner or not (is_whole or [*wanted[:2], *shape[1:]] == [1, *grouped[1:]]):
        raise g.Skipped("a mask of grouped scores that broadcasts")
    if not is_whole:
        rows, count = (g.length(before, *each) for each in ((matmul.inputs[0], 0), (total, 1)))
        sizes = [g.add(before, "Div", [rows, count]), count, g.int_constant(before, known)]
        whole = g.add(before, "Concat", sizes, {"axis": 0}, shape=[len(grouped)])
        total = g.add(before, "Expand", [total, whole], shape=[None, *grouped[1:2], *known])
    left = [mask for mask in masks if mask not in wide]
    return [*left, g.reshape(before, total, [-1, *known], [shape[0], *known])]


def _unzeroed(node: ir.Node, term: ir.Value | None) -> ir.Value | None:
    """Returns the scores of scores * kept + number * (1 - kept), as OpenAI GPT and the first GPT-2 hide with
    buffers of 0 and 1, of which the first term is given; others as they are. The number hides alone."""
    product, hides = g.producer(term, "Mul"), g.producer(g.other_input(node, term), "Mul")
    factors, sign = hides.inputs if hides is not None else (), 1 if node.op_type == "Add" else -1
    is_low = any(sign * (g.scalar(value) or 0) <= -1e4 for value in factors)
    inverse = next((found for value in factors if (found := g.producer(value, "Sub"))), None)
    if product is None or inverse is None or g.scalar(inverse.inputs[0]) != 1 or not is_low:
        return term
    kept = buffer = inverse.inputs[1]
    while (part := g.producer(buffer, "Slice")) is not None:
        buffer = part.inputs[0]
    tensor = g.tensor(buffer)
    if tensor is None or not any(value is kept for value in product.inputs):
        return term
    is_binary = all(((each == 0) | (each == 1)).all() for each in weights.strips(tensor))
    return g.other_input(product, kept) if is_binary else term


def _scaled(mask: ir.Value, factor: float, before: ir.Node) -> ir.Value:
    """Returns a mask times what the scores are multiplied by after it. `masks_of` inserts no nodes."""
    if factor == 1.0 or before.op_type == "Softmax":
        return mask
    scaled = g.add(before, "Mul", [mask, g.scalar_constant(before, factor, mask)])
    if factor > 0:
        scaled.meta[KNOWN] = known_of(mask)
    return scaled


def _bound(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Returns the scores and the number of Max(scores, number), which only hidden scores are below."""
    for number, scores in zip(map(g.scalar, node.inputs), node.inputs[::-1], strict=True):
        if number is not None and -inf < number <= _HIDDEN and len(node.inputs) == 2 and scores is not None:
            return scores, number
    return None


def bounded(mask: ir.Value, floor: float, before: ir.Node) -> ir.Value:
    """Returns a mask whose numbers are not below one, if there is one. `masks_of` inserts no nodes."""
    if floor == -inf or before.op_type == "Softmax":
        return mask
    bounded = g.add(before, "Max", [mask, g.scalar_constant(before, floor, mask)], shape=g.dims(mask))
    bounded.meta[KNOWN] = replace(known_of(mask), is_finite=True)
    return bounded


def _mask_of_where(node: ir.Node, scale: float, before: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Returns the scores and the mask to add of Where(hidden, -inf, scores) or Where(shown, scores, -inf);
    `scale`: a number that the result is multiplied by."""
    hidden, a, b = node.inputs
    number = g.scalar(a) if g.scalar(a) is not None else g.scalar(b)
    scores = b if g.scalar(a) is not None else a
    if hidden is None or scores is None or number is None or number * scale > _HIDDEN:
        raise g.Skipped("Where replaces scores with a number that does not hide them")
    # The sum of a score and the lowest number is that number, as Where returns one number for all scores.
    on_true, lowest = scores is b, number if np.isneginf(number) else LOWEST
    if before.op_type == "Softmax":  # `masks_of` inserts no nodes
        hidden.meta.setdefault(HIDES, (on_true, lowest))
        return scores, hidden
    constants = [g.scalar_constant(before, each, scores) for each in (0.0, lowest)]
    mask = g.add(before, "Where", [hidden, *(constants[::-1] if on_true else constants)])
    if hidden.meta.get(HIDES) == (on_true, lowest):
        mask.meta[KNOWN] = known_of(hidden)
    return scores, mask


def _factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Returns the tensor and the number of x * number or x / number."""
    if node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    if b is not None and a is not None and (number := g.scalar(b)) is not None:
        return a, number if node.op_type == "Mul" else 1 / number
    if node.op_type == "Mul" and b is not None and (number := g.scalar(a)) is not None:
        return b, number
    return None


def unscaled(value: ir.Value | None) -> tuple[ir.Value, float]:
    """Returns a tensor before it was multiplied by numbers, and the product of these."""
    assert value is not None
    scale = 1.0
    while (node := g.producer(value, "Mul", "Div")) is not None and (found := _factor(node)) is not None:
        value, scale = found[0], scale * found[1]
    return value, scale


def untransposed(matmul: ir.Node) -> tuple[ir.Value, float]:
    """Returns k [B, H, T, D] of q @ (scale * k^T), and the scale."""
    value, scale = unscaled(matmul.inputs[1])
    transpose, shape = g.producer(value, "Transpose"), g.dims(value) or []
    if transpose is not None and transpose.inputs[0] is not None and len(shape) == 4:
        *outer, columns, rows = g.attribute(transpose, "perm", ())
        if (order := [*outer, rows, columns]) == [0, 1, 2, 3]:
            k, on_k = unscaled(transpose.inputs[0])
            return k, scale * on_k
        return g.transpose(transpose, transpose.inputs[0], order), scale
    # torch's dynamo exporter transposes [B*H, T, D], between two reshapes.
    nodes = g.chain(value, "Reshape", "Transpose")
    perm = list(g.attribute(nodes[1], "perm", ())) if nodes and len(shape) == 4 else []
    if perm not in ([0, 2, 1], [1, 2, 0]):  # a convolution has computed [B, H, D, T]
        if len(shape) != 4:
            raise g.Skipped("k is not transposed")
        return g.transpose(matmul, value, [0, 1, 3, 2]), scale
    middle, rows = nodes[1], nodes[1].inputs[0]
    assert rows is not None
    wanted, inner = [shape[0], shape[1], shape[3], shape[2]], g.producer(rows, "Reshape")
    if perm == [1, 2, 0]:  # the optimizer has joined it with a transpose before it
        rows = g.transpose(middle, rows, SWAP_ROWS)
    elif inner is not None and g.same_dims(g.dims(inner.inputs[0]), wanted):
        k, on_k = unscaled(inner.inputs[0])
        return k, scale * on_k
    sizes = [each if isinstance(each, int) else -1 for each in wanted]
    if sizes.count(-1) < 2:
        return g.reshape(middle, rows, sizes, wanted), scale
    raise g.Skipped("k is not transposed")
