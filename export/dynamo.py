"""Derives a translation of each op from its record, for `torch.onnx.export(dynamo=True)`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnxscript.values import Op, Opset

from twinop import torch_op
from twinop.model.schema import onnx_value
from twinop.record.op_schema import op_schema
from twinop.record.op_spec import OpSpec
from twinop.torch_op.arguments import bind, signature_of


def translation_table(
    records: Mapping[str, OpSpec] | None = None,
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Makes the `custom_translation_table` of `torch.onnx.export(..., dynamo=True)` for ops by name, by
    default those that `twinop.torch_op` has loaded."""
    records = torch_op.records() if records is None else records
    return {
        getattr(getattr(torch.ops, record.namespace), record.functional_name).default: _translation(record)
        for record in records.values()
        if not record.is_backward
    }


def _translation(record: OpSpec) -> Callable[..., Any]:
    # A bare `Op` in the table would mix up positional attributes (mode=0.001, eps="m"): bind them first.
    op = Op(Opset(record.domain, record.domain_version), record.onnx_name, op_schema(record))
    signature = signature_of(record)

    def translate(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(signature, args, kwargs)
        tensors = [arguments[entry.name] for entry in record.inputs]
        attributes = {entry.name: onnx_value(entry, arguments[entry.name]) for entry in record.attributes}
        return op(*tensors, **attributes)

    translate.__name__ = record.name
    return translate
