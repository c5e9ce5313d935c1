"""Infers symbolic shapes with ONNX Runtime's inference, which can compute with symbolic sizes.

onnx's own inference does not, also with `data_prop`. With it alone, the rewrites no longer recognise models
of the TorchScript exporter with open lengths, which compute shapes from sums and products of sizes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, reduce
from importlib.util import module_from_spec, spec_from_file_location
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import ShapeInferencePass

from . import graph as g

_LARGE = 1024  # elements; larger constants are not shapes
_BROADCASTS = (
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul",
    "Or", "Pow", "Sub", "Sum", "Where",
)  # fmt: skip
_SEQUENCES = {
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap", "SplitToSequence",
}  # fmt: skip


def infer_types(model: ir.Model, data_prop: bool = True) -> None:
    """Infers types and shapes as onnx does, in place. onnx_ir gives a sequence without a declared type that
    of its tensors: here it gets the right one."""
    graphs = [*model.graphs()]
    untyped = {value for graph in graphs for node in graph for value in node.outputs if value.type is None}
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=data_prop)(model)
    if any(node.op_type == "Attention" and not node.domain for node in model.graph):
        for value in (value for node in model.graph for value in node.outputs):
            if 0 in (found := g.dims(value) or ()):  # what onnx takes a width for that it does not know
                value.shape = ir.Shape([dim or None for dim in found])
    for graph in graphs[::-1]:  # bodies before their nodes
        for node in graph:
            likes = [value for value in node.inputs[:1] if value is not None and node.op_type == "Identity"]
            for body in g.subgraphs(node):
                likes = [*body.outputs][1 if node.op_type == "Loop" else 0 :]
            for index, value in enumerate(node.outputs):
                like = likes[index] if index < len(likes) and node.op_type != "SequenceMap" else None
                if value not in untyped or not isinstance(value.type, ir.TensorType):
                    continue
                if node.op_type in _SEQUENCES and not node.domain:
                    value.type = ir.SequenceType(value.type)
                elif like is not None and isinstance(like.type, ir.SequenceType):
                    value.type = like.type
    for node in model.graph.all_nodes():
        for body in g.subgraphs(node) if node.op_type == "Loop" else ():
            for value, given in zip(body.inputs[2:], node.inputs[2:], strict=True):
                value.type = given.type if given and isinstance(given.type, ir.SequenceType) else value.type


def infer_shapes(model: ir.Model, auto_merge: bool = True) -> None:
    """Gives the values of a model the shapes that the inference finds; see `_symbolic_shapes`."""
    small = model.clone()
    for name, value in list(small.graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _LARGE:
            del small.graph.initializers[name]
            value.const_value = None
            small.graph.inputs.append(value)
    for node in small.graph.all_nodes():
        for value in node.outputs:
            if any(dim is None or str(dim).startswith("unk_") for dim in g.dims(value) or ()):
                value.shape = None
    proto = ir.to_proto(small)
    given = {dim for value in model.graph.inputs for dim in g.dims(value) or () if isinstance(dim, str)}
    found, merged = _symbolic_shapes(proto, auto_merge)
    if found is None:  # it ends at a size that it cannot compute
        found, _ = _symbolic_shapes(proto, auto_merge=False, declared=proto.graph.value_info)
    elif any(name in given and (isinstance(into, int) or into in given) for name, into in merged.items()):
        found, _ = _symbolic_shapes(proto, auto_merge=False)  # in a sum, one of the two may be 1
    if found is None:
        return
    nodes = ir.from_proto(found).graph.all_nodes()
    inferred = {value.name: value for node in nodes for value in node.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            other = inferred.get(value.name)
            if other is not None and other.shape is not None:
                value.shape = other.shape
                value.type = value.type or other.type


def _symbolic_shapes(
    proto: onnx.ModelProto, auto_merge: bool, declared: Iterable[onnx.ValueInfoProto] = ()
) -> tuple[onnx.ModelProto | None, dict[str, str | int]]:
    """Returns a model with shapes, or None, and which names of dimensions were merged into others;
    `auto_merge`: two dimensions are one if they meet in a sum, unless both are sizes of inputs; `declared`:
    values whose shapes are believed."""
    inference, complete = _inference()(2**31 - 1, auto_merge, False, 0), False
    inference.declared_ = {each.name: each for each in declared if each.type.tensor_type.HasField("shape")}
    # These are the steps of its `infer_shapes`, which writes a file into the current folder if it fails.
    try:
        inference._preprocess(proto)
        while inference.run_:
            complete = inference._infer_impl()
    except Exception:  # the model keeps the shapes that it has
        return None, {}
    return inference.out_mp_ if complete else None, inference.suggested_merge_


def _take_declared(inference: Any, sympy: Any, node: onnx.NodeProto) -> None:
    """Gives the outputs of a node their declared shapes."""
    for declared in filter(None, map(inference.declared_.get, node.output)):
        inference.known_vi_[declared.name].CopyFrom(declared)
        for name in filter(None, (dim.dim_param for dim in declared.type.tensor_type.shape.dim)):
            symbol = sympy.Symbol(name, integer=True, nonnegative=True)
            inference.symbolic_dims_.setdefault(name, symbol)


def _infer_quantised_rows(inference: Any, node: onnx.NodeProto) -> None:
    """Infers GatherBlockQuantized of a table [rows, columns], perhaps two numbers a byte."""
    table, ids = (inference._get_shape(node, index) for index in (0, 1))
    values = [inference.known_vi_[node.input[index]].type.tensor_type.elem_type for index in (0, 2)]
    number = {"bits": 4, "gather_axis": 0} | {each.name: each.i for each in node.attribute}
    packs = 8 // number["bits"] if values[0] == onnx.TensorProto.UINT8 else 1
    if len(table) == 2 and number["gather_axis"] == 0:
        shape = [*ids, table[1] * packs]
        info = onnx.helper.make_tensor_value_info(node.output[0], values[1], shape)
        inference.known_vi_[node.output[0]].CopyFrom(info)


def _infer_split(inference: Any, infer: Callable[[Any], None], node: onnx.NodeProto) -> None:
    """Infers Split, also of sizes: ONNX Runtime's optimizer makes it of several Gathers from a shape."""
    infer(node)
    if isinstance(sizes := inference.sympy_data_.get(node.input[0]), list):
        for name in node.output:
            count = inference.known_vi_[name].type.tensor_type.shape.dim[0].dim_value
            inference.sympy_data_[name], sizes = sizes[:count], sizes[count:]


