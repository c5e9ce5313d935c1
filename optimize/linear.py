"""Fuses matmuls with a constant weight.

Matches: MatMul and Gemm with a constant weight [K, N] or its transpose, a bias [N] that is added, and an
activation after it (relu, gelu, gelu_tanh, silu).
Writes: CustomLinear with each weight as [N, K], unless other nodes, such as a Loop, read the weight, too:
then the model would hold it twice.
Leaves alone: weights of other ranks, dimensions of size 0, Gemm with alpha or beta other than 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop.model import weights

from . import graph as g
from .rewrite import Rewrite

_ACTIVATIONS = ("relu", "gelu", "silu")

LAYOUT = "nk"
IsWeight = Callable[[ir.Value | None], bool]
Rows = Sequence[ir.TensorProtocol | None]
"""What has a row for each output column of a matmul: the weight [N, K], or its blocks, scales and zero
points, and the bias [N]; None for what it lacks."""


@dataclass(frozen=True)
class Linear:
    """A matmul with a constant weight, x @ weight + bias."""

    node: ir.Node
    weight: ir.Value  # a constant [K, N], or [N, K] if `layout` is "nk"
    bias: ir.Value | None  # a constant with N elements
    layout: str
    output: ir.Value  # the result with the bias

    @property
    def x(self) -> ir.Value:
        """Read late: what computes it may have been replaced."""
        x = self.node.inputs[0]
        assert x is not None
        return x

    @property
    def width(self) -> int:
        """N."""
        width = (g.dims(self.weight) or [0, 0])[1 if self.layout == "kn" else 0]
        assert isinstance(width, int)
        return width

    def rows(self, start: int, stop: int) -> Rows:
        """Returns the weight and the bias of the columns between two indices."""
        weight, bias = g.tensor(self.weight), g.tensor(self.bias)
        assert weight is not None
        weight = weights.transpose(weight) if self.layout == "kn" else weight
        row = None if bias is None else weights.part(weights.reshape(bias, [self.width]), 0, start, stop)
        return weights.part(weight, 0, start, stop), row


def match_linear(node: ir.Node, is_weight: IsWeight = g.is_constant) -> Linear | str:
    """Returns a node's matmul and bias, or why it is none; raises Skipped for what CustomLinear lacks.
    `is_weight`: whether a value is a weight; by default a constant."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return "it is no MatMul or Gemm"
    x, weight, *rest = node.inputs
    is_nk = g.attribute(node, "transB", 0)
    if (transpose := g.producer(weight, "Transpose")) is not None and is_weight(transpose.inputs[0]):
        if list(g.attribute(transpose, "perm", [1, 0])) != [1, 0]:
            return "its weight is transposed, and not as a matrix is"
        weight, is_nk = transpose.inputs[0], not is_nk
    if x is None or weight is None or not is_weight(weight) or g.is_constant(x):
        return "its second input, and only that, must be a constant"
    if weight.dtype is None or not weight.dtype.is_floating_point():
        return "its weight is not of floats"
    shape = g.dims(weight) or []
    if len(shape) != 2:
        raise g.Skipped(f"a weight of {len(shape)} dimensions")
    if 0 in shape:
        raise g.Skipped("a dimension of size 0")
    rank = g.rank(x)
    if rank < 2:
        raise g.Skipped("an input of unknown rank or with fewer than two dimensions")
    factors = {g.attribute(node, name, 1.0) for name in ("alpha", "beta")[: 1 + bool(rest)]}
    if g.attribute(node, "transA", 0) or factors != {1.0}:
        raise g.Skipped("transA is set, or alpha or beta is not 1")
    layout = "nk" if is_nk else "kn"
    width = shape[0 if is_nk else 1]
    assert isinstance(width, int)
    bias, output = rest[0] if rest else None, node.outputs[0]
    if bias is not None:
        if not _is_bias(bias, width, rank):
            raise g.Skipped("it adds a matrix")
    elif (addition := g.only_user(output)) is not None and addition.op_type == "Add":
        other = g.other_input(addition, output)
        if not addition.domain and _is_bias(other, width, rank) and g.has_precision_of(node, addition):
            bias, output = other, addition.outputs[0]
    return Linear(node, weight, bias, layout, output)


def supported_linear(node: ir.Node, is_weight: IsWeight = g.is_constant) -> Linear | None:
    """Returns the matmul that a node computes, or None if CustomLinear does not compute it."""
    try:
        found = match_linear(node, is_weight)
    except g.Skipped:
        return None
    return found if isinstance(found, Linear) else None


def matmul_of(value: ir.Value, match: Callable[[ir.Node], Any], *op_types: str, domain: str = "") -> Any:
    """Returns the matmul whose output, with its bias, is a value, or None; `match` makes it of a node of
    these types."""
    add = g.producer(value, "Add")
    nodes = [g.producer(each, *op_types, domain=domain) for each in (add.inputs if add else [value])]
    try:
        found = next((match(each) for each in nodes if each is not None), None)
    except g.Skipped:
        return None
    return None if found is None or isinstance(found, str) or found.output is not value else found


def plain_matmul(
    before: ir.Node, x: ir.Value, weight: ir.Value, bias: ir.Value | None, layout: str, shape: g.Dims
) -> ir.Value:
    """Inserts MatMul and, for a bias [N], Add."""
    if layout == LAYOUT:
        weight = g.transpose(before, weight, [1, 0])
    result = g.add(before, "MatMul", [x, weight], shape=shape)
    return result if bias is None else g.add(before, "Add", [result, bias], shape=shape)


