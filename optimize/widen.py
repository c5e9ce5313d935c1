"""Converts a model to fp32, and marks the nodes that its file computes in fp32 on purpose.

The marks (`graph.FP32` in a node's `meta`) decide on the precision of the result if no dtype is asked for. A
node gets one if it has fp32 weights, or if its fp32 result is read in fp32. One whose result only becomes 16
bits gets none: an operator in 16 bits, which computes in fp32 inside and rounds once, does the same.

A Cast to 16 bits stays where it changes values that are read in fp32: in a file that is mostly fp32, and
before a Cast to fp32. Others follow from the precision of the file. Where one reads a node with a mark, a Sum
of one value stands for it (`graph.is_border`), so that a rewrite of nodes in 16 bits does not take it for a
reader of fp32.
"""

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from twinop.errors import ExportError, option
from twinop.model import weights

from . import graph as g
from .precision import ELEMENTS, MOST_ELEMENTS, SHAPES
from .symbolic_shapes import infer_types
from .user_ops import FLOATS_16, set_dtype

_FLOAT = ir.DataType.FLOAT
_DTYPE_ATTRIBUTES = (
    "to", "dtype", "output_dtype", "output_datatype", "precision", "softmax_precision", "stash_type",
)  # fmt: skip
_CASTS = ("Cast", "CastLike")
_MOVES = SHAPES - {"Shape", "Size"}
_FUSED = ELEMENTS | _MOVES | {"Clip", "Erf", "Gelu", "Relu", "Sigmoid", "Tanh"}
"""What rewrites fuse with a matmul before it."""
_MATMULS = {
    "Attention", "Conv", "ConvTranspose", "Einsum", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul",
    "MultiHeadAttention", "RNN",
}  # fmt: skip
_ROUNDS_ALWAYS = {"ReduceMean"}  # ONNX Runtime's sum of many 16-bit numbers may overflow

Kinds = Mapping[ir.Value, ir.DataType | None]  # the dtypes of values in the file


def convert_to_fp32(model: ir.Model, main: ir.DataType, asked: bool) -> set[ir.DataType]:
    """Converts every 16-bit float of a model to fp32, in place, and returns the 16-bit types that it had;
    most weights are of `main`. The report names changes if a dtype is `asked` for. ExportError: a value is a
    sequence or an optional of such floats."""
    graphs = [*model.graphs()]
    found = {dtype for graph in graphs for dtype in dtypes(graph) if dtype in FLOATS_16}
    values = [value for graph in graphs for node in graph for value in node.outputs]
    if found and any(value.dtype is None for value in values):
        infer_types(model)
        graphs = [*model.graphs()]
    kinds = _kinds(graphs, bool(found))
    if found or asked:
        _mark(model.graph, kinds, main if main in FLOATS_16 else ir.DataType.FLOAT16, bool(found))
    narrowing = [node for graph in graphs for node in graph if found and _narrows(node, kinds)]
    casts = [node for node in narrowing if main not in FLOATS_16 or _is_read_in_fp32(node, kinds)]
    for node in {*narrowing}.difference(casts) if not asked else ():
        if (source := node.inputs[0]) is not None and _is_fp32(source, kinds) and node.graph is model.graph:
            g.replace(node.outputs[0], g.add(node, "Sum", [source], dtype=_FLOAT, shape=g.dims(source)))
    for graph in graphs:
        widen(graph, {*casts})
    for node in casts:  # what reads them has the result in fp32
        dtype = kinds[node.outputs[0]] or _FLOAT
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes["to"] = ir.AttrInt64("to", int(dtype))
        set_dtype(node.outputs[0], dtype)
    return found


