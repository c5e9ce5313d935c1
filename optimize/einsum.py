"""Writes the Einsum of two tensors as a matmul, which other rewrites match.

Matches: equations whose letters are in both tensors, or in one of them and the result, such as
bqhd,bkhd->bhqk for scores and bsw,whd->bshd for heads.
Writes: MatMul, with transposes and reshapes for other orders and for several letters in place of one.
Leaves alone: other sums, outer products, ellipses, repeated letters.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .rewrite import Rewrite


@dataclass(frozen=True)
class _Product:
    """The matmul a[outer, batch, row, sums] @ b[batch, sums, columns]: letters of axes."""

    a: ir.Value
    b: ir.Value
    of_a: str
    of_b: str
    batch: str
    rows: str
    sums: str
    columns: str
    result: str


class Einsum(Rewrite[_Product], key="einsum", op_types=("Einsum",)):
    """Finds what each letter is."""

    def match(self, node: ir.Node) -> _Product | str:
        given, _, result = str(g.attribute(node, "equation", "")).replace(" ", "").partition("->")
        terms, (a, *others) = given.split(","), node.inputs
        if len(terms) != 2 or [*map(g.rank, node.inputs)] != [*map(len, terms)]:
            return "it is no equation of two tensors of known ranks"
        if any(len({*each}) < len(each) for each in (*terms, result)):  # an ellipsis has a dot again, too
            return "an axis has a letter again, or none"
        (of_a, of_b), [b] = terms, others
        assert a is not None and b is not None
        # A weight comes second; of other tensors the one with the last axis of the result, which stays last.
        if g.is_constant(a) or (not g.is_constant(b) and result[-1:] not in of_b):
            a, b, of_a, of_b = b, a, of_b, of_a
        batch, rows, columns = (
            "".join(each for each in result if (each in of_a, each in of_b) == where)
            for where in ((True, True), (True, False), (False, True))
        )
        rows = "".join(each for each in of_a if each in rows)  # transposed behind the matmul, not before
        sums = "".join(each for each in of_b if each in of_a and each not in result)
        wanted = [batch + rows + sums, batch + sums + columns, batch + rows + columns]
        if [*map(sorted, (of_a, of_b, result))] != [*map(sorted, wanted)] or not (rows and sums and columns):
            return "a letter is of neither both tensors, nor one and the result"
        sizes = dict(zip(of_b, g.dims(b) or (), strict=True))
        unknown = {letter for letter, size in sizes.items() if not isinstance(size, int)}
        if any(unknown.intersection(some) for some in (sums, columns) if len(some) > 1):
            return "several letters of unknown sizes are one axis of the matmul"
        return _Product(a, b, of_a, of_b, batch, rows, sums, columns, result)

    def apply(self, node: ir.Node, match: _Product) -> None:
        """Brings both tensors into the order of a matmul, and its result into that of the equation."""
        sizes = dict(zip(match.of_a, g.dims(match.a) or (), strict=True))
        sizes |= dict(zip(match.of_b, g.dims(match.b) or (), strict=True))
        outer = match.rows[:-1] + match.batch + match.rows[-1]  # all but the last are batches of MatMul

        def arranged(value: ir.Value, letters: str, *axes: str) -> ir.Value:
            """Returns a tensor of these axes; what is one of several letters has known sizes."""
            order = [letters.index(each) for each in "".join(axes)]
            known = [[size for each in some if isinstance(size := sizes[each], int)] for some in axes]
            target = [math.prod(some) if some else 0 for some in known]
            if (tensor := g.tensor(value)) is not None:
                tensor = weights.reshape(weights.transpose(tensor, order), target)
                return g.initializer(self.context.graph, tensor, f"{value.name}_matrix")
            value = g.transpose(node, value, order) if order != sorted(order) else value
            shape = [sizes.get(each, size) for each, size in zip(axes, target, strict=True)]
            return value if len(order) == len(axes) else g.reshape(node, value, target, shape)

        a = arranged(match.a, match.of_a, *outer, match.sums)
        b = arranged(match.b, match.of_b, *match.batch, match.sums, match.columns)
        letters = outer + match.columns
        result = g.add(node, "MatMul", [a, b], shape=[*(g.dims(a) or [])[:-1], *(g.dims(b) or [])[-1:]])
        last, user = node.outputs[0], g.only_user(node.outputs[0])
        if len(match.columns) > 1:
            shape = [sizes[each] for each in letters]
            if user is not None and (user.domain, user.op_type) == ("", "Add") and letters == match.result:
                tensor = g.tensor(g.other_input(user, last)) if g.has_precision_of(node, user) else None
                if tensor is not None and [*weights.sizes(tensor)] == shape[-len(match.columns) :]:
                    row = weights.reshape(tensor, [tensor.size])
                    bias = g.initializer(self.context.graph, row, f"{last.name}_bias")
                    result, last = g.add(node, "Add", [result, bias]), user.outputs[0]
            target = [size if isinstance(size, int) else 0 for size in shape]
            result = g.reshape(node, result, target, shape)
        if letters != match.result:
            result = g.transpose(node, result, [letters.index(each) for each in match.result])
        self.replace(last, result)