def _is_bias(value: ir.Value | None, width: int, rank: int) -> bool:
    """Whether a constant is one row that is added to each row of a matmul of this rank."""
    shape = g.dims(value)
    return (
        shape is not None
        and len(shape) <= rank
        and shape[-1:] == [width]
        and all(dim == 1 for dim in shape[:-1])
        and g.is_constant(value)
    )


def bias_vector(context: g.RewriteContext, value: ir.Value | None) -> ir.Value | None:
    """Returns a constant bias as [N]."""
    if value is None or len(value.shape or ()) == 1:
        return value
    tensor = g.tensor(value)
    assert tensor is not None
    return g.initializer(context.graph, weights.reshape(tensor, [tensor.size]), f"{value.name}_flat")


def activation_of(context: g.RewriteContext, node: ir.Node | None) -> str:
    """Returns the activation that a node computes: relu, gelu, gelu_tanh, silu, or "" for other nodes."""
    if node is None:
        return ""
    own = {record.node_type: name for name, record in context.records.items() if name in _ACTIVATIONS}
    plain = {"Relu": "relu", "Gelu": "gelu"}
    name = own.get((node.domain, node.op_type)) or ("" if node.domain else plain.get(node.op_type, ""))
    return f"{name}_tanh" if name and g.attribute(node, "approximate", "none") == "tanh" else name


class Linears(Rewrite[Linear], key="linear", op_types=("MatMul", "Gemm"), device="cuda", at_once=True):
    """Puts one node in the place of a matmul, its bias and its activation."""

    def match(self, node: ir.Node) -> Linear | str:
        return match_linear(node)

    def weight_of(self, match: Linear) -> tuple[ir.Value, str]:
        """Returns the weight that the new node reads, and its layout."""
        return oriented_weight(self.context, match)

    def apply(self, node: ir.Node, match: Linear) -> None:
        output, activation, user = match.output, "none", g.only_user(match.output)
        if user is not None and g.has_precision_of(g.maker(output), user):
            activation = activation_of(self.context, user) or "none"
        output = user.outputs[0] if user is not None and activation != "none" else output
        bias = bias_vector(self.context, match.bias)
        # A model holds one function body for all nodes of an op: either all of them have a bias or none.
        if bias is None and any(each.bias is not None for _, each in self.matches):
            assert match.weight.dtype is not None
            zeros = np.zeros(match.width, match.weight.dtype.numpy())
            bias = g.initializer(self.context.graph, zeros, f"zeros_{match.width}")
        weight, layout = self.weight_of(match)
        shape = g.dims(output) or [*(g.dims(match.x) or [])[:-1], match.width]
        attributes = {"activation": activation, "layout": layout}
        new = self.context.add_op(g.maker(output), "linear", [match.x, weight, bias], shape, **attributes)
        parts = [self.name] + ["bias"] * (match.bias is not None) + [activation] * (activation != "none")
        self.replace(output, new, "+".join(parts))


def is_replaceable(matmul: Linear, graph: ir.Graph, by_transpose: bool = False) -> bool:
    """Whether a weight goes where matmuls get another one: only matmuls of a layout in a graph read it.
    `by_transpose`: the other one is its transpose, which may also take the place of Transpose nodes."""
    weight, found = matmul.weight, set[str]()
    for user in weight.consumers():
        is_transpose = (user.domain, user.op_type, user.graph) == ("", "Transpose", graph)
        for reader in user.outputs[0].consumers() if is_transpose else [user]:
            linear = supported_linear(reader) if reader.graph is graph else None
            if linear is not None and linear.weight is weight:
                found.add(linear.layout)
            else:
                found.add("transposed" if is_transpose else "other")
    allowed = {matmul.layout, "transposed"} if by_transpose else {matmul.layout}
    return found <= allowed and not weight.is_graph_output()


def oriented_weight(context: g.RewriteContext, linear: Linear) -> tuple[ir.Value, str]:
    """Returns the weight and its layout: [N, K], if the other one goes."""
    if linear.layout == LAYOUT or not is_replaceable(linear, context.graph, by_transpose=True):
        return linear.weight, linear.layout
    weight = g.tensor(linear.weight)
    assert weight is not None
    turned = g.initializer(context.graph, weights.transpose(weight), f"{linear.weight.name}_nk")
    for user in linear.weight.consumers():  # the table of an embedding that shares the weight
        if user.op_type == "Transpose" and not user.domain and user.graph is context.graph:
            g.replace(user.outputs[0], turned)
    return turned, LAYOUT


def join_rows(
    context: g.RewriteContext, parts: Sequence[Rows], name: str, suffixes: Sequence[str] = ("", "_bias")
) -> list[ir.Value | None]:
    """Returns constants with the rows of several matmuls, one after the other; a bias that only others have
    is 0. `suffixes`: of the name of each."""
    made, counts = list[ir.Value | None](), [weights.sizes(each)[0] for each, *_ in parts if each is not None]
    for suffix, *column in zip(suffixes, *parts, strict=False):
        kinds = [each.dtype.numpy() for each in column if each is not None]
        zeros = [ir.tensor(np.zeros(count, kinds[0])) for count in counts if kinds]
        rows = [zero if each is None else each for each, zero in zip(column, zeros, strict=False)]
        made.append(g.initializer(context.graph, weights.join(rows), name + suffix) if kinds else None)
    return made
