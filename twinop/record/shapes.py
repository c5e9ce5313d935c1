"""Evaluates the trees of shape expressions (`Expression`), on numbers, torch SymInts or `Unknown`."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RecordError, RecordSyntaxError
from .op_spec import Expression, OpSpec

ABSENT = (0,)
"""The shape of an absent optional input, and of its gradient: no elements."""


Shapes = Mapping[str, Sequence[Any] | None]
"""The shape of every input by name, None where it is absent. An input left out is not known."""


@dataclass(frozen=True)
class Unknown:
    """A size that is not known, perhaps with a name. Sizes computed from it have no name."""

    name: str | None = None

    def _computed(self, other: Any = None) -> "Unknown":
        return Unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __floordiv__ = __rfloordiv__ = __neg__ = _computed


_TOO_LARGE = 2**63  # the C++ code counts in 64 bits
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


def _value(tree: Any, scope: Mapping[str, Any]) -> Any:
    """Returns the value of a tree: a list for a shape, else a size. `scope`: what names stand for."""
    match tree:
        case str():
            return scope[tree]
        case ["list", *sizes]:
            return [_value(size, scope) for size in sizes]
        case ["slice", name, begin, end]:
            begin, end = (None if each is None else _value(each, scope) for each in (begin, end))
            return scope[name][begin:end]
        case ["at", name, index]:
            return scope[name][_value(index, scope)]
        case ["len", shape]:
            return len(_value(shape, scope))
        case ["numel", shape]:
            return math.prod(_value(shape, scope))
        case ["broadcast", a, b]:
            return broadcast(_value(a, scope), _value(b, scope))
        case ["if", name, text, a, b]:
            return _value(a if scope[name] == text else b, scope)
        case [sign, a, b]:
            return _OPERATORS[sign](_value(a, scope), _value(b, scope))
    return tree


def evaluate(
    record: OpSpec, expression: Expression, shapes: Shapes, attributes: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Returns the shape that an expression describes, for the arguments of `output_shapes`.

    The attributes may have sizes that come from the data, where they are known. RecordSyntaxError: the
    expression is not a shape. RecordError: it does not fit the call.
    """
    given = {name: [*(ABSENT if shape is None else shape)] for name, shape in shapes.items()}
    counted = dict.fromkeys(record.sizes, Unknown())
    text = expression.text
    try:
        shape = _value(expression.tree, {**counted, **attributes, **given})
        if not isinstance(shape, list) or any(isinstance(size, list | str | float) for size in shape):
            raise TypeError(f"{text} is not a list of ints")
        sizes = [int(size) for size in shape if isinstance(size, int)]
        if any(size < 0 for size in sizes):
            raise ValueError("a size would be negative")
        if math.prod(filter(None, sizes)) * 16 >= _TOO_LARGE:
            raise ValueError("a tensor would have too many elements")
        return tuple(int(size) if isinstance(size, bool) else size for size in shape)
    except TypeError as error:
        raise RecordSyntaxError(f"op {record.name}, shape `{text}`: this is not a shape: {error}") from error
    except KeyError as error:
        raise RecordError(f"op {record.name}: the shape of {error.args[0]} is not known") from error
    except (IndexError, ValueError, ZeroDivisionError) as error:
        values = {name: shape and tuple(shape) for name, shape in shapes.items()} | dict(attributes)
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        raise RecordError(f"op {record.name}: {text!r} does not fit {named}: {error}") from error


def nodes_of(tree: Any) -> Iterator[Any]:
    """Yields a tree and all trees in it."""
    yield tree
    for part in tree[1:] if isinstance(tree, list) else ():
        yield from nodes_of(part)


def first_part(tree: Any) -> Any:
    """Returns what a shape begins with: its first term."""
    return first_part(tree[1]) if isinstance(tree, list) and tree[0] == "+" else tree


def output_shapes(
    record: OpSpec, shapes: Shapes, attributes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the shapes of the outputs by name; RecordError: the shapes do not fit the record's expressions.

    `shapes` has that of every input, None where it is absent; one left out is not known. Sizes are ints,
    torch SymInts or `Unknown`. `attributes` has the value of every attribute.
    """
    return {name: evaluate(record, each, shapes, attributes) for name, each in record.shapes.items()}


def largest_sizes(record: OpSpec, shapes: Shapes, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bounds of the sizes that come from the data, by name, of those that have one."""
    return {
        name: evaluate(record, Expression(bound.text, ["list", bound.tree]), shapes, attributes)[0]
        for name, bound in record.sizes.items()
        if bound
    }


def input_shapes(
    record: OpSpec, first: Sequence[int], attributes: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Returns shapes of all inputs that fit; the first one is about `first`: its width may become even."""
    given = {entry.name: entry.default for entry in record.attributes} | dict(attributes or {})
    like_first = Expression(record.inputs[0].name, record.inputs[0].name)
    shapes = {entry.name: tuple(first) for entry in record.inputs}
    for name in [*shapes, *shapes] if record.input_shapes else ():  # twice: an input may need a later one
        shapes[name] = evaluate(record, record.input_shapes.get(name, like_first), shapes, given)
    return shapes


def too_few_dimensions(record: OpSpec, shapes: Shapes) -> str | None:
    """Describes the first input that has fewer dimensions than the record's shapes need, if there is one."""
    trees = [each.tree for each in (*record.shapes.values(), *record.input_shapes.values())]
    nodes = [node for tree in trees for node in nodes_of(tree)]
    for name, shape in shapes.items():
        # x[-2] needs two dimensions. So does `x[:-2] + ...` as the required shape of x.
        indices = [node[2] for node in nodes if isinstance(node, list) and node[:2] == ["at", name]]
        needed = max((-i if i < 0 else i + 1 for i in indices if isinstance(i, int)), default=0)
        if own := record.input_shapes.get(name):
            ends = [n[3] for n in nodes_of(own.tree) if isinstance(n, list) and n[:2] == ["slice", name]]
            needed = max([needed, *(-end for end in ends if isinstance(end, int))])
        if shape is not None and len(shape) < needed:
            plural = "" if len(shape) == 1 else "s"
            return (
                f"{name} has {len(shape)} dimension{plural}, expected at least {needed} (unsqueeze adds one)"
            )
    return None


def known(condition: Any) -> bool:
    """Whether a comparison of sizes holds; False where it depends on data, which a trace does not know."""
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
