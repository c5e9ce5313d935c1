"""Fuses gated products: activation(gate) * up.

Matches: a SiLU or GELU times a tensor of its shape. Gate and up may be two matrix products of one x with
constant weights, the halves of one such product, or any tensors. Halves may be parts of the last dimension,
or of [..., 2, N] that it was reshaped to.
Writes: CustomLinearSwiglu, whose weight holds gate and up; for other tensors CustomSwiglu or
CustomSwigluPacked (SiLU only).
Leaves alone: GELU gates of other tensors, because no op computes these.
"""

import numpy as np
import onnx_ir as ir

from . import graph as g
from .linear import (
    LAYOUT,
    Linear,
    activation_of,
    bias_vector,
    is_replaceable,
    oriented_weight,
    supported_linear,
)


def rewrite(context: g.RewriteContext) -> None:
    for node in context.nodes("Mul"):
        found = gate_of(context, node) if node.graph is not None else None
        if found is None or not g.same_dims(*map(g.dims, found[:2])):
            continue
        gate, up, activation = found
        if context.device == "cuda" and _linear_swiglu(context, node, gate, up, activation):
            context.made[f"linear+gate ({activation})"] += 1
        elif activation != "silu":
            context.left[f"{activation} gate: no products with constant weights"] += 1
        elif (parts := halves(gate, up)) is not None and parts[1] == 0:
            new = context.add_op(node, "swiglu_packed", [parts[0]], g.dims(node.outputs[0]))
            g.replace(node.outputs[0], new)
            context.made["swiglu (packed)"] += 1
        else:
            pair = context.broadcast(node, [up, gate], [[*range(g.rank(up))]] * 2)
            g.replace(node.outputs[0], context.add_op(node, "swiglu", pair))
            context.made["swiglu"] += 1


def gate_of(context: g.RewriteContext, node: ir.Node) -> tuple[ir.Value, ir.Value, str] | None:
    """Returns gate, up and the activation of a Mul that is activation(gate) * up."""
    for activated in node.inputs:
        maker = activated.producer() if activated is not None else None
        if maker is None or activated is None or g.only_user(activated) is not node:
            continue
        name = activation_of(context, maker)
        if name in ("", "relu"):
            continue
        up, gate = g.other_input(node, activated), maker.inputs[0]
        if up is not None and gate is not None and up is not activated:
            return gate, up, name
    return None


def _linear_swiglu(
    context: g.RewriteContext, node: ir.Node, gate: ir.Value, up: ir.Value, activation: str
) -> bool:
    """Writes one product of gate and up, if both are products with constant weights; returns whether."""
    parts = halves(gate, up)
    if parts is not None:
        whole = _linear_of(parts[0])
        if whole is None or whole.width % 2:
            return False
        is_swapped = parts[1] == 1
        if is_swapped and not is_replaceable(whole, context.graph):
            return False
        (weight, layout), bias = oriented_weight(context, whole), bias_vector(context, whole.bias)
        if is_swapped:
            (weight, bias), layout = _concatenated(context, [(whole, 1), (whole, 0)]), LAYOUT
    else:
        whole, second = _linear_of(gate), _linear_of(up)
        if whole is None or second is None or whole.x is not second.x or whole.width != second.width:
            return False
        if not all(is_replaceable(each, context.graph) for each in (whole, second)):
            return False
        (weight, bias), layout = _concatenated(context, [(whole, None), (second, None)]), LAYOUT
    shape = g.dims(node.outputs[0])
    inputs = [whole.x, weight, bias]
    new = context.add_op(node, "linear_swiglu", inputs, shape, activation=activation, layout=layout)
    g.replace(node.outputs[0], new)
    return True


def _linear_of(value: ir.Value) -> Linear | None:
    """Returns the product with a constant weight whose output, with its bias, is the value."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        node = next((matmul for each in node.inputs if (matmul := g.producer(each, "MatMul"))), None)
    found = supported_linear(node) if node is not None else None
    return found if found is not None and found.output is value else None


def _concatenated(
    context: g.RewriteContext, parts: list[tuple[Linear, int | None]]
) -> tuple[ir.Value, ir.Value | None]:
    """Returns gate and up in one weight [2N, K] and one bias.

    Args:
        parts: the product of gate and that of up, and which half of it each is (None for all of it).
    """
    weights, biases = [], []
    for found, half in parts:
        weight, bias = g.constant(found.weight), g.constant(found.bias)
        assert weight is not None
        weight = weight.T if found.layout == "kn" else weight
        weights.append(weight if half is None else np.split(weight, 2)[half])
        row = np.zeros(found.width, weight.dtype) if bias is None else bias.reshape(-1)
        biases.append(row if half is None else np.split(row, 2)[half])
    name = f"{parts[0][0].weight.name}_gate_up"
    bias_value = None
    if any(found.bias is not None for found, _ in parts):
        bias_value = g.initializer(context.graph, np.concatenate(biases), f"{name}_bias")
    return g.initializer(context.graph, np.concatenate(weights), name), bias_value


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
