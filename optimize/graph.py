"""Helpers of the rewrites: they read the values of a graph and insert nodes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop.model.weights import in_c_order, is_large, same, sample, sizes
from twinop.record.op_spec import DOMAIN, OpSpec

MICROSOFT = "com.microsoft"
Dim = int | str | None
Dims = Sequence[Dim]
Inputs = Sequence[ir.Value | None]
_RESULTS = {"LessOrEqual": ir.DataType.BOOL, "Shape": ir.DataType.INT64}
_NO_NUMBERS = {ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128}
_ELEMENTWISE = {"Add", "Cast", "Div", "Identity", "LessOrEqual", "Max", "Mul", "Reciprocal", "Sqrt", "Where"}
FP32 = "computed in fp32"
"""In the `meta` of nodes that the file computes in fp32, beside others in 16 bits: the matmuls and weights
by name. Nodes in their place have it, too: it decides on the precision of the result."""
_NEW = "the names of new values"
"""In the `meta` of a graph: what these start with, how many there are, the others. See `reserve_names`."""
OR = "_or_"  # joins the names of two sizes of inputs in the name of the size that they broadcast to


class Skipped(Exception):
    """Nodes have a rewrite's pattern in a form that it does not support; the text says why. `Rewrite.match`
    returns it, its helpers raise it, and reports count it, by `pattern` or what the rewrite calls it."""

    def __init__(self, reason: str = "", pattern: str = "") -> None:
        super().__init__(reason)
        self.pattern = pattern


@dataclass
class RewriteContext:
    """The model that the rewrites change, and what they know of it."""

    model: ir.Model
    device: str
    records: Mapping[str, OpSpec]  # twinop's ops by name
    lengths: dict[ir.Value, ir.Value] = field(default_factory=dict)  # those made of masks; the mask of each
    promised: set[str] = field(default_factory=set)  # masks that causal attention leaves out: they end rows
    acting: set[str] = field(default_factory=set)  # the names of the rewrites that changed something

    @property
    def graph(self) -> ir.Graph:
        """The main graph, which also has what is in branches (`branches.py`); other subgraphs stay."""
        return self.model.graph

    def may_differ(self, a: Dim, b: Dim) -> bool:
        """Whether two sizes may differ. Names that inference has made up count as equal."""
        given = {dim for value in self.graph.inputs for dim in dims(value) or () if dim is not None}
        names = [name for each in (a, b) if not isinstance(each, int) for name in str(each).split(OR)]
        return a != b and given.issuperset(names)

    def nodes(self, *op_types: str, domain: str = "") -> list[ir.Node]:
        """Returns the graph's nodes of these types, in order."""
        return [node for node in self.graph if node.op_type in op_types and node.domain == domain]

    def op_nodes(self, op: str) -> list[ir.Node]:
        """Returns the graph's nodes of one of twinop's ops, in order."""
        return self.nodes(self.records[op].onnx_name, domain=DOMAIN) if op in self.records else []

    def type_of(self, op: str) -> str:
        """Returns the node type of one of twinop's ops; Skipped: the library was built without it."""
        if op not in self.records:
            raise Skipped(f"the library has no op {op}")
        return self.records[op].onnx_name

    def add_op(
        self, before: ir.Node, op: str, inputs: Inputs, shape: Dims | None = None, **attributes: Any
    ) -> ir.Value:
        """Inserts a node of one of twinop's ops; by default its output has the shape of its first input."""
        shape = dims(inputs[0]) if shape is None else shape
        return add(before, self.type_of(op), inputs, attributes, domain=DOMAIN, shape=shape)


