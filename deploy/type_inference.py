"""Element types behind custom nodes: ONNX's own inference, taught the ops of the records."""

import threading
from collections.abc import Mapping
from typing import Any

import onnx
from onnx import defs, shape_inference

from twinop.deploy.custom_nodes import CustomNode, custom_nodes, is_custom
from twinop.deploy.dtypes import dtype_name
from twinop.record import Record

# A domain of our own: registering here disturbs no schema that others registered for the libraries' domains.
_DOMAIN = "twinop.check"
_ANY = sorted(f"tensor({name.lower()})" for name in onnx.TensorProto.DataType.keys() if name != "UNDEFINED")  # noqa: SIM118
_known: set[str] = set()
_lock = threading.Lock()


def typed_nodes(proto: onnx.ModelProto, records: Mapping[tuple[str, str], Record]) -> list[CustomNode]:
    """The model's custom nodes, in the order of `custom_nodes`, with the types that inference adds.

    Args:
        proto: a model without large weights.
        records: the libraries' records by `Record.node_type`.
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
        inferred = shape_inference.infer_shapes(copy)
    except Exception:  # a broken model: ONNX Runtime says what is wrong with it
        return plain
    return [
        CustomNode(node.proto, node.label, found.types)
        for node, found in zip(
            plain, custom_nodes(inferred, lambda node: node.domain == _DOMAIN or is_custom(node)), strict=True
        )
    ]


def _registered(record: Record) -> str:
    """Registers the record's schema once per process; returns the name it has in `_DOMAIN`."""
    name = f"{record.namespace}_{record.onnx_name}_{record.schema_hash}"
    with _lock:
        if name not in _known:
            defs.register_schema(_schema(name, record))
            _known.add(name)
    return name


def _schema(name: str, record: Record) -> Any:
    parameter = defs.OpSchema.FormalParameter
    option = defs.OpSchema.FormalParameterOption
    inputs = [
        parameter(
            entry.name,
            f"I{i}",
            param_option=option.Variadic
            if entry.repeated
            else (option.Optional if entry.optional else option.Single),
        )
        for i, entry in enumerate(record.inputs)
    ]
    outputs = [parameter(output, f"O{i}") for i, output in enumerate(record.outputs)]
    constraints = [(entry.type_str, _ANY, "") for entry in (*inputs, *outputs)]
    schema = defs.OpSchema(name, _DOMAIN, 1, inputs=inputs, outputs=outputs, type_constraints=constraints)

    def infer(context: Any) -> None:
        given = {}
        for i in range(min(context.get_num_inputs(), len(record.inputs))):
            value = context.get_input_type(i)
            if value is not None and value.tensor_type.elem_type:
                given[record.inputs[i].name] = dtype_name(value.tensor_type.elem_type)
        combination = record.combination_of(given) if given else None
        if combination is None:
            return
        for i in range(min(context.get_num_outputs(), len(record.outputs))):
            output = onnx.TypeProto()
            output.tensor_type.elem_type = _element(combination[record.outputs[i]])
            context.set_output_type(i, output)

    schema.set_type_and_shape_inference_function(infer)
    return schema


def _element(name: str) -> int:
    return next(value for value in onnx.TensorProto.DataType.values() if value and dtype_name(value) == name)