def _infer_power(inference: Any, node: onnx.NodeProto) -> None:
    """Infers Pow of a size and 2: torch's exporter counts the tokens of a square image so."""
    exponent = inference._try_get_value(node, 1)
    if isinstance(exponent, np.ndarray) and exponent.size == 1 and exponent.item() == 2:
        inference._compute_on_sympy_data(node, lambda values: values[0] ** 2)


def _infer_product(inference: Any, node: onnx.NodeProto) -> None:
    """Infers ReduceProd, also of sizes in a list to a list of one."""
    inference._infer_ReduceProd(node)
    keeps = all(each.i for each in node.attribute if each.name == "keepdims")
    if keeps and isinstance(sizes := inference.sympy_data_.get(node.input[0]), list):
        inference.sympy_data_[node.output[0]] = [prod(sizes)]


def _infer_resize(inference: Any, module: Any, node: onnx.NodeProto) -> None:
    """Infers Resize: to simplify nested sizes takes a minute, and whole factors are enough."""
    sympy = module.sympy

    def whole(size: Any) -> Any:
        numbers = [each for each in size.atoms(sympy.Float) if float(each).is_integer()]
        return size.xreplace({each: sympy.Integer(each) for each in numbers})

    module.sympy = SimpleNamespace(**{**vars(sympy), "simplify": whole})
    try:
        inference._infer_Resize(node)
    finally:
        module.sympy = sympy


def _infer_slice(inference: Any, module: Any, node: onnx.NodeProto) -> None:
    """Infers Slice: an end that may lie before the last row or not is not taken for the latter."""
    inference._infer_Slice(node)
    before = inference._get_shape(node, 0)
    after = inference.known_vi_[node.output[0]].type.tensor_type.shape
    ends, axes = (inference._try_get_value(node, index) for index in (2, 3))
    for axis, end in zip(axes if axes is not None else (), module.as_list(ends, True) or (), strict=False):
        dim = after.dim[axis]
        if not module.is_literal(end) and dim.dim_param == before[axis] != str(end):
            dim.dim_param = str(inference._new_symbolic_dim_from_output(node, 0, axis % len(before)))


def _infer_fused_matmul(inference: Any, node: onnx.NodeProto) -> None:
    """Infers FusedMatMul, whose matrices may be transposed. Where batches are, nothing is known."""
    flags, shapes = {each.name: each.i for each in node.attribute}, list[list[Any]]()
    for index, each in enumerate("AB"):
        *batch, rows, columns = inference._get_shape(node, index)
        shapes.append([*batch, columns, rows] if flags.get(f"trans{each}") else [*batch, rows, columns])
    if not flags.get("transBatchA") and not flags.get("transBatchB"):
        value, (a, b) = inference.known_vi_[node.output[0]], shapes
        shape = [*inference._broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1]]
        kind = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shape))


