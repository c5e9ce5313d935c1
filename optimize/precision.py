"""Converts a model from fp32 to 16 bits, and keeps fp32 where 16 bits are not enough or not possible.

Operators are converted if their CUDA kernels take 16 bits and compute sums, norms and softmax in fp32. All
others stay in fp32, between casts: statistics (ReduceMean, Pow, Sqrt), positions (Range, Cos, Sin, integers
cast to floats). So do, also with twinop's ops: what computes with integers that may be large, because sums of
int8 matmuls exceed fp16; and sums with constants that 16 bits do not have, such as 1e-10, and what divides by
them. A mean that was in 16 bits before, and that pools what one layer computes for the next, stays in 16
bits; so does a weight of DequantizeLinear in blocks, if 16 bits have its scales, and, in fp16, QuantizeLinear
to float8. An elementwise operator that only nodes in fp32 read stays in fp32 with them, but no table. Loop
and Scan stay in fp32 with all of their subgraphs, and get captured values in fp32; so do an If in a subgraph
and what it holds. A user's own op has the types that `user_ops.py` has chosen. Unless a dtype is asked for,
what the file computes in fp32 stays so, too (`widen.py`).
"""

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from twinop.model import weights
from twinop.record.op_spec import DOMAIN

from . import graph as g
from .branches import is_moved
from .inputs import MASK
from .user_ops import UserOps, remove_casts

DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}

ELEMENTS = {"Add", "Div", "Mul", "Neg", "Sub"}
_LAYERS = {"Conv", "Gemm", "MatMul"}
SHAPES = {
    "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "ScatterElements",
    "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
    "Where",
}  # fmt: skip
_ANY_16 = ELEMENTS | SHAPES | {
    "Attention", "ConstantOfShape", "Dropout", "Gelu", "Gemm", "LayerNormalization", "MatMul", "Max", "Min",
    "RMSNormalization", "Relu", "RotaryEmbedding", "Sigmoid", "Softmax", "Sum", "Tanh",
}  # fmt: skip
_FLOAT16_ONLY = {  # bfloat16 has no kernels below opset 22, or none at all
    "Abs", "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "DepthToSpace", "Einsum",
    "Elu", "GlobalAveragePool", "HardSigmoid", "HardSwish", "LeakyRelu", "MaxPool", "PRelu", "Pad",
}  # fmt: skip
_BOUNDS = {"Add", "Clip", "Max", "Sub", "Sum", "Where"}
_DIVIDES = {"Div", "Log", "Pow", "Reciprocal"}
_KEEPS = {"Abs", "Expand", "Reshape", "Sqrt", "Squeeze", "Transpose", "Unsqueeze"}
_SMALL = 256  # bfloat16 has all integers up to this
_LARGEST = "largest magnitude"  # in the `meta` of tensors
MOST_ELEMENTS = 2**20  # of weights that are read as a whole, to look at their numbers
_MICROSOFT = {
    "CausalConvWithState", "FusedMatMul", "GatedRMSNorm", "GatherBlockQuantized", "GroupQueryAttention",
    "MatMulNBits", "MoE", "MultiHeadAttention", "QMoE", "QuickGelu", "RotaryEmbedding",
}  # fmt: skip

Dtypes = dict[ir.Value, ir.DataType]
Kept = Mapping[str, ir.DataType]
Casts = dict[tuple[ir.Value, ir.DataType], ir.Value]  # a value in another dtype, by the value and the dtype