def dtypes(graph: ir.Graph) -> Iterable[ir.DataType | None]:
    """Yields the dtypes of a graph's values, tensors and attributes."""
    for value in (*graph.inputs, *graph.initializers.values()):
        yield value.dtype
        yield value.const_value.dtype if value.const_value is not None else None
    for node in graph:
        yield from (value.dtype for value in node.outputs)
        for name, each in node.attributes.items():
            if each.type is ir.AttributeType.TENSOR and not each.is_ref():
                yield each.value.dtype
            elif _is_dtype(name, each):
                yield ir.DataType(each.value)


def _is_dtype(name: str, attribute: ir.Attr) -> bool:
    is_int = attribute.type is ir.AttributeType.INT and not attribute.is_ref()
    return is_int and name in _DTYPE_ATTRIBUTES


def _kinds(graphs: Iterable[ir.Graph], mixed: bool) -> Kinds:
    """Returns the dtypes of all values; those that are not declared are fp32 in a file without 16 bits."""
    kinds = dict[ir.Value, ir.DataType | None]()
    for graph in graphs:
        kinds |= {value: value.dtype for value in (*graph.inputs, *graph.initializers.values())}
        for node in graph:
            likely = [kinds.get(value) for value in node.inputs if value is not None]
            floats = [kind for kind in likely if kind is not None and kind.is_floating_point()]
            guess = (floats[0] if floats else None) if mixed else _FLOAT
            kinds |= {value: value.dtype or guess for value in node.outputs}
    return kinds


def _mark(graph: ir.Graph, kinds: Kinds, narrow_type: ir.DataType, named: bool) -> None:
    """Marks the nodes of the main graph that compute in fp32: the marks name matmuls and weights of a file
    that is not in fp32 altogether (`named`)."""
    weighted, labels = set[ir.Node](), dict[ir.Node, tuple[str, ...]]()
    for node in graph:
        results = [value for value in node.outputs if kinds[value] is _FLOAT]
        source = node.inputs[0] if node.op_type in _CASTS and node.inputs else None
        is_exact = source is not None and kinds.get(source) in (*FLOATS_16, ir.DataType.BOOL)
        if not results or (node.op_type == "Constant" and not node.domain) or is_exact:
            continue
        inputs = [value for value in node.inputs if value is not None and kinds.get(value) is _FLOAT]
        constants = [value for value in inputs if g.is_constant(value)]
        makers = [maker for value in inputs if (maker := value.producer()) and value not in constants]
        own = [value for value in constants if _needs_fp32(value, narrow_type)]
        moves = node.op_type in _MOVES and not node.domain
        if own or (node.op_type in _FUSED and makers and weighted.issuperset(makers)):
            weighted.add(node)
        is_matmul = node.op_type in _MATMULS
        names = [str(value.name) for value in (constants if is_matmul else own)]
        label = f"{node.op_type} {node.name or results[0].name}" if is_matmul or own else ""
        label += f" ({', '.join(names)})" if names else ""
        before = [labels.get(maker, ()) for maker in makers if node.op_type in _FUSED]
        labels[node] = (*(before[0] if len(before) == 1 else ()), *([label] if label else ()))
        if moves and node not in weighted:
            is_marked = any(_is_fp32(value, kinds) for value in inputs)
        else:
            rounds = node in weighted or node.op_type in _ROUNDS_ALWAYS or not _only_narrowed(results, kinds)
            numbers = [abs(number) for value in constants if (number := g.scalar(value)) is not None]
            is_mask = any(number > float(narrow_type.max) for number in numbers)
            is_marked = rounds and not is_mask
        if is_marked:
            node.meta[g.FP32] = labels[node] if named else ()


def _is_fp32(value: ir.Value, kinds: Kinds) -> bool:
    """Whether the file has a value in fp32: an input, or what a node with a mark computes."""
    node = value.producer()
    if node is None:
        return value.is_graph_input() and not value.is_initializer() and kinds.get(value) is _FLOAT
    return g.FP32 in node.meta and kinds.get(value) is _FLOAT


