"""The op record in Python: what `kernels/record.h` declares, read from a library or given by hand.

A record is text, so C++ and Python can both give one; every adapter (torch registration, exporters, session
checks) is derived from it.
"""

import ast
import hashlib
import operator
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
    """An attribute of the schema: `kind` is int, float, bool, str or int[]; `default_text` a Python literal."""

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
        return ast.literal_eval({"true": "True", "false": "False"}.get(self.default_text, self.default_text))


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
            first, *overrides = text.split()
            result.append(dict.fromkeys(names, first) | dict(entry.split("=") for entry in overrides))
        return tuple(result)

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
            shapes: the shape of every input by name, None where it is absent; sizes are ints or torch SymInts.
            attributes: the value of every attribute by name.

        Raises:
            RecordError: the shapes do not fit the record's expressions.
        """
        texts = entries(self.shapes)
        scope: dict[str, Any] = {
            name: tuple(shape) for name, shape in shapes.items() if shape is not None
        } | dict(attributes)
        return {
            output: tuple(_evaluate(self, texts.get(output, self.inputs[0].name), scope))
            for output in self.outputs
        }


def entries(text: str) -> dict[str, str]:
    """`"y = x; s = x[:-1]"` as a dict. A value may hold "=" and, in quotes or brackets, ";"."""
    result: dict[str, str] = {}
    for part in _split(text, ";"):
        if part.strip():
            name, _, value = part.partition("=")
            result[name.strip()] = value.strip()
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


def _numel(shape: Sequence[Any]) -> Any:
    result: Any = 1
    for size in shape:
        result = result * size
    return result


def _broadcast(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    wide, narrow = (a, b) if len(a) >= len(b) else (b, a)
    result = list(wide)
    offset = len(wide) - len(narrow)
    for i, size in enumerate(narrow):
        if result[offset + i] == 1:
            result[offset + i] = size
        elif size != 1 and result[offset + i] != size:
            raise RecordError(f"the inputs' shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return tuple(result)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "numel": _numel, "broadcast": _broadcast}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _evaluate(record: Record, text: str, scope: Mapping[str, Any]) -> Any:
    """Evaluates the closed language of `kernels/shape.h`: nothing else of Python is accepted."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Name(id=name) if name in scope:
                return scope[name]
            case ast.List(elts=elements):
                return tuple(value(element) for element in elements)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, arguments))
            case ast.Subscript(
                value=ast.Name() as base, slice=ast.Slice(lower=lower, upper=upper, step=None)
            ):
                return value(base)[lower and value(lower) : upper and value(upper)]
            case ast.Subscript(value=ast.Name() as base, slice=index):
                return value(base)[value(index)]
        raise RecordError(
            f"op {record.name}: {ast.unparse(node)!r} in {text!r} is not in the language of shapes"
        )

    try:
        return value(ast.parse(text, mode="eval").body)
    except (IndexError, ZeroDivisionError, SyntaxError) as error:
        shapes = ", ".join(f"{name}={scope[name]}" for name in scope)
        raise RecordError(f"op {record.name}: {text!r} does not fit {shapes}: {error}") from error
