"""Translates records to the types of `onnx_ir`, and registers their schemas with onnx."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir

from twinop.errors import ExportError
from twinop.record.dtypes import ELEMENT_TYPES
from twinop.record.op_schema import ATTRIBUTE_TYPES as ATTRIBUTE_NUMBERS
from twinop.record.op_schema import onnx_value as constant_value
from twinop.record.op_schema import op_schema
from twinop.record.op_spec import Attribute, OpSpec

ONNX_TYPES = {name: ir.DataType(element) for name, element in ELEMENT_TYPES.items()}
"""The element types by the names that records use."""

ATTRIBUTE_TYPES = {kind: ir.AttributeType(number) for kind, number in ATTRIBUTE_NUMBERS.items()}
"""ONNX's type of each kind of attribute."""


def onnx_value(attribute: Attribute, value: Any) -> int | float | str | tuple[int, ...]:
    """Returns an attribute's value as ONNX holds it; ExportError: it depends on an input's size."""
    try:
        return constant_value(attribute, value)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"attribute {attribute.name} depends on the input: {value}. ONNX attributes are constants: "
            "pass a number, or make the axis that it comes from static"
        ) from error


@contextmanager
def registered_schemas(records: Iterable[OpSpec]) -> Iterator[None]:
    """Makes the ops known to onnx's checker and shape inference within its block."""
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
