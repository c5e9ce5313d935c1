"""Infers element types at custom nodes by ONNX's own inference."""

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


def _registered(record: OpSpec) -> str:
    """Registers the record's schema once per process and returns its name in `_DOMAIN`."""
    name = f"{record.namespace}_{record.onnx_name}_{record.schema_hash}"
    with _lock:
        if not onnx.defs.has(name, _DOMAIN):
            onnx.defs.register_schema(make_schema(record, name, _DOMAIN, 1, strict=False))
            # Up to onnx 1.22, a process with a schema left at its end hangs or crashes.
            atexit.register(onnx.defs.deregister_schema, name, 1, _DOMAIN)
    return name
