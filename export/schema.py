"""A record as ONNX sees it: element types, attributes, `onnx.defs.OpSchema`, and type and shape inference."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.defs import OpSchema

from twinop.call_checks import check_attributes, check_shapes
from twinop.errors import ExportError, RecordError
from twinop.record import Attribute, Record
from twinop.shapes import Unknown

ONNX_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float64": ir.DataType.DOUBLE,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
    "int8": ir.DataType.INT8,
    "int16": ir.DataType.INT16,
    "uint8": ir.DataType.UINT8,
    "uint16": ir.DataType.UINT16,
    "uint32": ir.DataType.UINT32,
    "uint64": ir.DataType.UINT64,
}
"""A record's dtype names. ONNX's own names are the enumerators' in lower case: tensor(double)."""

DTYPE_NAMES = {data_type: name for name, data_type in ONNX_TYPES.items()}

ATTRIBUTE_TYPES = {
    "int": ir.AttributeType.INT,
    "bool": ir.AttributeType.INT,
    "float": ir.AttributeType.FLOAT,
    "str": ir.AttributeType.STRING,
    "int[]": ir.AttributeType.INTS,
}
"""ONNX's type of each kind of attribute."""


def onnx_value(attribute: Attribute, value: Any) -> int | float | str | tuple[int, ...]:
    """An attribute's value as ONNX holds it: floats narrowed to fp32, bools as ints.

    Raises:
        ExportError: the value is not a constant (it depends on an input's size).
    """
    try:
        match attribute.kind:
            case "float":
                return float(np.float32(value))
            case "str":
                return str(value)
            case "int[]":
                return tuple(int(entry) for entry in value)
            case _:
                return int(value)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"attribute {attribute.name} depends on the input: {value}. ONNX attributes are constants: "
            "pass a number, or leave the axis that it comes from out of the dynamic ones"
        ) from error


def default_of(attribute: Attribute) -> Any:
    """The default as ONNX holds it, or None."""
    return None if attribute.required else onnx_value(attribute, attribute.default)


def combination_of(record: Record, given: Mapping[str, str], where: str) -> dict[str, str]:
    """The record's first dtype combination that the dtypes given (by tensor name) fit.

    Raises:
        ExportError: there is none.
    """
    if combination := record.combination_of(given):
        return combination
    described = ", ".join(f"{name}: {dtype}" for name, dtype in given.items())
    raise ExportError(
        f"{where}: {record.onnx_name} does not take {described}; expected one of: {record.dtypes}"
    )


@functools.cache
def op_schema(record: Record) -> OpSchema:
    """The op as ONNX declares ops: inputs, attributes with defaults, types, type and shape inference."""
    variables: dict[tuple[str, ...], str] = {}  # tensors whose dtypes always agree share a type variable

    def variable(name: str) -> str:
        dtypes = tuple(combination[name] for combination in record.combinations)
        return variables.setdefault(dtypes, f"T{len(variables) or ''}")

    option = OpSchema.FormalParameterOption
    inputs = [
        OpSchema.FormalParameter(
            entry.name,
            variable(entry.name),
            param_option=option.Variadic
            if entry.repeated
            else (option.Optional if entry.optional else option.Single),
        )
        for entry in record.inputs
    ]
    outputs = [OpSchema.FormalParameter(name, variable(name)) for name in record.outputs]
    constraints = [
        (name, [f"tensor({ONNX_TYPES[dtype].name.lower()})" for dtype in dict.fromkeys(dtypes)], "")
        for dtypes, name in variables.items()
    ]
    schema = OpSchema(
        record.onnx_name,
        record.domain,
        record.domain_version,
        doc=record.schema,
        inputs=inputs,
        outputs=outputs,
        type_constraints=constraints,
        attributes=[_schema_attribute(entry) for entry in record.attributes],
    )
    schema.set_type_and_shape_inference_function(functools.partial(_infer_node, record))
    return schema


def _schema_attribute(attribute: Attribute) -> OpSchema.Attribute:
    kind = ATTRIBUTE_TYPES[attribute.kind]
    if attribute.required:
        return OpSchema.Attribute(attribute.name, getattr(OpSchema.AttrType, kind.name), required=True)
    default = ir.Attr(attribute.name, kind, default_of(attribute))
    return OpSchema.Attribute(attribute.name, ir.to_proto(default))


@contextmanager
def registered_schemas(records: Iterable[Record]) -> Iterator[None]:
    """Within it, onnx's checker and shape inference know the ops."""
    registered = []
    try:
        for record in records:
            if not onnx.defs.has(record.onnx_name, record.domain):
                onnx.defs.register_schema(op_schema(record))
                registered.append(record)
        yield
    finally:
        for record in registered:
            onnx.defs.deregister_schema(record.onnx_name, record.domain_version, record.domain)


# ------------------------------------------------------------------------------------ types and shapes


Dims = Sequence[int | Unknown] | None


def infer(
    record: Record, inputs: Mapping[str, tuple[str, Dims]], attributes: Mapping[str, Any], where: str
) -> dict[str, tuple[str, Dims]]:
    """Dtype and dimensions (None: unknown rank) of each output, from those of the inputs that are present.

    Raises:
        ExportError: the dtypes or sizes do not fit the op.
    """
    combination = combination_of(record, {name: dtype for name, (dtype, _) in inputs.items()}, where)
    given = {entry.name: inputs[entry.name][1] if entry.name in inputs else None for entry in record.inputs}
    known = {name: dims for name, dims in given.items() if dims is not None or name not in inputs}
    try:
        check_attributes(record, attributes)
        check_shapes(record, known, attributes)
    except RecordError as error:
        raise ExportError(f"{where}: {record.onnx_name}: {error}") from error
    shapes: Mapping[str, Dims] = dict.fromkeys(record.outputs)
    try:
        shapes = record.infer_shapes(known, attributes)
    except RecordError as error:
        if len(known) == len(given) and not any(
            isinstance(d, Unknown) for dims in known.values() if dims is not None for d in dims
        ):
            raise ExportError(f"{where}: {error}") from error
    return {name: (combination[name], shapes[name]) for name in record.outputs}


def _infer_node(record: Record, context: onnx.shape_inference.InferenceContext) -> None:
    """`infer` for onnx's own shape inference."""
    inputs: dict[str, tuple[str, Dims]] = {}
    for i, entry in enumerate(record.inputs):
        if i < context.get_num_inputs() and context.has_input(i):
            tensor = context.get_input_type(i).tensor_type
            data_type = ir.DataType(tensor.elem_type)
            dims: Dims = [
                dim.dim_value if dim.HasField("dim_value") else Unknown(dim.dim_param or None)
                for dim in tensor.shape.dim
            ]
            dtype = DTYPE_NAMES.get(data_type, data_type.name.lower())
            inputs[entry.name] = (dtype, dims if tensor.HasField("shape") else None)
    attributes = {}
    for attribute in record.attributes:
        proto = context.get_attribute(attribute.name)
        given = None if proto is None else ir.serde.deserialize_attribute(proto).value
        attributes[attribute.name] = default_of(attribute) if given is None else onnx_value(attribute, given)
    try:
        outputs = infer(record, inputs, attributes, record.onnx_name)
    except ExportError as error:
        raise onnx.shape_inference.InferenceError(str(error)) from error
    for i, (dtype, shape) in enumerate(outputs.values()):
        if i < context.get_num_outputs():
            sizes = None if shape is None else [d.name if isinstance(d, Unknown) else d for d in shape]
            context.set_output_type(i, onnx.helper.make_tensor_type_proto(ONNX_TYPES[dtype].value, sizes))
