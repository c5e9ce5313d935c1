"""The registry of function bodies: what each op means in standard ONNX operators.

`twinop/model/bodies.py` says how a body is written. The registry needs neither onnx nor torch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ExportError
from .op_spec import DOMAIN, OpSpec, key_of

Builder = Callable[..., Any]


@dataclass(frozen=True)
class DefaultInput:
    """Describes the tensor that an omitted optional input stands for.

    It is inserted where only some nodes of a model omit the input, so that one body serves all. It has the
    shape of the first input's dimensions from `start` on, or the input `along`'s dimension `start` alone,
    behind `ones` dimensions of size 1.
    """

    value: float | Callable[[Mapping[str, Any]], float]  # of every element, or computed from attributes
    # A dimension, the attribute that holds it, or a function that computes it from the attributes.
    start: int | str | Callable[[Mapping[str, Any]], int] = -1
    along: str | None = None
    ones: int = 0


@dataclass(frozen=True)
class Body:
    """A registered body: the function that builds it, and the defaults of its optional inputs by name."""

    build: Builder
    defaults: Mapping[str, DefaultInput] = field(default_factory=dict)

    def check(self, record: OpSpec) -> None:
        """Raises ExportError unless the body's arguments are the record's."""
        if wrong := misfit(self.build, record, "op"):
            raise ExportError(f"body {wrong}")
        optional = [entry.name for entry in record.inputs if entry.optional]
        if unknown := sorted(set(self.defaults) - set(optional)):
            raise ExportError(
                f"body {record.name}: defaults names {', '.join(unknown)}; the optional inputs of "
                f"{record.schema} are: {', '.join(optional) or 'none'}"
            )


def misfit(function: Builder, record: OpSpec, *first: str) -> str:
    """Says what is wrong with a function that takes these parameters and the op's own; "" for nothing."""
    parameters = list(inspect.signature(function).parameters.values())[len(first) :]
    keyword_only = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [each.name for each in parameters if each.name not in keyword_only]
    inputs = [entry.name for entry in record.inputs]
    attributes = [entry.name for entry in record.attributes]
    if positional == inputs and sorted(keyword_only) == sorted(attributes):
        return ""
    wanted = ", ".join([*first, *inputs, *(["*", *attributes] if attributes else [])])
    return (
        f"{record.name}{inspect.signature(function)} does not fit the op {record.schema}; expected "
        f"def {record.name}({wanted})"
    )


BODIES: dict[str, Body] = {}
"""The registered bodies by `OpSpec.key`."""


def body(
    function: Builder | None = None,
    *,
    defaults: Mapping[str, DefaultInput] | None = None,
    domain: str = DOMAIN,
) -> Any:
    """Registers the function body of the op of the same name (`twinop/model/bodies.py` explains bodies).

    `defaults`: what each omitted optional input stands for. Without a default, nodes that have that input
    call another overload of the function than those that have not. `domain`: of the op's library.
    ExportError: the op has a body already, from another function.
    """

    def register(function: Builder) -> Builder:
        name = key_of(domain, function.__name__)
        if name in BODIES and not _same(BODIES[name].build, function):
            raise ExportError(
                f"op {name} has a body already, from {_origin(BODIES[name].build)}; the second is from "
                f"{_origin(function)}. A model holds one body per op: remove one of them"
            )
        BODIES[name] = Body(function, dict(defaults or {}))
        return function

    return register if function is None else register(function)


def _origin(function: Builder) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _same(one: Builder, other: Builder) -> bool:
    """Whether these are one function: defined again, or in a file that was imported under two names."""
    files = [getattr(getattr(each, "__code__", None), "co_filename", None) for each in (one, other)]
    in_one_file = files[0] == files[1] is not None and one.__qualname__ == other.__qualname__
    return in_one_file or _origin(one) == _origin(other)