def producer(value: ir.Value | None, *op_types: str, domain: str = "") -> ir.Node | None:
    """Returns the node that computes the value, if it has one of these types."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in op_types and node.domain == domain:
        return node
    return None


def maker(value: ir.Value) -> ir.Node:
    """Returns the node that computes the value: there is one."""
    node = value.producer()
    assert node is not None
    return node


def ancestors(*values: ir.Value, of_shapes: bool = False, until: Collection[ir.Value] = ()) -> set[ir.Value]:
    """Returns values and all that they are computed from, also in subgraphs; `of_shapes`: or their shapes."""
    waiting, seen = [*values], set[ir.Value]()
    while waiting:
        each = waiting.pop()
        node = each.producer() if each not in seen and each not in until else None
        seen.add(each)
        if node is not None and (of_shapes or node.op_type not in ("Shape", "Size")):
            nodes = [node, *(inner for graph in subgraphs(node) for inner in graph.all_nodes())]
            waiting += [read for one in nodes for read in one.inputs if read is not None]
            waiting += [read for graph in subgraphs(node) for read in graph.outputs]
    return seen


def given_of(*values: ir.Value, until: Collection[ir.Value] = ()) -> set[ir.Value]:
    """Returns the inputs of the graph that values or their shapes are computed from."""
    return {each for each in ancestors(*values, of_shapes=True, until=until) if each.is_graph_input()}


def given_of_all(graph: ir.Graph) -> dict[ir.Value | None, int]:
    """Returns what `given_of` does of each value of a sorted graph and its subgraphs, in one walk: a bit for
    each input."""
    found = dict[ir.Value | None, int]()

    def walk(graph: ir.Graph) -> int:
        """Returns the bits of all that the nodes read."""
        read = 0
        found.update((value, 1 << len(found) + index) for index, value in enumerate(graph.inputs))
        for node in graph:
            bits = reduce(or_, map(walk, subgraphs(node)), 0)
            bits = reduce(or_, (found.get(value, 0) for value in node.inputs), bits)
            found.update(dict.fromkeys(node.outputs, bits))
            read |= bits
        return read

    walk(graph)
    return found


def chain(value: ir.Value | None, *op_types: str) -> list[ir.Node]:
    """Returns the nodes that compute a value, the last first, each from the first input of the one before;
    none if the types are others."""
    nodes = list[ir.Node]()
    for op_type in op_types:
        node = producer(value, op_type)
        if node is None:
            return []
        nodes.append(node)
        value = node.inputs[0]
    return nodes


def untransposed(value: ir.Value | None, permutation: Sequence[int]) -> ir.Value | None:
    """Returns the tensor of which a value is the transpose with this permutation, else None."""
    node = producer(value, "Transpose")
    return node.inputs[0] if node is not None and has_permutation(node, permutation) else None


def has_permutation(node: ir.Node | None, permutation: Sequence[int]) -> bool:
    return node is not None and [*attribute(node, "perm", ())] == [*permutation] != []


def tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the tensor of a Constant or of an initializer that no caller can override, else None."""
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)


def tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """Returns the tensors of all initializers, those of subgraphs too."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    return [value.const_value for value in values if value.const_value is not None]


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of a constant, else None; also of a large one, which only `tensor` returns."""
    found = tensor(value)
    return None if found is None or is_large(found) else found.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """Whether `tensor` returns one; does not read it."""
    return tensor(value) is not None


def scalar(value: ir.Value | None) -> float | None:
    """Returns the number of a constant with one element, else None: also for a text or a complex number."""
    found = tensor(value)
    is_number = found is not None and found.size == 1 and found.dtype not in _NO_NUMBERS
    return float(found.numpy().item()) if found is not None and is_number else None


def dims(value: ir.Value | None) -> list[Dim] | None:
    """Returns the shape: numbers, symbolic names, and None for unknown dimensions."""
    if value is None or value.shape is None:
        return None
    return [each if isinstance(each, int) else each.value for each in value.shape.dims]


def rank(value: ir.Value | None) -> int:
    """Returns the number of dimensions, or 0 if it is not known."""
    return len(dims(value) or ())


def same_dims(a: Dims | None, b: Dims | None) -> bool:
    """Whether two shapes are known to be equal. Sums of names are, in any order: a + b and b + a."""

    def ordered(dim: Dim) -> Dim:
        is_sum = isinstance(dim, str) and "(" not in dim
        return " + ".join(sorted(dim.split(" + "))) if is_sum else dim  # type: ignore[union-attr]

    return a is not None and b is not None and [*map(ordered, a)] == [*map(ordered, b)] and None not in a


