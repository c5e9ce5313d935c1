"""Declares records to ONNX: attribute types and values, `onnx.defs.OpSchema`, type and shape inference."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError

from ..errors import RecordError
from .call_checks import check_attributes, check_shapes
from .dtypes import ELEMENT_TYPES, dtype_name, onnx_name
from .op_spec import Attribute, OpSpec
from .shapes import Unknown, output_shapes

Dims = Sequence[int | Unknown] | None
"""The sizes of a tensor, or None for an unknown rank."""

ATTRIBUTE_TYPES = {
    "int": AttributeProto.INT,
    "bool": AttributeProto.INT,
    "float": AttributeProto.FLOAT,
    "str": AttributeProto.STRING,
    "int[]": AttributeProto.INTS,
}
"""ONNX's type of each kind of attribute. ONNX has no bool: it is an int, 0 or 1."""


def onnx_value(attribute: Attribute, value: Any) -> int | float | str | tuple[int, ...]:
    """Returns an attribute's value as ONNX holds it: floats rounded to fp32, bools as ints.

    TypeError, ValueError: the value is not a constant of the attribute's kind.
    """
    match attribute.kind:
        case "float":
            return float(np.float32(value))
        case "str":
            return value.decode() if isinstance(value, bytes) else str(value)
        case "int[]":
            return tuple(int(entry) for entry in value)
        case _:
            return int(value)


def default_of(attribute: Attribute) -> Any:
    """Returns the default as ONNX holds it, or None for a required attribute."""
    return None if attribute.required else onnx_value(attribute, attribute.default)


@functools.cache
def op_schema(record: OpSpec) -> OpSchema:
    """Returns the op as ONNX declares ops: inputs, attributes with defaults, type and shape inference."""
    return make_schema(record, record.onnx_name, record.domain, record.domain_version)


def make_schema(record: OpSpec, name: str, domain: str, version: int, *, strict: bool = True) -> OpSchema:
    """Makes an `OpSchema` of a record under any name and domain.

    If `strict`, inference raises an error for a node that does not fit the record. Otherwise it infers what
    it can.
    """
    variables: dict[tuple[str, ...], str] = {}  # tensors whose dtypes always agree share a type variable

    def variable(tensor: str) -> str:
        dtypes = tuple(combination[tensor] for combination in record.combinations)
        return variables.setdefault(dtypes, f"T{len(variables) or ''}")

    option = OpSchema.FormalParameterOption
    inputs = []
    for entry in record.inputs:
        kind = option.Optional if entry.optional else option.Single
        inputs.append(OpSchema.FormalParameter(entry.name, variable(entry.name), param_option=kind))
    outputs = [OpSchema.FormalParameter(output, variable(output)) for output in record.outputs]
    schema = OpSchema(
        name,
        domain,
        version,
        doc=record.schema,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[
            (each, [onnx_name(dtype) for dtype in dict.fromkeys(dtypes)], "")
            for dtypes, each in variables.items()
        ],
        attributes=[_schema_attribute(entry) for entry in record.attributes],
    )
    schema.set_type_and_shape_inference_function(functools.partial(_infer_node, record, strict))
    return schema


def _schema_attribute(attribute: Attribute) -> OpSchema.Attribute:
    kind = ATTRIBUTE_TYPES[attribute.kind]
    if attribute.required:
        name = AttributeProto.AttributeType.Name(kind)
        return OpSchema.Attribute(attribute.name, getattr(OpSchema.AttrType, name), required=True)
    default = onnx.helper.make_attribute(attribute.name, default_of(attribute), attr_type=kind)
    return OpSchema.Attribute(attribute.name, default)


def infer_outputs(
    record: OpSpec, inputs: Mapping[str, tuple[str, Dims]], attributes: Mapping[str, Any]
) -> dict[str, tuple[str, Dims]]:
    """Infers the dtype and the dimensions of each output.

    `inputs`: dtype, which may be "", not known, and dimensions of those that are present; `attributes`: all
    of them. RecordError: the dtypes or sizes do not fit the op.
    """
    dtypes = {name: dtype for name, (dtype, _) in inputs.items() if dtype}
    combination = record.combination_of(dtypes)
    if combination is None:
        described = ", ".join(f"{name}: {dtype}" for name, dtype in dtypes.items())
        raise RecordError(f"{record.onnx_name} does not take {described}; expected one of: {record.dtypes}")
    given = {entry.name: inputs[entry.name][1] if entry.name in inputs else None for entry in record.inputs}
    known = {name: dims for name, dims in given.items() if dims is not None or name not in inputs}
    try:
        check_attributes(record, attributes)
        check_shapes(record, known, attributes)
    except RecordError as error:
        raise RecordError(f"{record.onnx_name}: {error}") from error
    shapes: Mapping[str, Dims] = dict.fromkeys(record.outputs)
    try:
        shapes = output_shapes(record, known, attributes)
    except RecordError:
        sizes = [size for dims in known.values() for size in dims or ()]
        if len(known) == len(given) and not any(isinstance(size, Unknown) for size in sizes):
            raise
    return {name: (combination[name], shapes[name]) for name in record.outputs}


def _infer_node(record: OpSpec, strict: bool, context: InferenceContext) -> None:
    """Infers a node's outputs for onnx's own shape inference."""
    inputs: dict[str, tuple[str, Dims]] = {}
    for i, entry in enumerate(record.inputs):
        if i < context.get_num_inputs() and context.has_input(i):
            inputs[entry.name] = _type_of(context.get_input_type(i))
    dtypes = {name: dtype for name, (dtype, _) in inputs.items() if dtype}
    if not dtypes:
        return
    try:
        attributes = {}
        for attribute in record.attributes:
            proto = context.get_attribute(attribute.name)
            attributes[attribute.name] = (
                default_of(attribute)
                if proto is None
                else onnx_value(attribute, onnx.helper.get_attribute_value(proto))
            )
        outputs = infer_outputs(record, inputs, attributes)
    except (RecordError, TypeError, ValueError) as error:
        if strict:
            raise InferenceError(f"{record.onnx_name}: {error}") from error
        combination = record.combination_of(dtypes) or {}
        outputs = {name: (combination[name], None) for name in record.outputs if name in combination}
    for i, (dtype, dims) in enumerate(outputs.values()):
        if i < context.get_num_outputs():
            sizes = None if dims is None else [d.name if isinstance(d, Unknown) else d for d in dims]
            context.set_output_type(i, onnx.helper.make_tensor_type_proto(ELEMENT_TYPES[dtype], sizes))


def _type_of(value: onnx.TypeProto | None) -> tuple[str, Dims]:
    if value is None or not value.tensor_type.elem_type:
        return "", None
    tensor = value.tensor_type
    dims: Dims = [
        dim.dim_value if dim.HasField("dim_value") else Unknown(dim.dim_param or None)
        for dim in tensor.shape.dim
    ]
    return dtype_name(tensor.elem_type), dims if tensor.HasField("shape") else None