def convert(
    model: ir.Model, dtype: ir.DataType, kept: Kept, user_ops: UserOps, keeps_fp32: bool
) -> tuple[list[ir.Node], list[str]]:
    """Converts a model in fp32, in place.

    Args:
        kept: the dtypes of inputs and outputs that have another one, by name.
        keeps_fp32: nodes that the file computes in fp32 stay in fp32.

    Returns the nodes that compute in fp32, and the matmuls and weights that no longer do, by name.
    """
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    graph = model.graph
    for node in list(graph):
        if user_ops.types_in_result(node) is not None:
            remove_casts(node)
    marked = _marked(graph, dtype, kept) if keeps_fp32 else set()
    wide = _fp32_nodes(graph, dtype, user_ops, marked) if dtype is not ir.DataType.FLOAT else set()
    names = {node: node.meta.get(g.FP32, ()) for node in graph}
    stay = {name for node in wide for name in names[node]}
    narrowed = [] if dtype is ir.DataType.FLOAT else [
        name for node in graph if node not in wide for name in names[node] if name not in stay
    ]  # fmt: skip
    tensors = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    float_tensor = ir.TensorType(ir.DataType.FLOAT)  # sequences and optionals have the same dtype
    floats = {value for value in tensors if value.type == float_tensor}
    dtypes: Dtypes = {}
    for given in graph.inputs:
        if given in floats:
            _set_dtype(given, kept.get(str(given.name), dtype), dtypes)
    casts: Casts = {}
    for node in list(graph):
        wanted = ir.DataType.FLOAT if node in wide else dtype
        if node.op_type == "Cast" and not node.domain and node in wide:  # from any dtype
            _set_cast(node, floats, dtypes)
            continue
        chosen = user_ops.types_in_result(node) or (None,) * (len(node.inputs) + len(node.outputs))
        for index, value in enumerate(node.inputs):
            if value is not None:
                to = chosen[index] or wanted
                node.replace_input_with(index, _converted(node, value, to, dtypes, casts))
        for subgraph in g.subgraphs(node):
            _cast_captured(node, subgraph, wanted, dtypes, casts)
        for index, result in enumerate(node.outputs):
            if result in floats:  # mean and deviation of a norm are in fp32 also beside 16 bits
                to = ir.DataType.FLOAT if index and node.op_type == "LayerNormalization" else wanted
                _set_dtype(result, chosen[len(node.inputs) + index] or to, dtypes)
        _convert_attributes(node, wanted)
        if g.is_border(node) and node.inputs[0] is not None:
            g.replace(node.outputs[0], node.inputs[0])
    _cast_outputs(graph, dtypes, dtype, kept)
    RemoveUnusedNodesPass()(model)  # the weights in fp32
    wide = {node for node in wide if node.graph is graph and node.op_type != "Cast"}
    return [*wide], [*dict.fromkeys(narrowed)]


def _set_cast(node: ir.Node, floats: set[ir.Value], dtypes: Dtypes) -> None:
    """Notes what a Cast returns. One that rounds to the dtype that its input has now goes."""
    source, [result] = node.inputs[0], node.outputs
    if result in floats:
        dtypes[result] = ir.DataType.FLOAT
    elif (rounded := result.dtype) in DTYPES.values() and rounded is not None and source is not None:
        dtypes[result] = rounded
        if dtypes.get(source) is rounded:
            g.replace(result, source)


def _converted(
    before: ir.Node, value: ir.Value, dtype: ir.DataType, dtypes: Dtypes, casts: Casts
) -> ir.Value:
    """Returns a value or a constant of the main graph in a dtype."""
    is_constant = value not in dtypes and _is_wide_constant(value)
    if dtype is (ir.DataType.FLOAT if is_constant else dtypes.get(value, dtype)):
        return value
    cast = g.producer(value, "Cast") if dtype is not ir.DataType.FLOAT else None
    source = cast.inputs[0] if cast is not None else None
    if source is not None and dtypes.get(source) is dtype:  # it was cast to fp32
        return source
    if (value, dtype) not in casts:
        if is_constant:
            assert before.graph is not None and value.const_value is not None
            tensor = weights.cast(value.const_value, dtype)
            casts[value, dtype] = g.initializer(before.graph, tensor, f"{value.name}_{dtype.name.lower()}")
        else:
            casts[value, dtype] = g.add(before, "Cast", [value], {"to": dtype})
            dtypes[casts[value, dtype]] = dtype  # in the place of a border, others read it
    return casts[value, dtype]


def _cast_captured(
    node: ir.Node, subgraph: ir.Graph, dtype: ir.DataType, dtypes: Dtypes, casts: Casts
) -> None:
    """Casts the values of the main graph that a subgraph reads."""
    for inner in subgraph:
        for index, value in enumerate(inner.inputs):
            if value is not None:
                inner.replace_input_with(index, _converted(node, value, dtype, dtypes, casts))
        for deeper in g.subgraphs(inner):
            _cast_captured(node, deeper, dtype, dtypes, casts)
    for index, value in enumerate(tuple(subgraph.outputs)):
        if (other := _converted(node, value, dtype, dtypes, casts)) is not value:
            named = ir.node("Identity", [other])
            named.outputs[0].name = f"{other.name}_{subgraph.name}_{index}"
            named.outputs[0].type, named.outputs[0].shape = other.type, other.shape
            subgraph.append(named)
            subgraph.outputs[index] = named.outputs[0]
        elif is_moved(node) and value.dtype is ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)


