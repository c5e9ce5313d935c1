"""Evaluates shape expressions. Their language (`kernels/record/shape.h`) is a part of Python, over lists.

Sizes are numbers, torch SymInts or `Unknown`.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ..errors import RecordError, RecordSyntaxError
from .op_spec import OpSpec, entries

ABSENT = (0,)
"""The shape of an absent optional input, and of its gradient: no elements."""


@dataclass(frozen=True)
class Unknown:
    """A size that is not known, perhaps with a name. Sizes computed from it have no name."""

    name: str | None = None

    def _computed(self, other: Any = None) -> "Unknown":
        return Unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __floordiv__ = __rfloordiv__ = __neg__ = _computed


_TOO_LARGE = 2**63  # the C++ code counts in 64 bits
_TOKENS = re.compile(r"(?:[\[\](),:+ -]|\*(?!\*)|//?|==|\"\w+\"|[A-Za-z_]\w*|\d+(?!\w))*", re.ASCII)
"""What shapes consist of. Without a dot, no expression reaches more than the names that it is given."""


@functools.cache
def _code(text: str) -> CodeType:
    if (read := _TOKENS.match(text).end()) < len(text):  # type: ignore[union-attr]
        raise SyntaxError("this is not in the language of shapes", ("", 1, read + 1, None))
    return compile(text, "<shape>", "eval")


def evaluate(
    record: OpSpec, text: str, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Returns the shape that an expression describes.

    Args:
        shapes: the shape of every input by name, None where it is absent. An input left out is not known.
        attributes: the value of every attribute by name, and of the sizes that come from the data, where they
            are known.

    Raises:
        RecordSyntaxError: the expression does not parse, or is not a shape.
        RecordError: it does not fit the call.
    """
    given = {name: [*(ABSENT if shape is None else shape)] for name, shape in shapes.items()}
    functions = {"__builtins__": {}, "len": len, "numel": math.prod, "broadcast": broadcast}
    counted = {} if not record.sizes else dict.fromkeys(record.size_bounds, Unknown())
    where = f"op {record.name}, shape"
    try:
        shape = eval(_code(text), functions, {**counted, **attributes, **given})
        if not isinstance(shape, list) or any(isinstance(size, list | str | float) for size in shape):
            raise TypeError(f"{text} is not a list of ints")
        sizes = [int(size) for size in shape if isinstance(size, int)]
        if any(size < 0 for size in sizes):
            raise ValueError("a size would be negative")
        if math.prod(filter(None, sizes)) * 16 >= _TOO_LARGE:
            raise ValueError("a tensor would have too many elements")
        return tuple(int(size) if isinstance(size, bool) else size for size in shape)
    except SyntaxError as error:
        raise RecordSyntaxError(where, text, (error.offset or 1) - 1, error.msg) from error
    except TypeError as error:
        raise RecordSyntaxError(where, text, 0, f"this is not a shape: {error}") from error
    except NameError as error:
        if any(entry.name == error.name for entry in record.inputs):
            raise RecordError(f"op {record.name}: the shape of {error.name} is not known") from error
        problem = f"{error.name} is not an input or an attribute"
        raise RecordSyntaxError(where, text, text.index(str(error.name)), problem) from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        values = {name: shape and tuple(shape) for name, shape in shapes.items()} | dict(attributes)
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        raise RecordError(f"op {record.name}: {text!r} does not fit {named}: {error}") from error


def check_texts(record: OpSpec) -> None:
    """Raises RecordSyntaxError unless the record's entries, limits and shape expressions parse."""
    _ = record.attribute_choices, record.attribute_limits, record.host_inputs
    shapes = {entry.name: (1,) * 32 for entry in record.inputs}
    values = {"int": 1, "bool": True, "float": 1.0, "str": "", "int[]": [1] * 8}
    attributes = {entry.name: values[entry.kind] for entry in record.attributes}
    bounds = [f"[{bound}]" for bound in record.size_bounds.values() if bound]
    for text in (*entries(record.shapes).values(), *entries(record.input_shapes).values(), *bounds):
        try:
            evaluate(record, text, shapes, attributes)
        except RecordSyntaxError:
            raise
        except RecordError:
            pass  # it parses; the sizes above do not fit it


