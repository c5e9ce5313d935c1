"""The constants of a part of the original, and what its nodes compute from them, for `weight_check`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from twinop.model.weights import Stored
from twinop.record.op_spec import DOMAIN

from . import graph as g

_LARGE = 1 << 12  # bytes of a matrix that a result must hold
_COMPUTED = 1 << 20  # elements of what is computed here
_PICKS = {"Gather", "Slice"}  # also from larger constants
_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_PRODUCTS = {"Gemm", "MatMul", "MatMulNBits"}
_BETWEEN = _MOVES | _PRODUCTS | {"Add", "Conv"}
_HIDING = -9984.0  # what bfloat16 has for -10000, which hides a score
_DEFAULTS, _ATTENTION = [1e-5, 1e-6, 1e-12], "CustomAttentionCached"  # eps of nodes without
_DEPTH = 5  # nodes between a weight and where its product is split
Factor = tuple[np.ndarray, float | None]
Span = tuple[int, int]  # where a part starts and stops


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant of the original, or numbers that its nodes compute from constants."""

    name: str
    key: object  # of the tensor: parts that share it have the same
    array: np.ndarray
    cuts: set[int] = field(default_factory=set)  # where the original splits it, or a product with it
    is_required: bool = False  # whether a result must hold it, but for parts that nothing reads
    unread: Sequence[Span] = ()
    slack: float | None = None  # what numbers may differ by, beside their last two bits; None: they are equal

    def views(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields its lines along the first axis, and along the last one of a matrix."""
        yield 0, self.array.reshape(len(self.array), -1)
        if self.array.ndim == 2 and 1 not in self.array.shape:
            yield 1, self.array.T

    def spans(self, count: int) -> list[tuple[int, int]]:
        """Returns all of so many lines, those between cuts, and halves and thirds, such as q, k and v."""
        ends = {0, count, *(each % count for each in self.cuts if -count < each < count)}
        equal = [pairwise(range(0, count + 1, count // n)) for n in (2, 3) if count % n == 0]
        return [*dict.fromkeys([(0, count), *pairwise(sorted(ends)), *chain(*equal)])]


@dataclass(frozen=True)
class Pool:
    """What the constants of a result may be: these constants, some of them times rows of numbers. `scales`
    are those of batch norms, `samples` are for `weight_check`, by dtype."""

    constants: list[Constant]
    scales: list[np.ndarray]
    samples: dict[np.dtype, Any] = field(default_factory=dict)
    known_factors: dict[tuple[int, np.dtype], list[Factor]] = field(default_factory=dict)

    def factors(self, size: int, dtype: np.dtype) -> list[Factor]:
        """Returns the rows of so many numbers that weights may be multiplied by, and the slack of each."""
        if (size, dtype) not in self.known_factors:
            found = [(each, 0.0) for each in self.scales if each.size == size]
            self.known_factors[size, dtype] = [*found, *self._rows(size, dtype)]
        return self.known_factors[size, dtype]

    def _rows(self, size: int, dtype: np.dtype) -> Iterator[Factor]:
        for each in self.constants:
            if each.array.size == size and is_row(each.array) and is_float(each.array):
                row = each.array.reshape(-1)
                yield cast(row, dtype).astype(np.float32), None if dtype.itemsize < 4 else 0.0
                if row.itemsize > dtype.itemsize:
                    yield row.astype(np.float32), 0.0

    def with_rows(self, neighbours: Sequence["Pool"]) -> "Pool":
        """Returns what there is here, and the rows of neighbours: a norm may lie behind a cut."""
        others = [each for pool in neighbours if pool is not self for each in pool.constants]
        rows = [each for each in others if is_float(each.array) and is_row(each.array)]
        return Pool([*{each.key: each for each in [*rows, *self.constants]}.values()], self.scales)


def constants(model: ir.Model) -> dict[ir.Value, ir.TensorProtocol]:
    """Returns the tensors of a model, also those of subgraphs."""
    given = [value for graph in model.graphs() for value in graph.initializers.values()]
    given += [node.outputs[0] for node in model.graph.all_nodes() if node.op_type == "Constant"]
    tensors = {value: ir.convenience.get_const_tensor(value) for value in given}
    return {
        value: each
        for value, each in tensors.items()
        if each is not None and each.size and each.dtype is not ir.DataType.STRING
    }


def pool_of(model: ir.Model) -> Pool:
    """Returns the constants of a part of the original."""
    opset, computing, stored = model.opset_imports.get("", 1), set[ir.Node](), constants(model)
    known = {value: to_array(tensor) for value, tensor in stored.items()}
    for node in model.graph:
        if known.keys() >= {value for value in node.inputs if value is not None} and not node.domain:
            known |= _computed(node, known, opset)
            computing |= {node} if known.keys() >= {*node.outputs} else set()
    scales = list[np.ndarray]()
    found = [each for node in model.graph for each in _in_bytes(node, stored)]
    in_bytes = {each.key for each in found}
    for value, array in known.items():
        if array.ndim and array.size:
            readers = {  # a result may hold nothing of a table but the row that all ids name
                use.node
                for use in value.uses()
                if (use.node not in computing or use.node.op_type in _MOVES) and use.node.op_type != "Gather"
            }
            is_weight = (is_float(array) or array.itemsize == 1) and not _is_mask(array)
            is_large = value in stored and array.ndim > 1 and array.nbytes >= _LARGE and is_weight
            key = id(stored[value]) if value in stored else value
            is_required = is_large and bool(readers) and ("in bytes", key) not in in_bytes
            given = str(value.name), key, array, _cuts(value, known), is_required
            found.append(Constant(*given, _unread(value, known) if is_required else ()))
    for node in model.graph:
        if node.op_type == "BatchNormalization" and known.keys() >= {*node.inputs[1:]}:
            rows, bias = _batch_norm(node, known)
            scales, found = [*scales, *rows], [*found, bias]
    return Pool(found, scales)


def _in_bytes(node: ir.Node, stored: Mapping[ir.Value, ir.TensorProtocol]) -> Iterator[Constant]:
    """Yields the integers of a DequantizeLinear in blocks as MatMulNBits has them: [N, K], without a sign."""
    is_blocked = node.op_type == "DequantizeLinear" and g.attribute(node, "block_size", 0)
    for value in (*node.inputs[:1], *node.inputs[2:]) if is_blocked else ():
        tensor = stored.get(value) if value is not None else None
        if tensor is None or (raw := to_array(tensor)).ndim != 2:
            continue
        is_packed = tensor.dtype.bitwidth == 4
        raw = raw.view(np.uint8)
        raw = raw ^ np.uint8(0x88 if is_packed else 0x80) if tensor.dtype.is_signed() else raw
        if g.attribute(node, "axis", 1) == 0 and is_packed:
            raw = np.pad(raw, ((0, len(raw) % 2), (0, 0)))
            even, odd = raw[0::2].T, raw[1::2].T
            turned = [even & 15 | odd << 4, even >> 4 | odd & 0xF0]
            raw = np.stack(turned, 1).reshape(-1, even.shape[1])
        elif g.attribute(node, "axis", 1) == 0:
            raw = raw.T
        yield Constant(str(value.name), ("in bytes", id(tensor)), raw)  # type: ignore[union-attr]


def _computed(node: ir.Node, known: Mapping[ir.Value, np.ndarray], opset: int) -> dict[ir.Value, np.ndarray]:
    """Returns what a node computes from constants, if that is little."""
    given = {str(value.name): known[value] for value in node.inputs if value is not None}
    is_little = node.op_type in _PICKS or sum(each.size for each in given.values()) <= _COMPUTED
    if not is_little or not (given or node.op_type == "Constant") or g.subgraphs(node):
        return {}
    names = [str(value.name) for value in node.outputs]
    inputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in given]
    outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in names if name]
    graph = onnx.helper.make_graph([ir.to_proto(node)], "constants", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        results = ReferenceEvaluator(model).run(None, given)
    except Exception:  # it has not all operators and types: then the result's constant is reported
        return {}
    pairs = zip((value for value in node.outputs if value.name), results, strict=True)
    return {value: each for value, each in pairs if isinstance(each, np.ndarray) and each.size <= _COMPUTED}


def _batch_norm(node: ir.Node, known: Mapping[ir.Value, np.ndarray]) -> tuple[list[np.ndarray], Constant]:
    """Returns the scale of a batch norm, as the weights before it may have it, and their bias with it."""
    gain, shift, mean, variance = (known[each].astype(np.float64) for each in node.inputs[1:] if each)
    scale = gain / np.sqrt(variance + g.attribute(node, "epsilon", 1e-5))
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    weight, bias = [*(before.inputs[1:] if before is not None else ()), None, None][:2]
    inner = prod(known[weight].shape[2:]) if weight and weight in known else 1  # of transposed convolutions
    given = known[bias].astype(np.float64) if bias and bias in known else np.zeros_like(mean)
    terms = [given * scale, -mean * scale, shift]
    slack = 1e-6 * sum(float(np.abs(each).max()) for each in terms)
    constant = Constant(f"the bias of {node.outputs[0].name}", node, sum(terms), slack=slack)
    return [scale, np.repeat(scale, inner)][: 1 + (inner > 1)], constant


def _unread(value: ir.Value, known: Mapping[ir.Value, np.ndarray]) -> list[Span]:
    """Returns the lines of a constant that nothing reads: only Splits and Slices read its one product."""
    while len(nodes := {use.node for use in value.uses()}) == 1 and not value.is_graph_output():
        [node] = nodes
        is_turned = node.op_type == "Transpose" and value in known
        is_product = node.op_type in _PRODUCTS and node.inputs[1] is value
        if not (is_turned or is_product or node.op_type in ("Add", "Cast", "Identity")):
            break
        value = node.outputs[0]
    size, outputs = g.last_dim(value), [each for node in nodes for each in node.outputs if g.is_read(each)]
    parts = [g.part_of(each, -1) for each in outputs]
    if value.is_graph_output() or not isinstance(size, int) or not parts or None in parts:
        return []
    spans = sorted(part[1:] for part in parts if part is not None)
    ends = [0, *accumulate((stop for _, stop in spans), max)]
    return [*zip(ends, [*(start for start, _ in spans), size], strict=True)]


def _cuts(value: ir.Value, known: Mapping[ir.Value, np.ndarray]) -> set[int]:
    """Returns where the nodes behind a constant split it, or what they compute with it."""
    found, waiting = set[int](), [(value, 0)]
    while waiting:
        source, depth = waiting.pop()
        for node in {use.node for use in source.uses()}:
            arrays = [known[each] for each in node.inputs[1:3] if each and each in known]
            rows = [array.reshape(-1)[:9].tolist() for array in arrays]
            sizes = rows[0] if node.op_type == "Split" and rows else g.attribute(node, "qkv_hidden_sizes", [])
            found |= {sum(sizes[:count]) for count in range(len(sizes))}
            found |= {each for row in rows for each in row} if node.op_type == "Slice" else set()
            if node.op_type in _BETWEEN and depth < _DEPTH:
                waiting += [(each, depth + 1) for each in node.outputs]
    return found


def eps_of(model: ir.Model) -> set[float]:
    """Returns the numbers of a part of the original that may be the eps of a norm."""
    single = [each for each in constants(model).values() if each.size == 1]
    found = [each.numpy().item() for each in single if each.dtype.is_floating_point()]
    for node in model.graph.all_nodes():
        given = [each.value for each in node.attributes.values() if each.type is ir.AttributeType.FLOAT]
        has_default = "Norm" in node.op_type or node.op_type == "GroupQueryAttention"
        found += given or (_DEFAULTS if has_default else [])
    return {*np.array(found, np.float32).tolist()}


def norm_eps(model: ir.Model) -> set[float]:
    """Returns the eps of the norms of a part of the result, also of those in matmuls and attention."""
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    nodes = [node for node in nodes if node.op_type != _ATTENTION or [*node.inputs, *[None] * 7][6]]
    given = [g.attribute(node, name, 0.0) for node in nodes for name in ("eps", "rms_eps")]
    return {*np.array(given, np.float32).tolist()} - {0.0}


def to_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """Returns the numbers of a tensor, mapped if they lie in a file; those below 8 bits as packed bytes."""
    shape, bits = [*tensor.shape.numpy()], tensor.dtype.bitwidth
    if bits >= 8:
        return tensor.numpy()
    raw = tensor.bytes() if isinstance(tensor, Stored) else np.frombuffer(tensor.tobytes(), np.uint8)
    is_even = bool(shape) and shape[-1] * bits % 8 == 0
    return raw.reshape([*shape[:-1], shape[-1] * bits // 8] if is_even else [-1])


def _is_mask(array: np.ndarray) -> bool:
    """Whether an array only hides, as a result may do without it: truth values, or 0 and low numbers."""
    if not is_float(array):
        return array.dtype.kind == "b"
    parts = array.reshape(-1)[:64], array  # most weights show it at once
    return all(((each == 0) | (each <= _HIDING)).all() for each in parts) and bool(array.any())


def is_row(array: np.ndarray) -> bool:
    return array.size in array.shape


def is_float(array: np.ndarray) -> bool:
    return array.dtype.kind in "fV"  # bfloat16 is of ml_dtypes


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts numbers to a dtype of the same kind. Finite ones stay finite."""
    if array.dtype == dtype:
        return array
    if not is_float(array) or array.dtype.itemsize < dtype.itemsize:
        return array.astype(dtype)
    wide, limit = array.astype(np.promote_types(array.dtype, np.float32)), float(ml_dtypes.finfo(dtype).max)
    return np.where(np.isfinite(wide), np.clip(wide, -limit, limit), wide).astype(dtype)
