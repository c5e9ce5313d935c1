"""Fuses a norm with what it reads: a sum, or the lookup of an embedding.

Matches: CustomLayerNorm and CustomRmsNorm with a weight, over the last dimension. Before it, the sum of two
tensors of one shape; or, before a layer norm, a lookup of ids [B, S] that are an input of the model, and sums
with rows [1 or B, S, C].
Writes: CustomAddLayerNorm, CustomAddRmsNorm, CustomEmbedLayerNorm. They return the sum, too, and round it as
an Add does: no bit changes, with one pass over memory less.
Leaves alone: sums that broadcast, such as that with a bias, or of shapes that are not known.
"""

from collections.abc import Sequence
from functools import reduce

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .rewrite import LABELS, Rewrite, label


class _NormInput(Rewrite[list[ir.Value]]):
    """Finds what a norm and the sum before it are computed from."""

    def fuse(self, norm: ir.Node, op: str, inputs: Sequence[ir.Value | None]) -> None:
        """Puts one node of `op` in the place of a norm and the sum that it reads."""
        total = norm.inputs[0]
        assert total is not None
        name, old = self.context.type_of(op), [norm.outputs[0], total]
        record = self.context.records[op]
        kept = {name: each.value for name, each in norm.attributes.items() if record.attribute(name)}
        new = g.add_like(norm, name, [*inputs, *norm.inputs[1:]], kept, old, domain=DOMAIN)
        label(g.maker(new[0]), op, *_labels_of(total))
        normal = new[0]
        if g.FP32 in g.maker(total).meta and g.FP32 not in norm.meta:  # the readers of the norm have 16 bits
            normal = g.add(norm, "Sum", [normal], shape=g.dims(normal))
        self.replace(old[0], normal)
        self.replace(old[1], new[1])


class AddNorm(_NormInput, key="add_norm", ops=("layer_norm", "rms_norm")):
    """Finds two terms of one shape."""

    def match(self, node: ir.Node) -> list[ir.Value] | str:
        total = node.inputs[0]
        addition = g.producer(total, "Add") or g.producer(total, "CustomAdd", domain=DOMAIN)
        if addition is None:
            return "it norms no sum"
        if not _is_fusible(node):
            return "it has no weight, or is not over the last dimension"
        if not g.has_precision_of(addition, node):
            return "the sum is computed in 16 bits, and the norm in fp32"
        terms = [each for each in addition.inputs if each is not None]
        if len(terms) != 2 or not all(g.same_dims(g.dims(each), g.dims(total)) for each in terms):
            return "the terms of the sum are not known to have its shape"
        return terms

    def apply(self, node: ir.Node, match: list[ir.Value]) -> None:
        self.fuse(node, "add_layer_norm" if node.op_type == "CustomLayerNorm" else "add_rms_norm", match)


class EmbedNorm(_NormInput, key="embed_norm", ops=("layer_norm",)):
    """Finds a lookup, and the terms that are added to it."""

    def match(self, node: ir.Node) -> list[ir.Value] | str:
        total, shape = node.inputs[0], g.dims(node.inputs[0]) or []
        if total is None or len(shape) != 3 or not _is_fusible(node):
            return "it norms no [B, S, C], has no weight, or is not over the last dimension"
        terms = _terms(total)
        lookup = next((term for term in terms if _is_lookup(term, shape)), None)
        rows = sorted((term for term in terms if term is not lookup), key=g.rank)
        if lookup is None or not rows:
            return "it norms no sum with a lookup of ids [B, S] that nothing else reads"
        found = reduce(g.broadcast_dims, map(g.dims, rows))
        if found != shape[1:] and (found not in (shape, [1, *shape[1:]]) or None in shape):
            return "what is added to the lookup is not known to be [1 or B, S, C]"
        return [lookup, *rows]

    def apply(self, node: ir.Node, match: list[ir.Value]) -> None:
        lookup, rest, *others = match
        table, ids = g.maker(lookup).inputs
        for term in others:
            rest = g.add(node, "Add", [rest, term])
        if g.rank(rest) == 2:
            whole = [1, *(g.dims(rest) or [])]
            rest = g.add(node, "Unsqueeze", [rest, g.int_constant(node, [0])], shape=whole)
        self.fuse(node, "embed_layer_norm", [table, ids, rest])


def _labels_of(total: ir.Value) -> list[str]:
    """Returns what reports say of the nodes of a sum."""
    node = g.producer(total, "Add")
    if node is None:
        return []
    terms = [each for each in node.inputs if each is not None and g.only_user(each) is node]
    return [*node.meta.get(LABELS, ()), *(name for each in terms for name in _labels_of(each))]


def _is_fusible(norm: ir.Node) -> bool:
    """Whether a norm has a weight and is over the last dimension."""
    has_weight = len(norm.inputs) > 1 and norm.inputs[1] is not None
    return has_weight and g.attribute(norm, "axis", -1) in (-1, g.rank(norm.inputs[0]) - 1)


def _terms(value: ir.Value) -> list[ir.Value]:
    """Returns the terms of a sum, of which only the whole may have several readers."""
    node = g.producer(value, "Add")
    if node is None:
        return [value]
    return [
        term
        for each in node.inputs
        if each is not None
        for term in (_terms(each) if g.only_user(each) is node else [each])
    ]


def _is_lookup(value: ir.Value, shape: list[g.Dim]) -> bool:
    """Whether a value is a lookup of ids [B, S] in a table, for one reader."""
    gather = g.producer(value, "Gather")
    if gather is None or g.attribute(gather, "axis", 0) != 0 or g.rank(gather.inputs[0]) != 2:
        return False
    ids = gather.inputs[1]
    is_alone = g.only_user(value) is not None  # else the lookup would be computed twice
    are_ids = ids is not None and ids.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return is_alone and are_ids and g.same_dims(g.dims(ids), shape[:2])
