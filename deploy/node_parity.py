"""Compares a model's custom nodes with the torch ops of the same records, bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from twinop.record.dtypes import described, to_array, torch_name
from twinop.record.op_spec import OpSpec
from twinop.record.tolerance import TOLERANCE, difference

from .custom_nodes import is_custom


@dataclass(frozen=True)
class Comparison:
    """One output of one custom node."""

    node: str
    op_type: str
    output: str
    tensor: str  # its dtype and shape
    equal: bool | None  # whether torch gives the same bits; None: it need not, since each has its own code
    detail: str = ""


def observed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Adds what the main graph's custom nodes read and write to the model's outputs, and returns it.

    Constants are none of these: they may be as large as the file. Nodes without a name get the name that they
    have in ONNX Runtime's profile.
    """
    shown = {value.name for value in (*proto.graph.output, *proto.graph.initializer)}
    for index, node in enumerate(proto.graph.node):
        if not is_custom(node):
            continue
        if not node.name:
            node.name = f"{node.op_type}_{index}"
        for value in (*node.input, *node.output):
            if value and value not in shown:
                shown.add(value)
                proto.graph.output.append(onnx.ValueInfoProto(name=value))
    return proto


def compare(
    proto: onnx.ModelProto, values: Mapping[str, Any], records: Mapping[tuple[str, str], OpSpec]
) -> list[Comparison]:
    """Runs the main graph's custom nodes in torch on what an `observed` model gave them (`values`)."""
    comparisons = []
    for node in filter(is_custom, proto.graph.node):
        verdicts = _verdicts(node, values, records.get((node.domain, node.op_type)))
        comparisons += [
            Comparison(node.name, node.op_type, name, described(values[name]), *verdict)
            for name, verdict in zip(node.output, verdicts, strict=True)
            if name
        ]
    return comparisons


def _verdicts(
    node: onnx.NodeProto, values: Mapping[str, Any], record: OpSpec | None
) -> list[tuple[bool | None, str]]:
    """Returns `equal` and `detail` of each output."""
    import torch

    from twinop.torch_op.registry import has_cpu_kernel, runs_on_cpu

    count = len(node.output)
    if record is None:
        return [(None, "ran as its function body: no library was registered")] * count
    op = getattr(getattr(torch.ops, record.namespace), record.functional_name, None)
    if op is None:
        why = f"torch has no {record.torch_name}: load its library with twinop.torch_op.load(path)"
        return [(None, why)] * count
    given: list[Any] = [values[name] if name else None for name in node.input]
    given += [None] * (len(record.inputs) - len(given))
    on_gpu = any(tensor.is_cuda for tensor in values.values())
    if not (on_gpu or runs_on_cpu(record)):
        return [(None, f"{record.torch_name} needs a GPU in torch, and was not compared")] * count
    attributes = {entry.name: entry.default for entry in record.attributes}
    attributes |= {each.name: _value(each, record) for each in node.attribute}
    try:
        results = op(*given, *attributes.values())
    except RuntimeError as error:
        return [(False, f"torch refuses: {error}")] * count
    if isinstance(results, torch.Tensor):
        results = (results,)
    # A node may leave out outputs: the last ones, or one whose name is empty.
    compare = compare_bits if on_gpu or has_cpu_kernel(record) else _compare_bodies
    return [
        compare(values[name], expected) if name else (None, "")
        for name, expected in zip(node.output, results, strict=False)
    ]


def _compare_bodies(value: Any, expected: Any) -> tuple[bool | None, str]:
    """Compares what two runtimes computed with their own operators: a small difference is none of ours."""
    equal, detail = compare_bits(value, expected)
    if equal or value.shape != expected.shape or not expected.is_floating_point():
        return equal, detail
    close = difference(expected, value) <= TOLERANCE.get(torch_name(expected.dtype), 0.0)
    return (None if close else False), f"no CPU kernel, each runtime's own operators: {detail}"


def _value(attribute: onnx.AttributeProto, record: OpSpec) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    declared = record.attribute(attribute.name)
    return bool(value) if declared is not None and declared.kind == "bool" else value


def compare_bits(value: Any, expected: Any) -> tuple[bool, str]:
    """Returns whether two tensors have the same bits, NaN payloads included, and how much they differ."""
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return False, f"torch gives {described(expected)}"
    a, b = to_array(value), to_array(expected)
    bits = f"u{a.itemsize}"
    count = np.count_nonzero(a.view(bits) != b.view(bits))
    if count == 0:
        return True, ""
    distance = np.nan_to_num(np.abs(a.astype(np.float64) - b.astype(np.float64)), nan=np.inf).max()
    return False, f"{count} of {a.size} elements differ, by up to {distance:.3g}"
