"""Derives symbolic functions from the records, for `torch.onnx.export(dynamo=False)`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from twinop import torch_op
from twinop.model.schema import onnx_value
from twinop.record.op_schema import Dims, infer_outputs
from twinop.record.op_spec import OpSpec
from twinop.record.shapes import Unknown
from twinop.torch_op.arguments import signature_of

# torch's letters for a symbolic's arguments (`parse_args`) and for the attributes of `g.op` (`axis_i`).
_READ = {"int": "i", "float": "f", "bool": "b", "str": "s", "int[]": "is"}
_WRITE = {"int": "i", "float": "f", "bool": "i", "str": "s", "int[]": "i"}

_FIRST_OPSET = 9  # the exporter takes the newest symbolic that is not newer than the model's opset


def register_symbolics(records: Mapping[str, OpSpec] | None = None) -> None:
    """Registers ops, by default those that `twinop.torch_op` has loaded, for `torch.onnx.export(...,
    dynamo=False)`. A second call does no harm."""
    for record in (torch_op.records() if records is None else records).values():
        if not record.is_backward:
            torch.onnx.register_custom_op_symbolic(record.torch_name, _symbolic(record), _FIRST_OPSET)
    torch.onnx.register_custom_op_symbolic("aten::copy", _copy, _FIRST_OPSET)


def _copy(g: Any, target: Any, source: Any, non_blocking: Any) -> Any:
    """The content of an input that an op has written (`torch_op/mutation.py`), which torch cannot export."""
    types = [(value.type().dtype(), value.type().sizes()) for value in (target, source)]
    if types[0] != types[1]:
        raise torch.onnx.errors.OnnxExporterError("aten::copy of another dtype or shape cannot be exported")
    return source


def _symbolic(record: OpSpec) -> Callable[..., Any]:
    inputs = [entry.name for entry in record.inputs]
    kinds = {entry.name: entry.kind for entry in record.attributes}
    signature = signature_of(record)

    def symbolic(g: Any, *values: Any) -> Any:
        arguments = signature.bind(*values).arguments  # the tracer passes all of them, in schema order
        tensors = [arguments[name] for name in inputs]
        tensors = [None if value is None or value.node().mustBeNone() else value for value in tensors]
        attributes = {entry.name: onnx_value(entry, arguments[entry.name]) for entry in record.attributes}
        lists = {name: list(value) for name, value in attributes.items() if isinstance(value, tuple)}
        written = {f"{name}_{_WRITE[kinds[name]]}": each for name, each in (attributes | lists).items()}
        outputs = g.op(
            f"{record.domain}::{record.onnx_name}",
            *(torch.onnx.symbolic_opset9.unused(g) if value is None else value for value in tensors),
            **written,
            outputs=len(record.outputs),
        )
        _set_types(record, dict(zip(inputs, tensors, strict=False)), attributes, outputs)
        return outputs

    # `parse_args` goes by the signature: it converts as many values as there are names.
    unique = "_".join(["g", *signature.parameters])  # an argument may be called g
    g = inspect.Parameter(unique, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    symbolic.__name__ = record.name
    parameters = [g, *signature.parameters.values()]
    symbolic.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    readers: list[Any] = [_READ[kinds[name]] if name in kinds else "v" for name in signature.parameters]
    return torch.onnx.symbolic_helper.parse_args(*readers)(symbolic)


def _set_types(
    record: OpSpec, tensors: Mapping[str, Any], attributes: Mapping[str, Any], outputs: Any
) -> None:
    """Sets the types and sizes of the outputs, which the exporter cannot infer for these ops."""
    inputs: dict[str, tuple[str, Dims]] = {}
    for name, value in tensors.items():
        if value is not None:
            dtype = value.type().dtype() if isinstance(value.type(), torch._C.TensorType) else None
            if dtype is None:
                return
            sizes: Sequence[int | None] | None = value.type().varyingSizes()
            dims: Dims = None if sizes is None else [Unknown() if size is None else size for size in sizes]
            inputs[name] = (str(dtype).removeprefix("torch."), dims)
    inferred = infer_outputs(record, inputs, attributes)
    values = [outputs] if len(record.outputs) == 1 else outputs
    for value, (dtype_name, shape) in zip(values, inferred.values(), strict=True):
        kind = torch._C.TensorType.get().with_dtype(getattr(torch, dtype_name))
        if shape is not None:
            kind = kind.with_sizes([None if isinstance(size, Unknown) else int(size) for size in shape])
        value.setType(kind)
