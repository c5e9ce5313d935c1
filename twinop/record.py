"""The op record in Python: what `kernels/record.h` declares, read from a library or given by hand.

A record is text, so C++ and Python can both give one; every adapter (torch registration, exporters, session
checks) is derived from it.
"""

import ast
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinop.errors import RecordError

DOMAIN = "custom_domain"
DOMAIN_VERSION = 1


@dataclass(frozen=True)
class Input:
    name: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of the schema. `kind`: int, float, bool, str or int[]. `default_text`: a literal."""

    name: str
    kind: str
    default_text: str | None = None

    @property
    def required(self) -> bool:
        return self.default_text is None

    @property
    def default(self) -> Any:
        """The default as a Python value, or None for a required attribute."""
        if self.default_text is None:
            return None
        value = ast.literal_eval(self.default_text)
        return float(value) if self.kind == "float" else value


@dataclass(frozen=True)
class Record:
    """One op. The texts are those of `kernels/record.h`, which explains each of them."""

    name: str
    onnx_name: str
    schema: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[str, ...]
    dtypes: str = "float32; float16; bfloat16; float64"
    shapes: str = ""
    scratch: str = "0"
    in_place: str = ""
    choices: str = ""
    gradient: str = ""
    autocast: str = "keep"
    layout: str = "contiguous"
    devices: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Record":
        """The record that a library carries (see `kernels/json.h`)."""
        special = {
            "inputs": tuple(Input(**entry) for entry in fields["inputs"]),
            "attributes": tuple(
                Attribute(entry["name"], entry["kind"], entry.get("default"))
                for entry in fields["attributes"]
            ),
            "outputs": tuple(fields["outputs"]),
            "devices": tuple(fields["devices"]),
        }
        return cls(**{**fields, **special})

    @property
    def is_backward(self) -> bool:
        """Backward ops are torch ops only: they have no ONNX side."""
        return self.name.endswith("_backward")

    @property
    def is_elementwise(self) -> bool:
        return self.layout == "elementwise"

    @property
    def schema_hash(self) -> str:
        """16 hex digits that change with the op's signature; exported models carry it."""
        return hashlib.sha256(self.schema.encode()).hexdigest()[:16]

    @cached_property
    def combinations(self) -> tuple[dict[str, str], ...]:
        """Allowed dtypes: for each combination the dtype name of every tensor input and output."""
        names = [entry.name for entry in self.inputs] + list(self.outputs)
        result = []
        for text in self.dtypes.split(";"):
            first, _, rest = text.strip().partition(" ")
            result.append(dict.fromkeys(names, first) | dict(re.findall(r"(\w+) *= *(\w+)", rest)))
        return tuple(result)

    def combination_of(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """The first dtype combination that takes these dtypes (by tensor name), or None."""
        for combination in self.combinations:
            if all(combination[name] == dtype for name, dtype in given.items()):
                return combination
        return None

    @cached_property
    def gradients(self) -> dict[str, str]:
        """Derivative formula by input name."""
        return entries(self.gradient)

    @cached_property
    def attribute_choices(self) -> dict[str, tuple[str, ...]]:
        """Allowed values by str attribute."""
        return {name: tuple(map(str.strip, text.split("|"))) for name, text in entries(self.choices).items()}

    def attribute(self, name: str) -> Attribute | None:
        return next((entry for entry in self.attributes if entry.name == name), None)

    def infer_shapes(
        self, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
    ) -> dict[str, tuple[Any, ...]]:
        """Output shapes by name.

        Args:
            shapes: the shape of every input by name, None where absent; sizes are ints or torch SymInts.
            attributes: the value of every attribute by name.

        Raises:
            RecordError: the shapes do not fit the record's expressions.
        """
        texts = entries(self.shapes)
        expression = _ShapeExpression(self, shapes, attributes)
        return {
            output: expression.evaluate(texts.get(output, self.inputs[0].name)) for output in self.outputs
        }


def entries(text: str) -> dict[str, str]:
    """`"y = x; s = x[:-1]"` as a dict. A value may hold "=" and, in quotes or brackets, ";".

    Raises:
        RecordError: an entry is not `name = value`, or a name stands there twice.
    """
    result: dict[str, str] = {}
    *parts, last = _split(text, ";")
    for part in [*parts, last] if last.strip() else parts:
        name, _, value = map(str.strip, part.partition("="))
        if not name.isidentifier() or not value or name in result:
            raise RecordError(
                f"{part.strip()!r} in {text!r}: expected entries `name = value`, each name once"
            )
        result[name] = value
    return result


def _split(text: str, separator: str) -> list[str]:
    """Splits where `separator` stands outside quotes and brackets, as the C++ scanner does."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == separator and depth == 0:
            parts.append("")
            continue
        else:
            depth += (character in "[(") - (character in "])")
        parts[-1] += character
    return parts


# ---------------------------------------------------------------------------- shape expressions (shape.h)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_SHAPE_TEXT = re.compile(r"[\[\](),:+*/ -]|[A-Za-z_]\w*|(?:0|[1-9]\d{0,17})(?!\w)", re.ASCII)


class _ShapeExpression:
    """The closed language of `kernels/shape.h`; nothing else of Python is accepted."""

    def __init__(
        self, record: Record, shapes: Mapping[str, Sequence[Any] | None], attributes: Mapping[str, Any]
    ):
        self.record, self.shapes, self.attributes = record, shapes, attributes

    def evaluate(self, text: str) -> tuple[Any, ...]:
        try:
            if _SHAPE_TEXT.sub("", text):
                raise SyntaxError("not in the language of shapes")
            return self._shape(ast.parse(text, mode="eval").body)
        except (IndexError, TypeError, ValueError, ZeroDivisionError, SyntaxError) as error:
            values = {name: value and tuple(value) for name, value in self.shapes.items()} | dict(
                self.attributes
            )
            given = ", ".join(f"{name}={value}" for name, value in values.items())
            raise RecordError(f"op {self.record.name}: {text!r} does not fit {given}: {error}") from error

    def _shape(self, node: ast.AST) -> tuple[Any, ...]:
        match node:
            case ast.Name(id=name):
                return self._input(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=lower, upper=upper, step=None)):
                begin, end = (None if bound is None else self._size(bound) for bound in (lower, upper))
                return self._input(name)[begin:end]
            case ast.List(elts=elements):
                sizes = tuple(map(self._size, elements))
                if any(isinstance(size, int) and size < 0 for size in sizes):
                    raise ValueError("a size would be negative")
                return sizes
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._shape(left) + self._shape(right)
            case ast.Call(func=ast.Name(id="broadcast"), args=[left, right], keywords=[]):
                return _broadcast(self._shape(left), self._shape(right))
        raise SyntaxError(f"{ast.unparse(node)} is not a shape")

    def _size(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._size(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._size(left), self._size(right))
            case ast.Name(id=name) if self._kind(name) in ("int", "bool"):
                value = self.attributes[name]
                return int(value) if isinstance(value, bool) else value  # a SymInt stays one
            case ast.Subscript(value=ast.Name(id=name), slice=index) if not isinstance(index, ast.Slice):
                return (self.attributes[name] if self._kind(name) == "int[]" else self._input(name))[
                    self._size(index)
                ]
            case ast.Call(func=ast.Name(id="len"), args=[shape], keywords=[]):
                return len(self._shape(shape))
            case ast.Call(func=ast.Name(id="numel"), args=[shape], keywords=[]):
                return functools.reduce(operator.mul, self._shape(shape), 1)
        raise SyntaxError(f"{ast.unparse(node)} is not a size")

    def _kind(self, name: str) -> str | None:
        attribute = self.record.attribute(name)
        return attribute.kind if attribute else None

    def _input(self, name: str) -> tuple[Any, ...]:
        if name not in self.shapes:
            raise SyntaxError(f"{name} is not an input")
        shape = self.shapes[name]
        if shape is None:
            raise ValueError(f"{name} is absent")
        return tuple(shape)


def _broadcast(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    wide, narrow = (a, b) if len(a) >= len(b) else (b, a)
    result = list(wide)
    offset = len(wide) - len(narrow)
    for i, size in enumerate(narrow):
        if result[offset + i] == 1:
            result[offset + i] = size
        elif size != 1 and result[offset + i] != size:
            raise ValueError(f"the shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return tuple(result)
