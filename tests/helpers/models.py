"""Builds small .onnx models around custom nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from twinop.record.dtypes import ELEMENT_TYPES
from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION, OpSpec

ORT_VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
BINDS_BFLOAT16 = ORT_VERSION >= (1, 20)
Shape = Sequence[int | str | None] | None  # None: unknown rank
ROWS = ("N", 4)


def value(name: str, dtype: str = "float32", shape: Shape = ROWS) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], shape)


def node(
    op_type: str,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    name: str = "node",
    domain: str = DOMAIN,
    **attributes: Any,
) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *,
    initializers: Mapping[str, np.ndarray] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    metadata: Mapping[str, str] | None = None,
    custom_version: int = DOMAIN_VERSION,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, custom_version)]
    opsets += [helper.make_opsetid(domain, 1) for domain in domains]
    result = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)
    helper.set_model_props(result, dict(metadata or {}))
    return result


def make_model(
    op_type: str,
    dtype: str = "float32",
    shape: Shape = ROWS,
    *,
    inputs: Sequence[str] = ("x",),
    metadata: Mapping[str, str] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """One custom node. All inputs have `shape`, "" is an absent one; outputs but relu's have unknown rank."""
    if op_type == "CustomDoubleAndSum":
        outputs = [value("doubled", dtype, None), value("total", dtype, None)]
    else:
        outputs = [value("y", dtype, shape if op_type == "CustomRelu" else None)]
    only = node(op_type, inputs, [each.name for each in outputs], **attributes)
    given = [value(name, dtype, shape) for name in dict.fromkeys(inputs) if name]
    return model([only], given, outputs, metadata=metadata)


def chain(op_type: str, length: int, dtype: str = "float32", shape: Shape = ROWS) -> onnx.ModelProto:
    """`length` nodes of one input and one output, x -> ... -> y."""
    names = ["x", *(f"t{i}" for i in range(1, length)), "y"]
    nodes = [node(op_type, [names[i]], [names[i + 1]], f"node{i}") for i in range(length)]
    return model(nodes, [value("x", dtype, shape)], [value("y", dtype, shape)])


def function(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    domain: str = DOMAIN,
    attributes: Sequence[str] = (),
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_function(domain, name, inputs, outputs, nodes, opsets, attributes)


def relu_body() -> onnx.FunctionProto:
    """The function body of CustomRelu: what runs where no library is registered."""
    return function("CustomRelu", [node("Relu", domain="")])


def exported_by(record: OpSpec, version: str = "0.1.0") -> dict[str, str]:
    """The metadata that an export writes."""
    return {"twinop.version": version, f"twinop.schema.{record.onnx_name}": record.schema_hash}


REFUSED = {  # valid models that ONNX Runtime 1.23 to 1.32 breaks when it optimizes them
    "to open": "(float[N, 1] x) => (float[N, 1] y) <float one = {1.0}, float zero = {0.0}> {"
    " m = Identity (x) f = Div (one, one) w = Mul (m, f) y = Add (w, zero) }",
    "to run": "(float[N, 1] x) => (float[N, 2] y) <float two = {2.0}, int64[1] axes = {-1},"
    " float eps = {0.00001}, float[2] scale = {0.5, 2.0}> { p = Pow (x, two)"
    " m = ReduceMean <keepdims: int = 1> (p, axes) a = Add (m, eps) s = Sqrt (a) d = Div (x, s)"
    " y = Mul (d, scale) }",
}


def refused(what: str) -> onnx.ModelProto:
    """Makes one of `REFUSED`."""
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {REFUSED[what]}')
