"""Puts twinop's nodes where a model has standard operators that compute the same.

`torch_op.replace_modules` does this to modules; what a model writes as functions and operators (`x + mask`,
`torch.softmax`, a linear layer's bias) is only seen here. ONNX Runtime's own kernels can be far slower:
a bfloat16 Add of an attention mask or a bias runs at a third of copy bandwidth on an H200, and in a BERT of
12 layers these sums take longer than the matrix products (bench/results/encoder-nvidia-h200.json).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from twinop.errors import ExportError
from twinop.export.schema import DTYPE_NAMES
from twinop.record import DOMAIN, Record

_Attributes = Callable[[Mapping[str, ir.Attr]], dict[str, Any]]


def _none(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    return {}


def _softmax(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    return {"dim": attributes["axis"].as_int() if "axis" in attributes else -1}


def _gelu(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    return {"approximate": attributes["approximate"].as_string()} if "approximate" in attributes else {}


STANDARD: dict[str, tuple[str, _Attributes]] = {
    "relu": ("Relu", _none),
    "gelu": ("Gelu", _gelu),
    "sigmoid": ("Sigmoid", _none),
    "tanh": ("Tanh", _none),
    "softplus": ("Softplus", _none),
    "exp": ("Exp", _none),
    "log": ("Log", _none),
    "add": ("Add", _none),
    "mul": ("Mul", _none),
    "pow": ("Pow", _none),
    "softmax": ("Softmax", _softmax),
}
"""The standard operator that each op takes the place of, and how its attributes read there (opset 20 on)."""


def replace_nodes(
    model: ir.Model, ops: Sequence[str], records: Mapping[str, Record] | None = None
) -> dict[str, int]:
    """Replaces in place; returns the number of new nodes by type. Function bodies are attached after it.

    A node stays where its inputs' dtypes are not known or the op has no kernel for them: integer sums that
    compute shapes, for one. Nodes of constants only stay too, as ONNX Runtime folds them.

    Args:
        model: with types of its values, as `torch.onnx.export` and shape inference give them.
        ops: names of ops in `STANDARD`, such as "add" and "softmax".
        records: the ops by name; by default those that `twinop.torch_op` has loaded.

    Raises:
        ExportError: an op has no standard operator here, or is not loaded.
    """
    if records is None:
        from twinop import torch_op

        records = torch_op.records()
    by_type = {}
    for op in ops:
        if op not in STANDARD or op not in records:
            known = ", ".join(name for name in STANDARD if name in records)
            raise ExportError(f"no standard operator is replaced by an op {op!r}; there are: {known}")
        by_type[STANDARD[op][0]] = records[op], STANDARD[op][1]
    replaced: dict[str, int] = {}
    for node in list(model.graph.all_nodes()):
        if node.domain in ("", "ai.onnx") and node.op_type in by_type:
            record, attributes = by_type[node.op_type]
            if _fits(node, record):
                _replace(node, record, attributes(node.attributes))
                replaced[record.onnx_name] = replaced.get(record.onnx_name, 0) + 1
    return replaced


def _fits(node: ir.Node, record: Record) -> bool:
    if len(node.inputs) != len(record.inputs) or all(_is_constant(value) for value in node.inputs):
        return False
    dtypes = {}
    for entry, value in zip(record.inputs, node.inputs, strict=True):
        if value is None or value.dtype not in DTYPE_NAMES:
            return False
        dtypes[entry.name] = DTYPE_NAMES[value.dtype]
    return record.combination_of(dtypes) is not None


def _is_constant(value: ir.Value | None) -> bool:
    if value is None or value.const_value is not None:
        return True
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant"


def _replace(node: ir.Node, record: Record, attributes: dict[str, Any]) -> None:
    graph = node.graph
    assert graph is not None
    twin = ir.Node(
        DOMAIN,
        record.onnx_name,
        node.inputs,
        ir.convenience.convert_attributes(attributes),
        num_outputs=1,
        name=node.name,
    )
    ir.convenience.replace_nodes_and_values(graph, node, [node], [twin], node.outputs, twin.outputs)