def broadcast_dims(a: list[Dim] | None, b: list[Dim] | None) -> list[Dim] | None:
    """Returns the shape that two shapes broadcast to, or None if one is unknown."""
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    pairs = zip([1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b, strict=True)
    return [y if x == 1 else x for x, y in pairs]


def last_dim(value: ir.Value | None) -> int | None:
    """Returns the last dimension, if it is a known number."""
    shape = dims(value)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def only_user(value: ir.Value) -> ir.Node | None:
    """Returns the node that reads the value, if there is only one and it is not in a subgraph."""
    users, source = {use.node for use in value.uses()}, value.producer()
    if len(users) != 1 or value.is_graph_output():
        return None
    user = users.pop()
    return user if source is None or user.graph is source.graph else None


def is_read(value: ir.Value) -> bool:
    """Whether a node reads the value, or it is an output of the graph."""
    return bool(value.uses()) or value.is_graph_output()


def has_only(value: ir.Value | None, graph: ir.Graph | None, *op_types: str) -> bool:
    """Whether only nodes of these types in a graph, and none of its subgraphs, read a value. Then a constant
    goes where these nodes get another one: the model does not hold both."""
    if value is None or value.is_graph_output():
        return False
    return all(use.node.op_type in op_types and use.node.graph is graph for use in value.uses())


def other_input(node: ir.Node, value: ir.Value | None) -> ir.Value | None:
    """Returns the input of a node with two inputs that is not `value`."""
    first, second = node.inputs
    return second if first is value else first


def ints(node: ir.Node, attribute: str, index: int) -> list[int] | None:
    """Returns integers from an attribute or, in later opsets, from a constant input."""
    if attribute in node.attributes:
        value = node.attributes[attribute].value
        return [int(each) for each in value] if isinstance(value, Sequence) else [int(value)]
    found = constant(node.inputs[index]) if len(node.inputs) > index else None
    return None if found is None else [int(each) for each in found.reshape(-1)]


def part_of(value: ir.Value | None, axis: int) -> tuple[ir.Value, int, int] | None:
    """Returns the tensor that a value is a part of along one axis, and where the part starts and stops: the
    bounds count from 0. Slices with steps, along other axes or with unknown bounds are no such parts."""
    node = producer(value, "Slice", "Split")
    source, shape = (node.inputs[0], dims(node.inputs[0])) if node is not None else (None, None)
    if node is None or value is None or source is None or not shape:
        return None
    rank, size = len(shape), shape[axis]
    on_axis = axis % rank, axis % rank - rank
    widths = [(dims(output) or [None] * rank)[axis] for output in node.outputs]
    if node.op_type == "Split":
        index = list(node.outputs).index(value)
        known = [width for width in widths[: index + 1] if isinstance(width, int)]
        if attribute(node, "axis", 0) not in on_axis or len(known) <= index:
            return None
        return source, sum(known[:-1]), sum(known)
    starts, stops, axes = (ints(node, name, i) for i, name in enumerate(("starts", "ends", "axes"), 1))
    has_steps = len(node.inputs) > 4 and node.inputs[4] is not None
    if axes is None or len(axes) != 1 or axes[0] not in on_axis or not isinstance(size, int):
        return None
    if has_steps and ints(node, "steps", 4) != [1]:
        return None
    # ONNX clamps bounds as Python does. torch computes some of them from shapes.
    start, stop, _ = slice(starts and starts[0], stops and stops[0]).indices(size)
    if starts is None or stops is None:
        [width] = widths
        if not isinstance(width, int) or (starts is None and stops is None):
            return None
        start, stop = (stop - width, stop) if starts is None else (start, start + width)
    return source, start, max(start, stop)


def whole_of(values: Sequence[ir.Value | None], axis: int) -> ir.Value | None:
    """Returns the tensor that values together are, each the `part_of` it that follows the one before."""
    whole, end = None, 0
    for value in values:
        part = part_of(value, axis)
        if part is None or whole not in (None, part[0]) or part[1] != end:
            return None
        whole, _, end = part
    return whole if (dims(whole) or [None])[axis] == end else None


def element_of(value: ir.Value | None, axis: int) -> tuple[ir.Value, int] | None:
    """Returns x and index of x[..., index, ...] along an axis: a Gather, or Squeeze of a `part_of` x."""
    gather, squeeze = producer(value, "Gather"), producer(value, "Squeeze")
    source, index, axes = None, None, None
    if gather is not None and dims(gather.inputs[1]) == []:
        source, index, axes = gather.inputs[0], scalar(gather.inputs[1]), [attribute(gather, "axis", 0)]
    elif squeeze is not None and (part := part_of(squeeze.inputs[0], axis)) is not None:
        source, index, axes = part[0], part[1], ints(squeeze, "axes", 1)
    if source is None or index is None or not (size := rank(source)):
        return None
    return (source, int(index)) if axes in ([axis % size], [axis % size - size]) else None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Returns the attribute's value, or the default."""
    return node.attributes[name].value if name in node.attributes else default


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the subgraphs of an If, Loop or Scan."""
    if not node.attributes:  # most nodes, for which this is asked often
        return []
    return [each.as_graph() for each in node.attributes.values() if each.type is ir.AttributeType.GRAPH]


# ------------------------------------------------------------------------------------ new nodes


def add(
    before: ir.Node,
    op_type: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    dtype: ir.DataType | None = None,
    shape: Dims | None = None,
) -> ir.Value:
    """Inserts a node with one output before another node, and returns the output. By default it has the dtype
    that the operator makes of its inputs' dtypes, and the shape that elementwise ones make of shapes."""
    first = inputs[0] if inputs else None
    kind = dtype or (first.dtype if first is not None else None)
    if op_type == "Cast" and attributes is not None:
        kind = ir.DataType(attributes["to"])
    elif op_type == "Where" and inputs[1] is not None:
        kind = inputs[1].dtype
    else:
        kind = _RESULTS.get(op_type, kind)
    if shape is None and op_type in _ELEMENTWISE:
        shape = reduce(broadcast_dims, map(dims, inputs))
    like = ir.Value(
        type=None if kind is None else ir.TensorType(kind), shape=None if shape is None else ir.Shape(shape)
    )
    [result] = add_like(before, op_type, inputs, attributes, [like], domain=domain)
    return result


def add_like(
    before: ir.Node,
    op_type: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None,
    likes: Sequence[ir.Value],
    *,
    domain: str = "",
) -> Sequence[ir.Value]:
    """Inserts a node before another one, and returns its outputs, with the types and shapes of `likes`."""
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    node = ir.node(op_type, given, dict(attributes or {}), domain=domain, num_outputs=len(likes))
    _mark_like(node, before)
    assert before.graph is not None
    for value, like in zip(node.outputs, likes, strict=True):
        value.name, value.type, value.shape = _new_name(before.graph), like.type, like.shape
    before.graph.insert_before(before, node)
    if domain:
        before.graph.opset_imports.setdefault(domain, 1)
    return node.outputs


def reserve_names(model: ir.Model) -> None:
    """Reserves names for new values, which else could get the name of one of the original that is gone."""
    names = {str(value.name) for node in model.graph.all_nodes() for value in node.outputs}
    names.update(str(value.name) for value in model.graph.inputs)
    start = "new_"
    while any(name.startswith(start) for name in names):
        start = f"_{start}"
    model.graph.meta[_NEW] = start, 0, names


def _new_name(graph: ir.Graph) -> str | None:
    """Returns a name that no value has had, or None for a subgraph."""
    if _NEW not in graph.meta:
        return None
    start, index, names = graph.meta[_NEW]
    graph.meta[_NEW] = start, index + 1, names
    return f"{start}{index}"


def transpose(before: ir.Node, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
    shape = dims(value)
    swapped = None if shape is None else [shape[axis] for axis in permutation]
    return add(before, "Transpose", [value], {"perm": [*permutation]}, shape=swapped)


def reshape(before: ir.Node, value: ir.Value, target: Sequence[int], shape: Dims | None = None) -> ir.Value:
    """Inserts a Reshape before a node; by default the output has the sizes of `target` that are numbers, not
    0 or -1."""
    known = [size if size > 0 else None for size in target] if shape is None else shape
    return add(before, "Reshape", [value, int_constant(before, target)], shape=known)


def columns(before: ir.Node, value: ir.Value, start: int, stop: int) -> ir.Value:
    """Inserts a Slice of the last dimension before a node."""
    bounds = [int_constant(before, [each]) for each in (start, stop, -1)]
    return add(before, "Slice", [value, *bounds], shape=[*(dims(value) or [])[:-1], stop - start])


def scalar_constant(before: ir.Node, number: float, like: ir.Value) -> ir.Value:
    """Inserts a constant with the dtype of a value before a node."""
    assert like.dtype is not None
    return _constant(before, ir.tensor(number, dtype=like.dtype))


def int_constant(before: ir.Node, numbers: int | Sequence[int]) -> ir.Value:
    return _constant(before, ir.tensor(np.array(numbers, np.int64)))


def _constant(before: ir.Node, tensor: ir.TensorProtocol) -> ir.Value:
    shape = tuple(tensor.shape.numpy())
    value = add(before, "Constant", [], {"value": tensor}, dtype=tensor.dtype, shape=shape)
    value.const_value = tensor
    return value


def length(before: ir.Node, value: ir.Value | None, axis: int = 1) -> ir.Value:
    """Computes [S], the size of an axis of a value, by default of [B, S, ...], before a node."""
    return add(before, "Shape", [value], {"start": axis, "end": axis + 1}, shape=[1])


def initializer(graph: ir.Graph, array: np.ndarray | ir.TensorProtocol, prefix: str) -> ir.Value:
    """Adds an initializer with a unique name that starts with `prefix`."""
    taken = graph.meta[_NEW][2] if _NEW in graph.meta else ()
    names = (f"{prefix}_{index}" for index in count())
    name = next(each for each in names if each not in graph.initializers and each not in taken)
    if isinstance(array, (np.ndarray, np.generic)):
        array = ir.tensor(in_c_order(array), name=name)
    value = ir.val(name, const_value=array)
    graph.register_initializer(value)
    return value


def share_constants(graph: ir.Graph) -> None:
    """Makes equal initializers one: layers that share a weight share what rewrites have made of it."""
    known: dict[tuple[object, ...], list[tuple[ir.Value, ir.TensorProtocol]]] = {}
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or value.is_graph_output() or not tensor.size:
            continue
        if tensor.dtype is ir.DataType.STRING:
            continue
        alike = known.setdefault((tensor.dtype, sizes(tensor), sample(tensor)), [])
        for other, known_tensor in alike:
            if same(known_tensor, tensor):
                ir.convenience.replace_all_uses_with(value, other)
                del graph.initializers[str(value.name)]
                break
        else:
            alike.append((value, tensor))


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replaces a value for all its readers, and removes nodes that nothing reads any more. The new one gets
    the old one's name, unless it is an input, an output or an initializer: values of one name in the original
    and in a rewritten graph have the same numbers."""
    node = maker(old)
    _mark_like(new.producer(), node)
    is_fixed = new.is_graph_output() or new.is_graph_input() or new.is_initializer()
    if old.is_graph_output():
        new, is_fixed = add(node, "Identity", [new], shape=dims(new)) if is_fixed else new, False
        new.doc_string = old.doc_string
        new.metadata_props.update(old.metadata_props)
    if not is_fixed:
        old.name, new.name = f"{old.name}_before", old.name
    if new.shape is None or None in (dims(new) or ()):
        new.shape = old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    prune(node)


def is_border(node: ir.Node) -> bool:
    """Whether a node is a Sum of one value: what reads it has 16 bits in the file, and the value has fp32."""
    return node.op_type == "Sum" and len(node.inputs) == 1 and not node.domain and FP32 not in node.meta


def has_precision_of(node: ir.Node, user: ir.Node) -> bool:
    """Whether a node may be fused with one that reads it: not if only the latter is computed in fp32."""
    return FP32 in node.meta or FP32 not in user.meta


def _mark_like(node: ir.Node | None, other: ir.Node) -> None:
    if node is not None and FP32 in other.meta:
        node.meta.setdefault(FP32, other.meta[FP32])


@contextmanager
def keeping_marks(model: ir.Model) -> Iterator[None]:
    """Marks nodes that a pass puts in the place of others with marks: the names of values stay."""
    marked = {value.name: node for node in model.graph if FP32 in node.meta for value in node.outputs}
    yield
    for node in model.graph:
        for value in node.outputs:
            if value.name in marked:
                _mark_like(node, marked[value.name])


def prune(node: ir.Node | None) -> None:
    """Removes a node that nothing reads, and then the nodes that only it has read."""
    if node is None or node.graph is None or any(map(is_read, node.outputs)):
        return
    inputs = [value for value in node.inputs if value is not None]
    node.graph.remove(node, safe=True)
    for value in inputs:
        prune(value.producer())
