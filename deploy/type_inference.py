"""Infers types and sizes: element types at custom nodes by ONNX's own inference, sizes from weights."""

import atexit
import threading
from collections.abc import Mapping

import onnx

from twinop.record.op_schema import make_schema
from twinop.record.op_spec import OpSpec

from .custom_nodes import CustomNode, custom_nodes, is_custom

# A domain of this module alone, so that its schemas replace none of the libraries' domains.
_DOMAIN = "twinop.check"
_lock = threading.Lock()
_KEEP_SHAPE = ("Add", "Cast", "Div", "Identity", "Mul", "Relu", "Sub")
"""Operators whose output has the shape of their first input, unless the other one has more dimensions."""


def typed_nodes(proto: onnx.ModelProto, records: Mapping[tuple[str, str], OpSpec]) -> list[CustomNode]:
    """Returns the model's custom nodes, in the order of `custom_nodes`, with inferred types added.

    Args:
        proto: a model without large weights.
        records: the libraries' records by `OpSpec.node_type`.
    """
    plain = list(custom_nodes(proto))
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in custom_nodes(copy):
        if record := records.get(node.node_type):
            node.proto.op_type = _registered(record)
            node.proto.domain = _DOMAIN
    for opsets in (copy.opset_import, *(function.opset_import for function in copy.functions)):
        opsets.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    try:
        inferred = onnx.shape_inference.infer_shapes(copy)
    except Exception:  # a broken model: ONNX Runtime says what is wrong with it
        return plain
    typed = custom_nodes(inferred, lambda node: node.domain == _DOMAIN or is_custom(node))
    return [CustomNode(node.proto, node.label, found.types) for node, found in zip(plain, typed, strict=True)]


def sizes_of_weights(proto: onnx.ModelProto) -> dict[str, int]:
    """Returns the sizes that weights fix by the names of inputs' dimensions, such as channels."""
    weights = {tensor.name: list(tensor.dims) for tensor in proto.graph.initializer}
    shapes = {
        value.name: [dim.dim_param or None for dim in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
    }
    found = dict[str, int]()
    for node in proto.graph.node:
        dims, weight = shapes.get(next(iter(node.input), "")), weights.get("".join(node.input[1:2]))
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        if not dims:
            continue
        if node.op_type in _KEEP_SHAPE:
            shapes[node.output[0]] = dims
        if not weight or len(weight) < 2:
            continue
        name, size = dims[-1], weight[-2]
        if node.op_type == "Gemm":
            name, size = dims[0 if given.get("transA") else -1], weight[1 if given.get("transB") else 0]
        elif node.op_type in ("Conv", "ConvTranspose") and len(dims) > 1:
            size = weight[1] * given.get("group", 1) if node.op_type == "Conv" else weight[0]
            name = dims[1]
        elif node.op_type != "MatMul":
            continue
        found |= {name: size} if name else {}
    return found


def _registered(record: OpSpec) -> str:
    """Registers the record's schema once per process and returns its name in `_DOMAIN`."""
    name = f"{record.namespace}_{record.onnx_name}_{record.schema_hash}"
    with _lock:
        if not onnx.defs.has(name, _DOMAIN):
            onnx.defs.register_schema(make_schema(record, name, _DOMAIN, 1, strict=False))
            # Up to onnx 1.22, a process with a schema left at its end hangs or crashes.
            atexit.register(onnx.defs.deregister_schema, name, 1, _DOMAIN)
    return name
