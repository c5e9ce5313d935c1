"""Tells which segments differ in nothing but their weights: those are of one kind.

Weights of matmuls and convolutions, packed ones with their scales and zero points, and gains of norms count
by dtype, shape and the operations that make them. Biases also count by their largest magnitude: a rewrite
that is wrong for some of them only, for large inputs, is wrong by how large they are. All else counts by
value: integers, scalars, tables, attributes. Names never count.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from twinop.model import weights
from twinop.record.op_spec import DOMAIN

from . import graph as g

_BY_INPUTS: Mapping[tuple[str, Sequence[int]], Sequence[str]] = {
    ("", (0, 1)): ("Gemm", "MatMul"),
    ("", (1,)): (
        "BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization", "InstanceNormalization",
        "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization",
    ),
    ("", (1, 2)): ("GRU", "LSTM", "RNN"),
    (g.MICROSOFT, (0, 1)): ("FusedMatMul",),
    (g.MICROSOFT, (1,)): ("Attention", "GroupNorm"),
    (g.MICROSOFT, (1, 2)): ("MatMulBnb4",),
    (g.MICROSOFT, (1, 2, 3)): ("MatMulNBits",),
    (g.MICROSOFT, (2,)): ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    (g.MICROSOFT, (2, 3, 5, 6, 8, 9, 11, 12, 13)): ("QMoE",),
    (g.MICROSOFT, (2, 4, 6)): ("MoE",),
    (g.MICROSOFT, (5,)): ("EmbedLayerNormalization",),
    (g.MICROSOFT, (14, 15)): ("GroupQueryAttention",),
    (DOMAIN, (1,)): ("CustomLayerNorm", "CustomLinear", "CustomLinearSwiglu", "CustomRmsNorm"),
    (DOMAIN, (1, 2, 3)): ("CustomLinearQ", "CustomLinearQSwiglu"),
    (DOMAIN, (2,)): ("CustomAddLayerNorm", "CustomAddRmsNorm"),
    (DOMAIN, (2, 3)): ("CustomLinearFp8",),
    (DOMAIN, (3,)): ("CustomEmbedLayerNorm",),
    (DOMAIN, (6,)): ("CustomAttentionCached",),
}  # fmt: skip
"""The nodes of which these inputs are weights or gains."""
_WEIGHTS = {(domain, each): at for (domain, at), op_types in _BY_INPUTS.items() for each in op_types}
_ALIKE = 2.0  # biases whose largest magnitudes differ by no more
_MOVES = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_NORMS = {"InstanceNormalization", "LayerNormalization", "RMSNormalization"}
_Known = dict[ir.Value, object]
Kinds = dict[str, list[list[float]]]  # of each structure: the magnitudes of the biases of its kinds


class Kind:
    """The structure of a segment: of its part of the original, and then of its part of the result."""

    def __init__(self) -> None:
        self.records = list[object]()
        self.biases = list[float]()  # their largest magnitudes
        self.numbers = dict[object, int]()  # of what crosses, of inputs and of sizes, by name
        self.made = dict[str, object]()  # the original's values by name

    def add(self, nodes: Iterable[ir.Node], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Adds the nodes of a part in order, and the names of the values that cross."""
        known, crossing = _Known(), set(inputs)
        for node in nodes:
            self._node(node, known, crossing)
        named = {str(value.name): token for value, token in known.items()}
        self.records.append([(named.get(name), self.made.get(name)) for name in outputs])
        self.made = self.made or named

    def name(self, known: Kinds) -> str:
        """Returns a name for the kind, and adds its biases to `known` if they are beyond those there."""
        structure = hashlib.sha256(repr(self.records).encode()).hexdigest()[:16]
        kinds = known.setdefault(structure, [])
        alike = [at for at, each in enumerate(kinds) if self._is_between(each, each)]
        columns = [*zip(*kinds, strict=True)]
        if not alike and not (kinds and self._is_between([*map(min, columns)], [*map(max, columns)])):
            kinds.append(self.biases)
        return f"{structure} {alike[0] if alike else len(kinds) - 1}"

    def _is_between(self, low: Sequence[float], high: Sequence[float]) -> bool:
        bounds = zip(self.biases, low, high, strict=True)
        return all(least / _ALIKE <= size <= most * _ALIKE for size, least, most in bounds)

    def _node(self, node: ir.Node, known: _Known, crossing: set[str]) -> None:
        read = list[object]()
        for index, value in enumerate(node.inputs):
            is_row = is_bias(node, index)
            if is_row and value is not None and (row := g.tensor(value)) is not None:
                self.biases.append(weights.largest(row))
            read.append(self._value(value, is_row or is_weight(node, index), known, crossing))
        given = sorted(node.attributes.items())
        attributes = [(name, self._attribute(each, known, crossing)) for name, each in given]
        self.records.append((node.domain, node.op_type, read, attributes, len(node.outputs)))
        known.update((value, (len(self.records), index)) for index, value in enumerate(node.outputs))

    def _value(self, value: ir.Value | None, is_weight: bool, known: _Known, crossing: set[str]) -> object:
        if value is None or value in known:
            return None if value is None else known[value]
        is_given = value.is_graph_input()
        if (tensor := g.tensor(value)) is not None:
            if is_weight:
                return self._number("weight", value), form(tensor)
            return content(tensor)
        if is_given or str(value.name) in crossing:
            shape = [self._number("size", each) for each in g.dims(value) or []] if is_given else []
            known[value] = (self._number("input", value.name), is_given, value.dtype, shape)
        elif (maker := value.producer()) is not None:  # each segment computes it again
            self._node(maker, known, crossing)
        return known.get(value)

    def _number(self, what: str, name: object) -> object:
        """Returns an integer as it is, and a number for a name."""
        numbers = self.numbers
        return name if isinstance(name, int) else (what, numbers.setdefault((what, name), len(numbers)))

    def _attribute(self, attribute: ir.Attr, known: _Known, crossing: set[str]) -> object:
        if attribute.type is ir.AttributeType.GRAPH:
            graph: ir.Graph = attribute.as_graph()
            known.update((value, ("given", index)) for index, value in enumerate(graph.inputs))
            for node in graph:
                self._node(node, known, crossing)
            return [self._value(value, False, known, crossing) for value in graph.outputs]
        if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
            return content(attribute.as_tensor())
        return attribute.type, attribute.value


