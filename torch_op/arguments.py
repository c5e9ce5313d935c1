"""A record's arguments as a Python signature."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from twinop.record import Record


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