def output_shapes(
    record: OpSpec, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the shapes of the outputs by name.

    Args:
        shapes: the shape of every input by name, None where it is absent. An input left out is not known.
            Sizes are ints, torch SymInts or `Unknown`.
        attributes: the value of every attribute by name.

    Raises:
        RecordError: the shapes do not fit the record's expressions.
    """
    texts = entries(record.shapes) | record.written
    first = record.inputs[0].name
    return {
        output: evaluate(record, texts.get(output, first), shapes, attributes) for output in record.outputs
    }


def largest_sizes(
    record: OpSpec, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the bounds of the sizes that come from the data, by name, of those that have one."""
    bounds = record.size_bounds.items() if record.sizes else ()
    return {name: evaluate(record, f"[{bound}]", shapes, attributes)[0] for name, bound in bounds if bound}


def input_shapes(
    record: OpSpec, first: Sequence[int], attributes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns shapes of all inputs by name that fit each other.

    Args:
        first: about the shape of the first input. An odd width may become even.
        attributes: the value of every attribute by name.
    """
    texts = entries(record.input_shapes)
    shapes = {entry.name: tuple(first) for entry in record.inputs}
    for name in [*shapes, *shapes]:  # twice: an input may depend on a later one
        text = texts.get(name, record.inputs[0].name)
        shapes[name] = evaluate(record, text, shapes, attributes)
    return shapes


def too_few_dimensions(record: OpSpec, shapes: Mapping[str, Sequence[Any] | None]) -> str | None:
    """Describes the first input that has fewer dimensions than the record's shapes need, if there is one."""
    for name, shape in shapes.items():
        own = re.search(rf"(?:^|;) *{name} *=([^;]*)", record.input_shapes)
        # x[-2] needs two dimensions. So does `x[:-2] + ...` as the required shape of x.
        indices = re.findall(rf"\b{name}\[(-?\d+)\]", f"{record.shapes};{record.input_shapes}")
        indices += re.findall(rf"\b{name}\[:(-\d+)\]", own[1] if own else "")
        needed = max((-i if i < 0 else i + 1 for i in map(int, indices)), default=0)
        if shape is not None and len(shape) < needed:
            plural = "" if len(shape) == 1 else "s"
            return (
                f"{name} has {len(shape)} dimension{plural}, expected at least {needed} (unsqueeze adds one)"
            )
    return None


def known(condition: Any) -> bool:
    """Whether a comparison of sizes holds. Sizes that depend on data (`x[mask]`) leave it open: False.

    Without this, torch would have to know the data when it traces a model.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _equal(a: Any, b: Any) -> bool:
    """Whether sizes may be equal. If that depends on data, torch compares them when the model runs."""
    condition = a == b
    if isinstance(condition, bool):
        return condition
    import torch
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if possible := guard_or_true(condition):
        torch._check(condition)
    return possible


def broadcast(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Broadcasts two shapes by numpy's rule. Two different unknown sizes give an unknown one.

    Sizes that depend on data are taken for equal unless one is known to be 1, as in torch's own operators.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    wide, narrow = (a, b) if len(a) >= len(b) else (b, a)
    result = list(wide)
    for i, size in enumerate(narrow, len(wide) - len(narrow)):
        other = result[i]
        if isinstance(size, Unknown) and isinstance(other, Unknown):
            result[i] = size if size == other and size.name else Unknown()
        elif isinstance(other, Unknown):
            result[i] = other if size == 1 else size
        elif isinstance(size, Unknown):
            result[i] = size if other == 1 else other
        elif known(other == 1):
            result[i] = size
        elif not known(size == 1):
            if not _equal(size, other):
                raise ValueError(f"the shapes {tuple(a)} and {tuple(b)} do not broadcast")
            result[i] = size if isinstance(size, int) else other
    return result
