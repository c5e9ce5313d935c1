"""Makes the model of an op's function body that a library carries to run the op on the CPU."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from twinop.errors import ExportError
from twinop.op_schema import default_of
from twinop.record import Record

from .attach import OPSETS
from .bodies import find_body
from .calls import make_call
from .record_body import trace
from .schema import ONNX_TYPES, onnx_value


def body_model(
    record: Record,
    dtypes: Mapping[str, str],
    present: Collection[str] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """Makes the model of a registered body, for inputs of any rank and all values of the attributes.

    Args:
        dtypes: one of the record's combinations.
        present: the names of the inputs that the op gets; by default all.
        attributes: the values of attributes for which alone the model is: those that the body reads with
            `.value` or `.values`.

    Returns:
        The bytes that `twinop_op.body` gives (`kernels/abi.h`).

    Raises:
        ExportError: the op has no body, the body does not fit the record, or it reads the value of an
            attribute that is not in `attributes`.
    """
    body = find_body(record.key)
    if body is None:
        raise ExportError(f"op {record.name} has no function body, which would run it on the CPU")
    body.check(record)
    present = [entry.name for entry in record.inputs] if present is None else present
    given = _Given(record, attributes or {})
    defaults = {entry.name: default_of(entry) for entry in record.attributes}
    call = replace(make_call(record, dtypes, present, defaults | given), attributes=given)
    return model_of(trace(body, [call], OPSETS[0]), record, dtypes, present)


def model_of(
    function: ir.Function, record: Record, dtypes: Mapping[str, str], present: Collection[str]
) -> bytes:
    """Makes the model of a function body, as `body_model` does.

    Args:
        function: `<domain>::<onnx_name>`, with all the record's inputs and with references to its attributes.
    """

    def values(names: Collection[str]) -> list[ir.Value]:
        return [ir.val(name, dtype=ONNX_TYPES[dtypes[name]]) for name in names]

    opsets = {**function.opset_imports, record.domain: record.domain_version}
    inputs = [entry.name for entry in record.inputs if entry.name in present]
    graph = ir.Graph(values(inputs), values(record.outputs), nodes=[], name="body", opset_imports=opsets)
    model = ir.Model(graph, ir_version=10, functions=[function])
    return ir.to_proto(model).SerializeToString()


class _Given(dict[str, Any]):
    """The attributes of a call whose other attributes are not known."""

    def __init__(self, record: Record, attributes: Mapping[str, Any]) -> None:
        kinds = {entry.name: entry for entry in record.attributes}
        super().__init__({name: onnx_value(kinds[name], value) for name, value in attributes.items()})
        self._name = record.name

    def __missing__(self, name: str) -> Any:
        raise ExportError(
            f"body {self._name} reads the value of {name}, and on the CPU one body serves all values. Pass "
            f"{name} to an operator, or give it choices"
        )
