"""Evaluates shape expressions, the closed language of `kernels/record/shape.h`.

Sizes are numbers, torch SymInts or `Unknown`.
"""

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RecordError, RecordSyntaxError
from .record import Record, entries

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


_TOO_LARGE = 2**63  # the C++ code counts in 64 bits, and takes -2**63 for an unknown size
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_SHAPE_TEXT = re.compile(r"(?:[\[\](),:+*/ -]|==|\"\w+\"|[A-Za-z_]\w*|(?:0|[1-9]\d{0,17})(?!\w))*", re.ASCII)


@functools.cache
def _parsed(text: str) -> ast.expr:
    if (read := _SHAPE_TEXT.match(text).end()) < len(text):  # type: ignore[union-attr]
        raise _mistake(read, "this is not in the language of shapes")
    return ast.parse(text, mode="eval").body


class ShapeExpression:
    """Evaluates expressions for one call.

    Args:
        shapes: the shape of every input by name, None where it is absent. An input left out is not known.
        attributes: the value of every attribute by name.
    """

    def __init__(
        self, record: Record, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
    ):
        self.record, self.shapes, self.attributes = record, shapes, attributes

    def evaluate(self, text: str) -> tuple[Any, ...]:
        """Returns the shape that an expression describes.

        Raises:
            RecordSyntaxError: the expression does not parse.
            RecordError: it does not fit the call.
        """
        try:
            shape = self._shape(_parsed(text))
            if math.prod(size for size in shape if isinstance(size, int) and size > 0) * 16 >= _TOO_LARGE:
                raise ValueError("a tensor would have too many elements")
            return shape
        except SyntaxError as error:
            place = (error.offset or 1) - 1
            raise RecordSyntaxError(f"op {self.record.name}, shape", text, place, error.msg) from error
        except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            values = {name: value and tuple(value) for name, value in self.shapes.items()} | dict(
                self.attributes
            )
            given = ", ".join(f"{name}={value}" for name, value in values.items())
            raise RecordError(f"op {self.record.name}: {text!r} does not fit {given}: {error}") from error

    def _shape(self, node: ast.expr) -> tuple[Any, ...]:
        match node:
            case ast.Name() as base:
                return self._input(base)
            case ast.Subscript(
                value=ast.Name() as base, slice=ast.Slice(lower=lower, upper=upper, step=None)
            ):
                begin, end = (None if bound is None else self._size(bound) for bound in (lower, upper))
                return self._input(base)[begin:end]
            case ast.List(elts=elements):
                sizes = tuple(map(self._size, elements))
                if any(isinstance(size, int) and size < 0 for size in sizes):
                    raise ValueError("a size would be negative")
                return sizes
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._shape(left) + self._shape(right)
            case ast.Call(func=ast.Name(id="broadcast"), args=[left, right], keywords=[]):
                return broadcast(self._shape(left), self._shape(right))
        raise _mistake(node.col_offset, f"{ast.unparse(node)} is not a shape")

    def _size(self, node: ast.expr) -> Any:
        return _fitting(self._any_size(node))

    def _any_size(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._size(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._size(left), self._size(right))
            case ast.IfExp(
                test=ast.Compare(
                    left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=str(text))]
                ),
                body=then,
                orelse=otherwise,
            ) if self._kind(name) == "str":
                return self._size(then if self.attributes[name] == text else otherwise)
            case ast.Name(id=name) if self._kind(name) in ("int", "bool"):
                value = self.attributes[name]
                return int(value) if isinstance(value, bool) else value  # a SymInt stays one
            case ast.Subscript(value=ast.Name() as base, slice=index) if not isinstance(index, ast.Slice):
                is_list = self._kind(base.id) == "int[]"
                return (self.attributes[base.id] if is_list else self._input(base))[self._size(index)]
            case ast.Call(func=ast.Name(id="len"), args=[shape], keywords=[]):
                return len(self._shape(shape))
            case ast.Call(func=ast.Name(id="numel"), args=[shape], keywords=[]):
                return functools.reduce(lambda a, b: _fitting(a * b), self._shape(shape), 1)
        raise _mistake(node.col_offset, f"{ast.unparse(node)} is not a size")

    def _kind(self, name: str) -> str | None:
        attribute = self.record.attribute(name)
        return attribute.kind if attribute else None

    def _input(self, node: ast.Name) -> tuple[Any, ...]:
        if node.id in self.shapes:
            shape = self.shapes[node.id]
            return ABSENT if shape is None else tuple(shape)
        if any(entry.name == node.id for entry in self.record.inputs):
            raise ValueError(f"the shape of {node.id} is not known")
        raise _mistake(node.col_offset, f"{node.id} is not an input")


def _fitting(size: Any) -> Any:
    if isinstance(size, int) and abs(size) >= _TOO_LARGE:
        raise ValueError("a size does not fit in 64 bits")
    return size


def _mistake(position: int, problem: str) -> SyntaxError:
    return SyntaxError(problem, ("", 1, position + 1, None))


def check_texts(record: Record) -> None:
    """Checks that the record's entries and shape expressions parse.

    Raises:
        RecordSyntaxError: one does not.
    """
    for text in (record.choices, record.memory):
        entries(text)
    for name, word, value in record.attribute_limits:
        kind = getattr(record.attribute(name), "kind", "")
        pattern = r"-?\d+" if kind == "int" else r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
        if not kind:
            problem = f"{name} is not an attribute of the op"
        elif word == "of" and (kind != "int" or all(value != entry.name for entry in record.inputs)):
            problem = f"`{name} of {value}` is for an int and an input"
        elif word == "in" and (kind != "int" or not re.fullmatch(r"-?\d+( *\| *-?\d+)*", value)):
            problem = f"`{name} in ...` is for an int and lists ints: {name} in 0 | 1"
        elif word not in ("of", "in") and (kind not in ("int", "float") or not re.fullmatch(pattern, value)):
            problem = f"`{name} {word} {value}` is for an int or a float and a number of this kind"
        else:
            continue
        raise RecordSyntaxError("limits", record.limits, record.limits.index(name), problem)
    shapes = {entry.name: (1,) * 32 for entry in record.inputs}
    values = {entry.name: [1] * 8 if entry.kind == "int[]" else 1 for entry in record.attributes}
    expression = ShapeExpression(record, shapes, values)
    for text in (*entries(record.shapes).values(), *entries(record.input_shapes).values()):
        try:
            expression.evaluate(text)
        except RecordSyntaxError:
            raise
        except RecordError:
            pass  # it parses; the sizes above do not fit it


def output_shapes(
    record: Record, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the shapes of the outputs by name.

    Args:
        shapes: the shape of every input by name, None where it is absent. An input left out is not known.
            Sizes are ints, torch SymInts or `Unknown`.
        attributes: the value of every attribute by name.

    Raises:
        RecordError: the shapes do not fit the record's expressions.
    """
    texts = entries(record.shapes)
    expression = ShapeExpression(record, shapes, attributes)
    first = record.inputs[0].name
    return {output: expression.evaluate(texts.get(output, first)) for output in record.outputs}


def input_shapes(
    record: Record, first: Sequence[int], attributes: Mapping[str, Any]
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
        shapes[name] = ShapeExpression(record, shapes, attributes).evaluate(text)
    return shapes


def too_few_dimensions(record: Record, shapes: Mapping[str, Sequence[Any] | None]) -> str | None:
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


def broadcast(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
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
    return tuple(result)