def _set_dtype(value: ir.Value, dtype: ir.DataType, dtypes: Dtypes) -> None:
    value.type = ir.TensorType(dtype)  # copies of a graph share the types of their values
    dtypes[value] = dtype


def _marked(graph: ir.Graph, dtype: ir.DataType, kept: Kept) -> set[ir.Node]:
    """Returns the nodes that the file computes in fp32, and those that read what it has in fp32."""
    found = set[ir.Node]()
    held = {value for value in graph.inputs if kept.get(str(value.name)) is ir.DataType.FLOAT}
    for node in graph:
        reads = not held.isdisjoint(node.inputs) and node.op_type not in ("Cast", "Shape", "Size")
        reads = reads and not g.is_border(node)
        hides = node.op_type in ELEMENTS and max(map(_largest, node.inputs)) > float(dtype.max)
        if g.FP32 in node.meta or (reads and not hides):
            found.add(node)
        if g.FP32 in node.meta or (reads and node.op_type in SHAPES):
            held.update(value for value in node.outputs if value.dtype is ir.DataType.FLOAT)
    return found


def _fp32_nodes(graph: ir.Graph, dtype: ir.DataType, user_ops: UserOps, marked: set[ir.Node]) -> set[ir.Node]:
    """Returns the nodes that stay in fp32; `marked`: those that do because the file computes them so."""
    allowed = _ANY_16 | (_FLOAT16_ONLY if dtype is ir.DataType.FLOAT16 else set())
    wide = marked | _beside_tiny_constants(graph, dtype) | _of_large_integers(graph, dtype)
    for node in reversed(graph):
        kinds = [value.dtype for value in (*node.inputs, *node.outputs) if value is not None]
        if ir.DataType.FLOAT not in kinds or is_moved(node):
            continue
        if (types := user_ops.types_in_result(node)) is not None:
            wide = wide - {node} if dtype in types else wide | {node}
            continue
        domain, users = node.domain, [use.node for value in node.outputs for use in value.uses()]
        if node in wide or domain == DOMAIN or (domain == g.MICROSOFT and node.op_type in _MICROSOFT):
            continue
        if not domain and node.op_type == "Cast":
            source = node.inputs[0]
            if source is not None and source.dtype is not ir.DataType.BOOL:
                wide.add(node)
        else:
            # Of one that was in fp32, ONNX Runtime's sum of many 16-bit numbers may overflow.
            is_mean = (
                node.op_type == "ReduceMean" and dtype is ir.DataType.FLOAT16 and g.FP32 not in node.meta
            )
            readers = [*_readers(node.outputs[0])] if is_mean else []
            is_mean = is_mean and all(each.op_type in _LAYERS or each.domain == DOMAIN for each in readers)
            if is_mean or (node.op_type == "DequantizeLinear" and _is_weight(node, dtype, wide)):
                continue
            is_8 = node.op_type == "QuantizeLinear" and node.outputs[0].dtype is ir.DataType.FLOAT8E4M3FN
            scale = g.tensor(node.inputs[1]) if is_8 and dtype is ir.DataType.FLOAT16 else None
            if scale is not None and weights.fits(scale, dtype):  # CUDA has no kernel of bfloat16
                continue
            follows = node.op_type in ELEMENTS | SHAPES and users and wide.issuperset(users)
            follows = follows and not (node.op_type == "Gather" and g.is_constant(node.inputs[0]))
            if domain or node.op_type not in allowed or follows:
                wide.add(node)
    return wide


def _beside_tiny_constants(graph: ir.Graph, dtype: ir.DataType) -> set[ir.Node]:
    """Returns what computes with constants that are almost 0 in a dtype, and what divides by that."""
    tiny = 4 * float(ml_dtypes.finfo(dtype.numpy()).smallest_subnormal)
    found = {
        node
        for node in graph
        if (node.op_type in _BOUNDS or node.domain == DOMAIN)
        and any(0 < _largest(value) < tiny for value in node.inputs)
    }
    waiting = list(found)
    while waiting:
        users = {use.node for value in waiting.pop().outputs for use in value.uses()} - found
        found |= {each for each in users if each.op_type in _BOUNDS | _DIVIDES | _KEEPS}
        waiting += [each for each in users if each.op_type in _KEEPS]
    return found


