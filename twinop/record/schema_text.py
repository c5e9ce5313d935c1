"""Parses the texts of records, of libraries and of declared ops, as `kernels/record/parse.h` does in C++."""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import RecordError, RecordSyntaxError
from .op_spec import DTYPES, Attribute, Expression, Gradient, Input, OpSpec, check_kind
from .shapes import evaluate

_ARGUMENT = re.compile(
    r"(Tensor(?: *\?| *\( *[A-Za-z] *! *\))?|int(?: *\[\])?|float|bool|str)"
    r"\s*\b([A-Za-z_]\w*)\s*(?:=\s*(.+))?"
)
_SCHEMA = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*->\s*(.+?)\s*", re.DOTALL)
_LITERALS = {"int": int, "bool": bool, "str": str, "float": (int, float), "int[]": list}
_LIMIT = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?P<word>\bof\b|\bin\b|[<>]=?)\s*(?P<value>[^<>=\s](?:[^<>=]*[^<>=\s])?)\s*"
)
_NUMBERS = {"int": r"-?\d+", "float": r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"}
_ARITIES = {"len": 1, "numel": 1, "broadcast": 2}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def record_of(schema: str, domain: str, **texts: str) -> OpSpec:
    """Makes a record from a schema in torch's language, `rms_norm(Tensor x, float eps=1e-6) -> Tensor`.

    `texts` are others of the record, such as `dtypes` and `shapes`. RecordSyntaxError: one of them does not
    parse.
    """
    found = _SCHEMA.fullmatch(schema)
    if found is None:
        raise _error(schema, "expected name(arguments) -> results, as in mish(Tensor x) -> Tensor")
    name, arguments, results = found.groups()
    inputs: list[Input] = []
    attributes: list[Attribute] = []
    for text in _arguments(arguments):
        kind, argument, default = _parse_argument(schema, text)
        if kind.startswith("Tensor"):
            if attributes:
                raise _error(schema, "tensors come before attributes")
            inputs.append(Input(argument, kind == "Tensor?", kind.endswith("!)")))
        else:
            attributes.append(Attribute(argument, kind, default))
    outputs = _outputs(schema, results) + tuple(f"{entry.name}_out" for entry in inputs if entry.written)
    if not outputs:
        raise _error(schema, "an op that returns nothing writes an input: Tensor(a!) cache")
    if not inputs:
        raise _error(schema, "an op needs at least one Tensor")
    names = [entry.name for entry in inputs] + [entry.name for entry in attributes]
    if outputs[0] == "y" and "y" in names and results == "Tensor":  # the output has no name of the user's
        schema, outputs = f"{schema.rstrip()} out", ("out", *outputs[1:])
    names += outputs
    if repeated := next((each for each in names if names.count(each) > 1), None):
        raise _error(schema, f"{repeated} names two things")
    writes = {f"{entry.name}_out": entry.name for entry in inputs if entry.written}
    dtypes = texts.get("dtypes", "float32; float16; bfloat16; float64")
    memory = entries(texts.get("memory", ""))
    values = {**dict.fromkeys((e.name for e in inputs), "input"), **{e.name: e.kind for e in attributes}}
    bounds = _bounds(texts.get("sizes", ""), {*names})
    where = f"op {name}, shape"
    given = dict.fromkeys(outputs, "") | writes | entries(texts.get("shapes", ""))
    record = OpSpec(
        name,
        "Custom" + "".join(word[:1].upper() + word[1:] for word in name.split("_")),
        " ".join(schema.split()),
        tuple(inputs),
        tuple(attributes),
        outputs,
        dtypes,
        _combinations(dtypes, [*(entry.name for entry in inputs), *outputs], writes),
        {n: parse_shape(text or inputs[0].name, {*values, *bounds}, where) for n, text in given.items()},
        {n: parse_shape(t, {*values}, where) for n, t in entries(texts.get("input_shapes", "")).items()},
        {n: parse_shape(text, {*values}, where) if text else None for n, text in bounds.items()},
        _limits(texts.get("choices", ""), texts.get("limits", ""), values),
        writes | entries(texts.get("in_place", "")),
        tuple(
            Gradient(tuple(map(str.strip, names.split(","))), text.strip())
            for names, _, text in (part.partition("=") for part in _parts(texts.get("gradient", "")))
            if names.strip()
        ),
        texts.get("autocast", "keep"),
        rows=_rows(texts.get("rows", "")),
        host_inputs=frozenset(name for name, place in memory.items() if place == "host"),
        optional_outputs=frozenset(name for name, what in memory.items() if what == "optional"),
        domain=domain,
        texts=texts,
    )
    _check_shapes(record)
    return record


def record_of_library(fields: Mapping[str, Any], domain: str, domain_version: int) -> OpSpec:
    """Reads a record from a library's JSON; KeyError, TypeError, ValueError, RecordError: damaged."""
    texts = dict(fields)
    is_elementwise = check_kind("elementwise", texts.pop("elementwise"), bool)
    devices = tuple(check_kind("device", device, str) for device in texts.pop("devices"))
    for name, text in texts.items():
        check_kind(name, text, str)
    record = record_of(domain=check_kind("domain", domain, str), **texts)
    if unknown := {dtype for each in record.combinations for dtype in each.values()} - {*DTYPES}:
        raise RecordError(f"op {record.name}: {unknown.pop()} is no dtype of this twinop")
    return replace(
        record,
        schema=texts["schema"],
        is_elementwise=is_elementwise,
        devices=devices,
        domain_version=check_kind("domain_version", domain_version, int),
    )


def redeclared(record: OpSpec, **texts: str) -> OpSpec:
    """Returns a record made by hand with other texts. Raises RecordSyntaxError if one does not parse."""
    again = record_of(record.schema, record.domain, **{**record.texts, **texts})
    return replace(again, devices=record.devices, domain_version=record.domain_version)


@cache
def entries(text: str) -> dict[str, str]:
    """Parses `"y = x; s = x[:-1]"` into a dict, which is kept; values may have "=" and, in quotes, ";"."""
    result: dict[str, str] = {}
    *parts, last = _parts(text)
    for part in [*parts, last] if last.strip() else parts:
        name, _, value = map(str.strip, part.partition("="))
        if not name.isidentifier() or not value or name in result:
            problem = f"`{part.strip()}`; expected entries `name = value`, each name once"
            raise RecordSyntaxError(f"record: {problem}")
        result[name] = value
    return result


def _parts(text: str) -> list[str]:
    """Splits at the semicolons outside quotes."""
    return re.split(r""";(?=(?:[^"']|"[^"]*"|'[^']*')*$)""", text)


def _combinations(text: str, tensors: list[str], written: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    result = []
    for part in text.split(";"):
        first, _, rest = part.strip().partition(" ")
        found = dict.fromkeys(tensors, first) | dict(re.findall(r"(\w+) *= *(\w+)", rest))
        result.append(found | {output: found[name] for output, name in written.items()})
    return tuple(result)


def _rows(text: str) -> tuple[str | int, bool] | None:
    found = re.fullmatch(r"\s*(?:(-?\d+)|(\w+))\s*(:?)\s*", text)
    return found and (int(found[1]) if found[1] else found[2], bool(found[3]))


def _bounds(text: str, taken: Collection[str]) -> dict[str, str]:
    """Parses `"n <= x[0]; m"`. A size without a bound has ""."""
    found: dict[str, str] = {}
    for part in re.finditer(r"[^;]*[^;\s][^;]*", text):
        name, sign, bound = (each.strip() for each in part[0].partition("<="))
        if not name.isidentifier() or bool(sign) != bool(bound):
            problem = "expected names with bounds, `n <= x[0]; m`"
        elif name in found or name in taken:
            problem = f"{name} is an argument, an output or another size already"
        else:
            found[name] = bound
            continue
        raise RecordSyntaxError(f"sizes: `{part[0].strip()}`: {problem}")
    return found


def _limits(choices: str, limits: str, kinds: Mapping[str, str]) -> tuple[tuple[str, str, Any], ...]:
    """Parses limits; `kinds` are those of the attributes by name, and "input"."""
    found: list[tuple[str, str, Any]] = [
        (name, "in", choice.strip()) for name, text in entries(choices).items() for choice in text.split("|")
    ]
    for part in re.finditer(r"[^;]*[^;\s][^;]*", limits):
        limit = _LIMIT.fullmatch(part[0])
        name, word, value = limit.groups() if limit else ("", "", "")
        kind = kinds.get(name, "")
        if word == "of" and kind == "int" and kinds.get(value) == "input":
            found.append((name, word, value))
        elif word == "in" and kind == "int" and re.fullmatch(r"-?\d+( *\| *-?\d+)*", value):
            found += ((name, word, int(each)) for each in value.split("|"))
        elif word not in ("", "of", "in") and re.fullmatch(_NUMBERS.get(kind, "$^"), value):
            found.append((name, word, ast.literal_eval(value)))
        else:
            problem = (
                "expected `axis of x` or `n in 0 | 1` for an int, or a bound of an int or a float: "
                "`eps > 0`, `p <= 0.5`"
            )
            raise RecordSyntaxError(f"limits: `{part[0].strip()}`: {problem}")
    return tuple(found)


def parse_shape(text: str, names: Collection[str], where: str = "shape") -> Expression:
    """Parses a shape with these names, in the language of `kernels/record/shape.h`; or RecordSyntaxError."""

    def tree(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name in names:
                return name
            case ast.Name(id=name) if name.isascii():
                raise RecordSyntaxError(f"{where} `{text}`: {name} is not an input or an attribute")
            case ast.List(elts=sizes):
                return ["list", *map(tree, sizes)]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = tree(operand)
                return -value if isinstance(value, int) else ["-", 0, value]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
                return [_SIGNS[type(op)], tree(left), tree(right)]
            case ast.Subscript(value=ast.Name() as name, slice=ast.Slice(lower=begin, upper=end, step=None)):
                return ["slice", tree(name), begin and tree(begin), end and tree(end)]
            case ast.Subscript(value=ast.Name() as name, slice=index):
                return ["at", tree(name), tree(index)]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if _ARITIES.get(name) == len(args):
                return [name, *map(tree, args)]
            case ast.IfExp(test=ast.Compare(ast.Name() as name, [ast.Eq()], [ast.Constant(str(of))])):
                return ["if", tree(name), of, tree(node.body), tree(node.orelse)]
        part = ast.get_source_segment(text, node) or text
        raise RecordSyntaxError(f"{where} `{text}`: `{part}` is not in the language of shapes")

    try:
        return Expression(text, tree(ast.parse(text, mode="eval").body))
    except SyntaxError as error:
        raise RecordSyntaxError(f"{where} `{text}`: {error.msg}") from error


def _check_shapes(record: OpSpec) -> None:
    """Raises RecordSyntaxError unless the shape expressions are shapes."""
    shapes = {entry.name: (1,) * 32 for entry in record.inputs}
    values = {"int": 1, "bool": True, "float": 1.0, "str": "", "int[]": [1] * 8}
    attributes = {entry.name: values[entry.kind] for entry in record.attributes}
    bounds = [Expression(bound.text, ["list", bound.tree]) for bound in record.sizes.values() if bound]
    for each in (*record.shapes.values(), *record.input_shapes.values(), *bounds):
        try:
            evaluate(record, each, shapes, attributes)
        except RecordSyntaxError:
            raise
        except RecordError:
            pass  # it parses; the sizes above do not fit it


def _arguments(text: str) -> list[str]:
    """Splits at the commas outside brackets and quotes."""
    return [each.strip() for each in re.findall(r"""\s*((?:\[[^]]*\]|"[^"]*"|'[^']*'|[^,])+)""", text)]


def _parse_argument(schema: str, text: str) -> tuple[str, str, Any]:
    found = _ARGUMENT.fullmatch(text)
    if found is None:
        raise _error(
            schema,
            f"{text!r} is not an argument; expected one of Tensor, Tensor?, Tensor(a!), int, "
            "float, bool, str, int[], then a name, and a default: float eps=1e-6",
        )
    kind, name, default = found.groups()
    kind = kind.replace(" ", "")
    if kind.startswith("Tensor"):
        if default not in (None, "None") or (default is not None and kind != "Tensor?"):
            raise _error(schema, f"{text!r}: only a Tensor? has a default, None")
    elif default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, SyntaxError):
            value = None
        is_bool_elsewhere = isinstance(value, bool) and kind != "bool"
        if not isinstance(value, _LITERALS[kind]) or is_bool_elsewhere:  # type: ignore[arg-type]
            raise _error(schema, f"{text!r}: its default is not of type {kind}")
        return kind, name, float(value) if kind == "float" else value
    return kind, name, None


def _outputs(schema: str, results: str) -> tuple[str, ...]:
    """Returns the names of the outputs."""
    if re.fullmatch(r"\(\s*\)", results):
        return ()
    if "Tensor(" in results:
        raise _error(schema, "it does not return its Tensor(a!), which is the output <input>_out by itself")
    several, names = results.startswith("(") and results.endswith(")") and "," in results, list[str]()
    for text in results.strip("()").split(","):
        part = text.split()
        if not part or part[0] != "Tensor" or len(part) > 2:
            raise _error(schema, "it returns Tensor, or several with names: (Tensor y, Tensor mean)")
        if several and len(part) == 1:
            raise _error(schema, "several results have names: (Tensor y, Tensor mean)")
        names.append(part[1] if len(part) == 2 else "y")
    return tuple(names)


def _error(schema: str, problem: str) -> RecordSyntaxError:
    return RecordSyntaxError(f"op schema: {problem}, in `{' '.join(schema.split())}`")
