"""How a cell is computed: ONNX nodes, backward runs, the exact result and the distance from it."""

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from onnx import helper
from torch import Tensor

from twinop import torch_op
from twinop.bench.cases import BACKWARD, Case, as_tuple
from twinop.bench.cells import IN_ORT
from twinop.bench.peers import Entry, Nodes
from twinop.bench.timing import Run
from twinop.record import DOMAIN


def onnx_nodes(entry: Entry, provider: str) -> tuple[list[Any], int]:
    """The nodes of an ONNX Runtime provider, and their opset."""
    if provider == IN_ORT:
        record = torch_op.records()[entry.op]
        last = max(i for i, each in enumerate(record.inputs) if each.name in entry.input_names)
        given = [each.name if each.name in entry.input_names else "" for each in record.inputs[: last + 1]]
        node = helper.make_node(
            record.onnx_name, given, list(record.outputs), "node0", domain=DOMAIN, **dict(entry.attributes)
        )
        return [node], 20
    described: Nodes = entry.ort[provider]
    nodes = []
    for i, (op_type, wires) in enumerate(described.nodes):
        sources, targets = ([name.strip() for name in side.split(",")] for side in wires.split("->"))
        options = dict(described.attributes) if i == 0 else {}
        domain = described.domain if i == 0 else ""
        nodes.append(helper.make_node(op_type, sources, targets, f"node{i}", domain=domain, **options))
    return nodes, described.opset


def backward_run(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Run:
    """Backward alone, as autograd runs it. Forward has run once, and its graph is kept.

    Args:
        grads: of the outputs.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        outputs = as_tuple(function(*leaves))
    return partial(torch.autograd.grad, outputs, leaves, list(grads), retain_graph=True)


def reference(
    case: Case, entry: Entry, inputs: Mapping[str, Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The outputs, or the inputs' gradients, in fp64."""
    if case.direction == BACKWARD:
        exact = [tensor.double() for tensor in inputs.values()]
        return as_tuple(backward_run(entry.eager, exact, [grad.double() for grad in grads])())
    if entry.reference is not None:
        return as_tuple(entry.reference(*inputs.values()))
    return as_tuple(entry.eager(*(tensor.double() for tensor in inputs.values())))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the whole tensor, in the 2-norm. NaN counts as infinite; infinite where the type ends is right."""
    if actual.shape != expected.shape:
        return float("inf")
    beyond = torch.isinf(actual) & (actual == expected.to(actual.dtype))
    error = torch.linalg.vector_norm((actual.double() - expected).masked_fill_(beyond, 0))
    value = float(error / torch.linalg.vector_norm(expected.masked_fill(beyond, 0)))
    return value if value == value else float("inf")


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A Python function of its own code object: the compiler keeps its results by code object."""

    def call(*inputs: Tensor) -> Any:
        return function(*inputs)

    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)