def _largest(value: ir.Value | None) -> float:
    """Returns the largest absolute number of a small constant in fp32, and 0 of other values."""
    if value is None or not _is_wide_constant(value) or value.const_value is None:
        return 0.0
    tensor = value.const_value
    if _LARGEST not in tensor.meta:
        tensor.meta[_LARGEST] = 0.0 if tensor.size > MOST_ELEMENTS else weights.largest(tensor)
    return float(tensor.meta[_LARGEST])


def _of_large_integers(graph: ir.Graph, dtype: ir.DataType) -> set[ir.Node]:
    """Returns the nodes that read floats which are integers that may be large."""
    found, large = set[ir.Node](), set[ir.Value]()
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Cast" and not node.domain and source is not None and source.dtype is not None:
            is_float = node.outputs[0].dtype is ir.DataType.FLOAT
            if is_float and source.dtype.is_integer() and not _is_small(source):
                large.update(node.outputs)
            continue
        if large.isdisjoint(node.inputs) or (node.domain == g.MICROSOFT and node.op_type != "MatMulNBits"):
            continue
        number = max(map(_largest, node.inputs))
        if node.op_type in ELEMENTS and number > float(dtype.max):
            continue  # a mask: the number that hides is limited to the dtype's
        found.add(node)
        scales = node.op_type in ("Mul", "Div") and not large.issuperset(node.inputs) and number < 1
        is_matmul = node.domain == DOMAIN and node.op_type.endswith("Linear")
        if (node.op_type in ELEMENTS | _BOUNDS | SHAPES | _LAYERS or is_matmul) and not scales:
            large.update(value for value in node.outputs if value.dtype is ir.DataType.FLOAT)
    return found


def _is_small(value: ir.Value | None) -> bool:
    """Whether integers are known to be small: masks, constants, what was a truth value."""
    if value is None or (value.dtype is not None and value.dtype.bitwidth <= 8):
        return True
    if value.const_value is not None:
        return weights.largest(value.const_value) <= _SMALL
    node = value.producer()
    if node is None or node.domain:
        return node is None and MASK in value.meta
    kept = {"Cast", "Max", "Min", "Mul", "Sub"} | SHAPES - {"Shape", "Size"}
    return node.op_type in kept and all(map(_is_small, node.inputs))


def _is_weight(node: ir.Node, dtype: ir.DataType, wide: set[ir.Node]) -> bool:
    """Whether only matmuls of 16 bits read a weight in blocks, and 16 bits have its scales: a session fuses
    both, if no cast lies between."""
    scale, users = g.tensor(node.inputs[1]), {use.node for use in node.outputs[0].uses()}
    if scale is None or not g.attribute(node, "block_size", 0) or not g.is_constant(node.inputs[0]):
        return False
    is_read = users and all(each.op_type == "MatMul" and each.graph is node.graph for each in users)
    fits = weights.largest(scale) <= float(dtype.max) and weights.fits(scale, dtype)
    return bool(is_read and users.isdisjoint(wide) and fits)


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the nodes that read a value, or its elements in another shape."""
    for use in value.uses():
        if use.node.op_type in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
            yield from _readers(use.node.outputs[0])
        else:
            yield use.node


def _is_wide_constant(value: ir.Value) -> bool:
    return value.is_initializer() and value.dtype is ir.DataType.FLOAT


def _convert_attributes(node: ir.Node, wanted: ir.DataType) -> None:
    for name in ("to", "dtype", "output_dtype"):
        if g.attribute(node, name, None) == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(wanted))
    if node.op_type == "ConstantOfShape" and wanted is not ir.DataType.FLOAT:
        value = g.attribute(node, "value", ir.tensor(np.zeros(1, np.float32)))
        if value.dtype is ir.DataType.FLOAT:
            node.attributes["value"] = ir.AttrTensor("value", weights.cast(value, wanted))


def _cast_outputs(graph: ir.Graph, dtypes: Dtypes, dtype: ir.DataType, kept: Kept) -> None:
    """Casts outputs that have another dtype than wanted."""
    for index, value in enumerate(tuple(graph.outputs)):
        wanted = kept.get(str(value.name), dtype)
        found = dtypes.get(value, ir.DataType.FLOAT if _is_wide_constant(value) else wanted)
        if found is wanted:
            continue
        node = ir.node("Cast", [value], {"to": wanted})
        graph.append(node)
        result = node.outputs[0]
        result.name, value.name = value.name, f"{value.name}_{found.name.lower()}"
        result.type, result.shape = ir.TensorType(wanted), value.shape
        graph.outputs[index] = result
