"""The arguments of an op as a Python signature."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from twinop.errors import RecordError
from twinop.record.dtypes import torch_name
from twinop.record.op_spec import OpSpec

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def signature_of(record: OpSpec) -> inspect.Signature:
    """Returns the signature: all arguments in the schema's order, with their defaults."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    defaults = {entry.name: None if entry.optional else empty for entry in record.inputs} | {
        entry.name: empty if entry.required else entry.default for entry in record.attributes
    }
    given = max((i for i, default in enumerate(defaults.values()) if default is empty), default=-1)
    # As in Python, what stands before an argument without a default has none.
    names = enumerate(defaults.items())
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=empty if i <= given else value) for i, (name, value) in names]
    )


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name, in the schema's order, with defaults filled in."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def completion_of(
    signature: inspect.Signature,
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that completes the arguments of a call, in the schema's order.

    The dispatcher leaves out trailing defaults. Signature.bind takes longer than a small kernel.
    """
    defaults = tuple(parameter.default for parameter in signature.parameters.values())

    def complete(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(bind(signature, args, kwargs).values()) if kwargs else args + defaults[len(args) :]

    return complete


def tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors among an op's arguments."""
    return [value for value in arguments if isinstance(value, torch.Tensor)]


def numbers_as_tensors(
    record: OpSpec, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """Returns all arguments, with each Python number replaced by a 0-d tensor; RecordError: none is a tensor.

    The new tensor has the dtype that the record gives it beside the tensors, and the device of the first. The
    number is rounded to that dtype, so that torch and ONNX, which has tensors only, compute the same.
    """
    arguments = list(bind(signature, args, kwargs).values() if kwargs else args)
    names = [entry.name for entry in record.inputs]  # the tensors come first
    for i, number in enumerate(arguments[: len(names)]):
        if not isinstance(number, _NUMBERS):
            continue
        given = {n: v for n, v in zip(names, arguments, strict=False) if isinstance(v, torch.Tensor)}
        if (like := next(iter(given.values()), None)) is None:
            raise RecordError(f"{record.qualified_name}: none of {', '.join(names)} is a tensor; one must be")
        wanted = record.combination_of({n: torch_name(each.dtype) for n, each in given.items()})
        value: Any = number
        dtype = getattr(torch, wanted[names[i]]) if wanted else like.dtype
        if isinstance(value, (float, torch.SymFloat)) and not dtype.is_floating_point:
            kind = f"expected an int: beside these tensors it is {torch_name(dtype)}"
            raise RecordError(f"{record.qualified_name}: {names[i]} is {value}, {kind}")
        arguments[i] = torch.full((), value, dtype=dtype, device=like.device)
    return arguments