def is_weight(node: ir.Node, index: int, is_row: bool = False) -> bool:
    """Whether an input of a node, if it is constant, is a weight, its scales, or the gain of a norm.
    `is_row`: the input is a row in another form; a product with one, as of frequencies, is a table."""
    key, value = (node.domain, node.op_type), node.inputs[index]
    tensor = g.tensor(value)
    if value is None or (tensor is not None and tensor.size == 1):
        return False
    is_row = is_row if tensor is None else tensor.size in weights.sizes(tensor)
    if index in _WEIGHTS.get(key, ()):
        return not is_row or key[1] not in ("FusedMatMul", "MatMul")
    if key == ("", "Mul") and len(node.inputs) == 2:
        return is_row and _is_normal(node.inputs[1 - index])
    is_moved = not node.domain and node.op_type in _MOVES and (not index or key[1] == "DequantizeLinear")
    uses = [is_weight(*use, is_row and not index) for use in (node.outputs[0].uses() if is_moved else ())]
    return bool(uses) and not node.outputs[0].is_graph_output() and all(uses)


def is_bias(node: ir.Node, index: int) -> bool:
    """Whether an input of a node is a constant row that is added to what is not constant."""
    value = node.inputs[index]
    tensor = g.tensor(value)
    if tensor is None or not tensor.dtype.is_floating_point() or tensor.size == 1 or is_weight(node, index):
        return False
    has_weight = any(is_weight(node, other) for other in range(len(node.inputs)))
    is_sum = has_weight if node.op_type != "Add" else not node.domain
    return is_sum and tensor.size == weights.sizes(tensor)[-1]


def _is_normal(value: ir.Value | None) -> bool:
    """Whether a norm computes a value, but for its gain."""
    while (node := g.producer(value, "Cast", "CastLike", "Reshape")) is not None:
        value = node.inputs[0]
    if g.producer(value, *_NORMS) is not None:
        return True
    product = g.producer(value, "Div", "Mul")
    inverses = [g.producer(each, "Div") for each in product.inputs] if product is not None else []
    roots = [*(product.inputs if product is not None else ()), *(each.inputs[1] for each in inverses if each)]
    return any(g.chain(each, *ends) for each in roots for ends in (("Reciprocal", "Sqrt"), ("Sqrt", "Add")))


def form(tensor: ir.TensorProtocol) -> object:
    """Returns the dtype and shape of a weight, and the operations that make it."""
    if not isinstance(tensor, weights.Recipe):
        return tensor.dtype, weights.sizes(tensor)
    sources = [form(each) if each.size > 1 else content(each) for each in tensor.sources]
    return tensor.dtype, weights.sizes(tensor), tensor.operation, tensor.parameters, sources


def content(tensor: ir.TensorProtocol) -> object:
    """Returns what tells a tensor from others: its numbers, or of a large one where they come from."""
    if weights.is_large(tensor):
        return weights.key(tensor)
    return tensor.dtype, weights.sizes(tensor), hashlib.sha256(tensor.tobytes()).digest()
