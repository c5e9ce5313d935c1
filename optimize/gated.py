"""Fuses gated matmuls: activation(gate) * up.

Matches: a SiLU or GELU times a tensor of its shape. Gate and up may be two matmuls of one x with
constant weights, the halves of one such matmul, or any tensors. Halves may be parts of the last dimension,
or of [..., 2, N] that it was reshaped to.
Writes: CustomLinearSwiglu, whose weight holds gate and up; for other tensors CustomSwiglu or
CustomSwigluPacked (SiLU only).
Leaves alone: GELU gates of other tensors, because no op computes these.
"""

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from . import linear
from .linear import LAYOUT, Linear
from .rewrite import Rewrite

_Match = tuple[ir.Value, ir.Value, str, list[tuple[Linear, int | None]]]


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
            (whole, _), *others = matmuls
            if others:
                (weight, bias), layout = _concatenated(self.context, matmuls), LAYOUT
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

    def _matmuls(self, gate: ir.Value, up: ir.Value) -> list[tuple[Linear, int | None]]:
        """Returns what `_concatenated` takes, or one matmul whose halves are gate and up, or nothing."""
        if (parts := halves(gate, up)) is not None:
            whole = _linear_of(parts[0])
            if whole is None or whole.width % 2:
                return []
            if parts[1] == 0:
                return [(whole, None)]
            return [(whole, 1), (whole, 0)] if linear.is_replaceable(whole, self.context.graph) else []
        first, second = _linear_of(gate), _linear_of(up)
        if first is None or second is None or first.x is not second.x or first.width != second.width:
            return []
        is_alone = all(linear.is_replaceable(each, self.context.graph) for each in (first, second))
        return [(first, None), (second, None)] if is_alone else []


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
    node = value.producer()
    if node is not None and node.op_type == "Add":
        node = next((matmul for each in node.inputs if (matmul := g.producer(each, "MatMul"))), None)
    found = linear.supported_linear(node) if node is not None else None
    return found if found is not None and found.output is value else None


def _concatenated(
    context: g.RewriteContext, parts: list[tuple[Linear, int | None]]
) -> tuple[ir.Value, ir.Value | None]:
    """Returns gate and up in one weight [2N, K] and one bias; `parts`: the matmul of each, and which half of
    it each is (None for all of it)."""
    rows, biases = [], []
    for found, half in parts:
        weight, bias = g.tensor(found.weight), g.tensor(found.bias)
        assert weight is not None
        size = found.width if half is None else found.width // 2
        start, stop = size * (half or 0), size * (half or 0) + size
        weight = weights.transpose(weight) if found.layout == "kn" else weight
        rows.append(weights.part(weight, 0, start, stop))
        row = ir.tensor(np.zeros(found.width, weight.dtype.numpy())) if bias is None else bias
        biases.append(weights.part(weights.reshape(row, [found.width]), 0, start, stop))
    name = f"{parts[0][0].weight.name}_gate_up"
    bias_value = None
    if any(found.bias is not None for found, _ in parts):
        bias_value = g.initializer(context.graph, weights.join(biases), f"{name}_bias")
    return g.initializer(context.graph, weights.join(rows), name), bias_value


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