def _infer_state(inference: Any, node: onnx.NodeProto) -> None:
    """Infers CausalConvWithState and LinearAttention, whose second output is the state after the last token.
    Of LinearAttention's [B, T, H * D] the query has the heads, and the value their size."""
    numbers = {each.name: each.i for each in node.attribute}
    *outer, width = inference._get_shape(node, 0)
    if node.op_type == "LinearAttention":
        heads, kv_heads = numbers["q_num_heads"], numbers["kv_num_heads"]
        width = inference._get_shape(node, 2)[-1] // kv_heads * max(heads, kv_heads)
    for index, shape in enumerate([[*outer, width], inference._try_get_shape(node, 3)][: len(node.output)]):
        if shape is not None and node.output[index] and not (index and numbers.get("state_window")):
            kind = inference.known_vi_[node.input[3 * index]].type.tensor_type.elem_type
            info = onnx.helper.make_tensor_value_info(node.output[index], kind, shape)
            inference.known_vi_[node.output[index]].CopyFrom(info)


_INFER: Mapping[str, Callable[[Any, onnx.NodeProto], None]] = {
    "CausalConvWithState": _infer_state, "FusedMatMul": _infer_fused_matmul,
    "GatherBlockQuantized": _infer_quantised_rows, "LinearAttention": _infer_state,
    "Pow": _infer_power, "ReduceProd": _infer_product,
}  # fmt: skip


def _module() -> Any:
    """Returns ONNX Runtime's module of the inference. Its package imports torch where that is installed."""
    name = "onnxruntime.tools.symbolic_shape_infer"
    spec = spec_from_file_location(name, Path(onnxruntime.__file__).parent / "tools/symbolic_shape_infer.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _inference() -> Any:
    """Returns ONNX Runtime's inference, changed so that sizes of inputs stay apart where they are summed: one
    of the two may be 1. The sum's size has the names of both."""
    original = _module()

    class Inference(original.SymbolicShapeInference):  # type: ignore[name-defined]  # of a module without types
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for op_type, infer in _INFER.items():
                self.dispatcher_[op_type] = partial(infer, self)
            for op_type in _BROADCASTS:
                self.dispatcher_[op_type] = partial(self._broadcast, self.dispatcher_.get(op_type))
            self.dispatcher_["Resize"] = partial(_infer_resize, self, original)
            self.dispatcher_["Slice"] = partial(_infer_slice, self, original)
            self.dispatcher_["Split"] = partial(_infer_split, self, self._infer_Split)
            for op_type in ("GatedRMSNorm", "QMoE"):
                self.dispatcher_[op_type] = self._pass_on_shape_and_type
            del self.dispatcher_["ArrayFeatureExtractor"]  # of a row, the result has one row
            for op_type in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMin", "ReduceSumSquare"):
                self.dispatcher_[op_type] = self._infer_ReduceMean
            if not self.auto_merge_:
                for op_type, infer in self.dispatcher_.items():
                    self.dispatcher_[op_type] = partial(self._name_unknown, infer)

        def _name_unknown(self, infer: Callable[[Any], None], node: onnx.NodeProto) -> None:
            """Names each size that is not found: at one without a name the inference would end."""
            infer(node)
            _take_declared(self, original.sympy, node)
            for index, name in enumerate(node.output):
                shape = self.known_vi_[name].type.tensor_type.shape if name in self.known_vi_ else None
                for axis, dim in enumerate(shape.dim if shape is not None else ()):
                    if not dim.HasField("dim_value") and dim.dim_param not in self.symbolic_dims_:
                        dim.dim_param = str(self._new_symbolic_dim_from_output(node, index, axis))

        def _broadcast(self, infer: Callable[[Any], None] | None, node: onnx.NodeProto) -> None:
            if infer is not None:
                infer(node)
            shape = reduce(self._broadcast_shapes, (self._get_shape(node, i) for i in range(len(node.input))))
            value = self.known_vi_[node.output[0]]
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shape))

        def _broadcast_shapes(self, shape1: list[Any], shape2: list[Any]) -> list[Any]:
            one, two = list(shape1), list(shape2)
            for axis in range(-min(len(one), len(two)), 0):
                if one[axis] != two[axis] and (names := self._sizes_of_inputs(one[axis], two[axis])):
                    one[axis] = two[axis] = both = g.OR.join(names)
                    self.symbolic_dims_[both] = original.sympy.Symbol(both, integer=True, nonnegative=True)
            return super()._broadcast_shapes(one, two)

        def _check_merged_dims(self, dims: list[Any], allow_broadcast: bool = True) -> None:
            if not allow_broadcast or not self._sizes_of_inputs(*dims):
                super()._check_merged_dims(dims, allow_broadcast)

        def _sizes_of_inputs(self, *dims: Any) -> list[str]:
            """Returns the names of sizes of inputs that these dimensions are, or none."""
            names = {name for dim in dims for name in str(dim).split(g.OR)}
            return sorted(names) if names <= self.input_symbols_ else []

    return Inference
