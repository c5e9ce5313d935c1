"""Ops that write into inputs, `put(Tensor(a!) cache, ...)`, beside their functional twins.

The kernel is one. The twin, `put_functional`, runs it on copies of the inputs, which it returns; what the
record says of the op (derivative, vmap, sharding) is about the twin. The op that mutates has neither.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from twinop.errors import RecordError
from twinop.record.op_spec import OpSpec

from .arguments import bind, completion_of, signature_of, tensors_of
from .rules import as_tuple

Rule = Callable[..., Any]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory."""
    last = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            return tensor.numel() > 0
        last += (size - 1) * step
    return False


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of a tensor shares memory with one of another: numpy compares addresses only."""

    def at(tensor: torch.Tensor) -> np.ndarray:
        place = {"shape": tuple(tensor.shape), "typestr": f"|V{tensor.itemsize}", "version": 3}
        place |= {"strides": tuple(step * tensor.itemsize for step in tensor.stride())}
        return np.asarray(SimpleNamespace(__array_interface__=place | {"data": (tensor.data_ptr(), True)}))

    return np.shares_memory(at(a), at(b))


def _check_written(record: OpSpec, arguments: dict[str, Any]) -> None:
    """Checks that each element which an op writes has memory of its own, as CheckWritten in call.cpp."""
    tensors = [(name, each) for name, each in arguments.items() if isinstance(each, torch.Tensor)]
    for name, tensor in tensors:
        faults = ["elements of it share their memory, as after expand(); pass a tensor of its own"]
        faults *= _overlaps_itself(tensor)
        faults += [
            f"shares its memory with {other}; pass a copy of one of them"
            for other, each in tensors
            if other != name and _share_memory(tensor, each)
        ]
        if faults and name in record.written.values():
            raise RecordError(f"{record.qualified_name}: {name} is written, and {faults[0]}: .clone()")


@cache
def torch_library(namespace: str) -> torch.library.Library:
    """Returns what registers ops and their rules in a namespace of torch."""
    return torch.library.Library(namespace, "FRAGMENT")


def register_mutating(
    record: OpSpec,
    library: torch.library.Library,
    fake: Rule,
    on_cpu: Rule | None,
    on_cuda: Rule | None = None,
) -> Rule:
    """Registers what torch needs of the op that mutates, and returns its Python function.

    Args:
        fake: the rule of the functional twin.
        on_cpu: what runs the twin on CPU tensors; None: the op has a CPU kernel.
        on_cuda: what runs the op on CUDA tensors, the written ones contiguous; None: it has a CUDA kernel.
    """
    op = getattr(getattr(torch.ops, record.namespace), record.name).default
    twin = getattr(getattr(torch.ops, record.namespace), record.functional_name).default
    signature = signature_of(record)
    complete = completion_of(signature)
    names = list(record.written.values())
    places = [list(signature.parameters).index(name) for name in names]
    returned = len(record.outputs) - len(names)
    instead = f"Call {record.torch_path}, which returns {', '.join(record.written)}"

    def declared(outputs: tuple[Any, ...]) -> Any:
        """Returns what the schema returns of the outputs."""
        return None if returned == 0 else outputs[0] if returned == 1 else outputs[:returned]

    def run_twin(*args: Any, rule: Rule | None = None, **kwargs: Any) -> Any:
        """Runs the twin, or what computes the same, and copies its results into the inputs."""
        arguments = bind(signature, args, kwargs)
        outputs = as_tuple((rule or twin)(*arguments.values()))
        for name, output in zip(names, outputs[returned:], strict=True):
            arguments[name].copy_(output)
        return declared(outputs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = complete(args, kwargs)
        if torch.onnx.is_in_onnx_export():
            return run_twin(*arguments)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(arguments)):
            raise RecordError(
                f"{record.qualified_name} writes into {', '.join(names)} and has no derivative; an input "
                f"requires grad. {instead}, or call this op under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            result = op(*arguments)
        for place in places:
            torch.autograd.graph.increment_version(arguments[place])
        return result

    def trace(*args: Any, **kwargs: Any) -> Any:
        """What torch.jit.trace sees."""
        arguments = bind(signature, args, kwargs)
        if torch.onnx.is_in_onnx_export() and any(arguments[name]._is_view() for name in names):
            raise RecordError(
                f"{record.qualified_name} writes into a view, which the TorchScript exporter loses. Use the "
                f"dynamo exporter. {instead}"
            )
        return run_twin(*arguments.values())

    def refuse_vmap(*args: Any, **kwargs: Any) -> Any:
        raise RecordError(
            f"{record.qualified_name} writes into {', '.join(names)} and does not work under vmap. {instead}"
        )

    name = f"{record.namespace}::{record.name}"
    torch.library.register_fake(name, lambda *a, **k: declared(as_tuple(fake(*a, **k))), lib=library)
    torch.library.register_vmap(name, refuse_vmap, lib=library)
    library.impl(record.name, kernel, "Autograd")
    library.impl(record.name, trace, "Tracer")

    def in_python(in_place: Rule | None, of_twin: Rule) -> Rule:
        """Returns what runs the op on a device for which it has no kernel."""

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(signature, args, kwargs)
            _check_written(record, arguments)
            if in_place is not None and all(arguments[name].is_contiguous() for name in names):
                return in_place(*arguments.values())
            return run_twin(*arguments.values(), rule=of_twin)

        return run

    if on_cpu is not None:
        library.impl(record.name, in_python(None, on_cpu), "CPU")
    if on_cuda is not None:
        library.impl(record.name, in_python(on_cuda, twin), "CUDA")

    def function(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = record.name
    function.__module__ = "twinop.torch_op"
    function.__doc__ = (
        f"{record.domain}::{record.schema}\n\nDtypes: {record.dtypes}. Writes into {', '.join(names)}; "
        f"{record.functional_name} does not, and has the derivative."
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
