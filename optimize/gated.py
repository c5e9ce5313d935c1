"""Fuses gated matmuls: activation(gate) * up.

Matches: a SiLU or GELU times a tensor of its shape. Gate and up may be two matmuls of one x with
constant weights, the halves of one such matmul, or any tensors. Halves may be parts of the last dimension,
or of [..., 2, N] that it was reshaped to.
Writes: CustomLinearSwiglu, whose weight holds gate and up; for other tensors CustomSwiglu or
CustomSwigluPacked (SiLU only).
Leaves alone: GELU gates of other tensors, because no op computes these.
"""

import onnx_ir as ir

from . import graph as g
from . import linear
from .linear import LAYOUT, Linear
from .rewrite import Rewrite

_Part = tuple[Linear, int, int]  # a matmul, and which of its columns
_Match = tuple[ir.Value, ir.Value, str, list[_Part]]


class Gates(Rewrite[_Match], key="gated", op_types=("Mul",)):
    """Finds gate, up, the activation, and the matmuls of gate and up, or the one that has both."""

    def match(self, node: ir.Node) -> _Match | g.Skipped | str:
        found = gate_of(self.context, node)
        if found is None or not g.same_dims(*map(g.dims, found[:2])):
            return "it does not multiply a GELU or SiLU that nothing else reads by a tensor of its shape"
        matmuls = self._matmuls(*found[:2]) if self.context.device == "cuda" else []
        if not matmuls and found[2] != "silu":
            return g.Skipped("no matmuls with constant weights", f"{found[2]} gate")
        return *found, matmuls

    def apply(self, node: ir.Node, match: _Match) -> None:
        (gate, up, activation, matmuls), result = match, node.outputs[0]
        if matmuls:
            (whole, *_), *others = matmuls
            if others:
                rows, layout = [matmul.rows(*columns) for matmul, *columns in matmuls], LAYOUT
                weight, bias = linear.join_rows(self.context, rows, f"{whole.weight.name}_gate_up")
            else:
                weight, layout = linear.oriented_weight(self.context, whole)
                bias = linear.bias_vector(self.context, whole.bias)
            inputs, attributes = [whole.x, weight, bias], {"activation": activation, "layout": layout}
            new = self.context.add_op(node, "linear_swiglu", inputs, g.dims(up), **attributes)
            self.replace(result, new, f"linear+gate ({activation})")
        elif (parts := halves(gate, up)) is not None and parts[1] == 0:
            new = self.context.add_op(node, "swiglu_packed", [parts[0]], g.dims(up))
            self.replace(result, new, "swiglu (packed)")
        else:
            self.replace(result, self.context.add_op(node, "swiglu", [up, gate]), "swiglu")

    def _matmuls(self, gate: ir.Value, up: ir.Value) -> list[_Part]:
        """Returns the parts that are gate and up, one that is both, or nothing."""
        if (parts := halves(gate, up)) is not None:
            whole = _linear_of(parts[0])
            if whole is None or whole.width % 2:
                return []
            if parts[1] == 0:
                return [(whole, 0, whole.width)]
            gate_up = [(whole, whole.width // 2, whole.width), (whole, 0, whole.width // 2)]
            return gate_up if linear.is_replaceable(whole, self.context.graph) else []
        first, second = _linear_of(gate), _linear_of(up)
        if first is None or second is None or first.x is not second.x or first.width != second.width:
            return []
        is_alone = all(linear.is_replaceable(each, self.context.graph) for each in (first, second))
        return [(each, 0, each.width) for each in (first, second)] if is_alone else []


def gate_of(context: g.RewriteContext, node: ir.Node) -> tuple[ir.Value, ir.Value, str] | None:
    """Returns gate, up and the activation of a Mul that is activation(gate) * up."""
    for activated in node.inputs:
        maker = activated.producer() if activated is not None else None
        if maker is None or activated is None or g.only_user(activated) is not node:
            continue
        name = linear.activation_of(context, maker)
        if name in ("", "relu"):
            continue
        up, gate = g.other_input(node, activated), maker.inputs[0]
        if up is not None and gate is not None and up is not activated:
            return gate, up, name
    return None


def _linear_of(value: ir.Value) -> Linear | None:
    """Returns the matmul with a constant weight whose output, with its bias, is the value."""
    return linear.matmul_of(value, linear.match_linear, "MatMul", "Gemm")


def halves(gate: ir.Value, up: ir.Value) -> tuple[ir.Value, int] | None:
    """Returns the tensor of which gate and up are the halves, and which one gate is: 0 or 1."""
    for index, order in enumerate(((gate, up), (up, gate))):
        if (whole := g.whole_of(order, -1)) is not None:
            return whole, index
    first, second = _half_of_pairs(gate), _half_of_pairs(up)
    if first is None or second is None or first[0] is not second[0] or first[1] == second[1]:
        return None
    return first


def _half_of_pairs(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Returns x and the index of x.unflatten(-1, (2, N))[..., index, :]."""
    element = g.element_of(value, -2)
    reshape = g.producer(element[0], "Reshape") if element is not None else None
    if element is None or reshape is None:
        return None
    source, (*outer, count, width) = reshape.inputs[0], g.dims(element[0]) or [None, None]
    if source is None or count != 2 or not isinstance(width, int):
        return None
    is_whole = g.same_dims(g.dims(source), [*outer, 2 * width])
    return (source, element[1] % 2) if is_whole else None