def _only_narrowed(values: Iterable[ir.Value], kinds: Kinds) -> bool:
    """Whether nothing but casts to 16 bits read values, or their elements in another shape."""
    for value in values:
        if value.is_graph_output():
            return False
        for node in {use.node for use in value.uses()}:
            is_cast = node.op_type in _CASTS and kinds[node.outputs[0]] in FLOATS_16
            moves = node.op_type in _MOVES and not node.domain and _only_narrowed(node.outputs, kinds)
            if not is_cast and not moves and node.op_type not in ("Shape", "Size"):
                return False
    return True


def _needs_fp32(value: ir.Value, dtype: ir.DataType) -> bool:
    """Whether a constant is a weight of numbers that 16 bits do not have; the lowest ones of masks count as
    if they had."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size <= 1:
        return False
    return tensor.size > MOST_ELEMENTS or not weights.fits(tensor, dtype)


def _narrows(node: ir.Node, kinds: Kinds) -> bool:
    """Whether a node casts numbers to 16 bits that may not have them."""
    source = node.inputs[0] if node.op_type in _CASTS and not node.domain and node.inputs else None
    after = kinds[node.outputs[0]]
    if source is None or after not in FLOATS_16 or g.is_constant(source):
        return False
    return kinds.get(source) not in (None, after, ir.DataType.BOOL)


def _is_read_in_fp32(node: ir.Node, kinds: Kinds) -> bool:
    users = [use.node for use in node.outputs[0].uses()]
    return any(user.op_type in _CASTS and kinds.get(user.outputs[0]) is _FLOAT for user in users)


def round_results(model: ir.Model) -> ir.Model:
    """Computes a model of 16 bits in fp32, in place, and rounds inputs and what each node returns to 16 bits,
    as GPUs do. ONNX Runtime's CPU provider removes the casts between nodes that it has put there, but none of
    the model's."""
    if any(value.dtype is None for node in model.graph.all_nodes() for value in node.outputs):
        infer_types(model)
    graphs, first = [*model.graphs()], next(iter(model.graph), None)
    computed = [*model.graph.inputs, *(value for graph in graphs for node in graph for value in node.outputs)]
    narrow = {value: dtype for value in computed if (dtype := value.dtype) in FLOATS_16 and dtype is not None}
    for graph in graphs:
        widen(graph, set())
    for value, dtype in narrow.items():
        node = value.producer()
        if first is None or (node is not None and node.op_type in _MOVES):
            continue
        if node is not None:
            cast = set_dtype(value, _FLOAT)
            cast.replace_input_with(0, g.add(cast, "Cast", [value], {"to": int(dtype)}))
            continue
        uses = [*value.uses()]
        wide = g.add(first, "Cast", [g.add(first, "Cast", [value], {"to": int(dtype)})], {"to": int(_FLOAT)})
        for use in uses:
            use.node.replace_input_with(use.idx, wide)
    return model


def widen(graph: ir.Graph, kept: set[ir.Node]) -> None:
    for value in (*graph.inputs, *graph.initializers.values()):
        _widen_type(value)
        if value.const_value is not None and value.const_value.dtype in FLOATS_16:
            value.const_value = weights.cast(value.const_value, _FLOAT)
    for node in graph:
        for value in node.outputs if node not in kept else ():
            _widen_type(value)
        for name, each in list(node.attributes.items()):
            if each.type is ir.AttributeType.TENSOR and not each.is_ref() and each.value.dtype in FLOATS_16:
                node.attributes[name] = ir.AttrTensor(name, weights.cast(each.value, _FLOAT))
            elif _is_dtype(name, each) and ir.DataType(each.value) in FLOATS_16:
                node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))


def _widen_type(value: ir.Value) -> None:
    if value.dtype in FLOATS_16:
        if not isinstance(value.type, ir.TensorType):
            raise ExportError(
                f"{value.name} is {value.type}: sequences and optionals of 16 bits are not supported. Export "
                f"the model in float32, and give {option('dtype')}"
            )
        value.type = ir.TensorType(_FLOAT)
