"""A record's arguments as a Python signature."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from twinop.errors import RecordError
from twinop.record import Record

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def signature_of(record: Record) -> inspect.Signature:
    """The op's arguments in schema order, with their defaults: `(x, *, variant='auto')` without the star."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    tensors = [
        inspect.Parameter(entry.name, kind, default=None if entry.optional else empty)
        for entry in record.inputs
    ]
    attributes = [
        inspect.Parameter(entry.name, kind, default=empty if entry.required else entry.default)
        for entry in record.attributes
    ]
    return inspect.Signature(tensors + attributes)


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, in schema order, defaults filled in."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, those of a `Tensor[]` too."""
    tensors = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [entry for entry in value if isinstance(entry, torch.Tensor)]
    return tensors


def numbers_as_tensors(
    record: Record, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """All arguments, tensors in place of Python numbers: 0-d ones of the first tensor's dtype and device.

    The number is rounded to that dtype, so that torch and ONNX, which knows tensors only, compute the same.

    Raises:
        RecordError: no operand is a tensor.
    """
    arguments = list(bind(signature, args, kwargs).values() if kwargs else args)
    count = len(record.inputs)  # the tensors come first
    for i, number in enumerate(arguments[:count]):
        if not isinstance(number, _NUMBERS):
            continue
        like = next((value for value in arguments[:count] if isinstance(value, torch.Tensor)), None)
        if like is None:
            names = ", ".join(entry.name for entry in record.inputs)
            raise RecordError(f"{record.qualified_name}: none of {names} is a tensor; one must be")
        value: Any = number
        arguments[i] = torch.full((), value, dtype=like.dtype, device=like.device)
    return arguments
