"""Makes records by hand: parses op schemas as `kernels/record/schema.h` does in C++."""

import ast
import re
from collections.abc import Iterator

from ..errors import RecordSyntaxError
from .op_spec import Attribute, Input, OpSpec
from .shapes import check_texts

_ARGUMENT = re.compile(
    r"(Tensor\??|Tensor\[\]|Tensor\([A-Za-z]!\)|int|float|bool|str|int\[\])"
    r"\s+([A-Za-z_]\w*)\s*(?:=\s*(.+))?"
)
_SCHEMA = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*->\s*(.+?)\s*", re.DOTALL)
_BEGIN = re.compile(r"\s*(?:[A-Za-z_]\w*\s*(?:\((?:.*\)\s*(?:->\s*)?)?)?)?", re.DOTALL)
"""As much of a schema as there is."""
_LITERALS = {"int": int, "bool": bool, "str": str, "float": (int, float), "int[]": list}
_LONGEST = 47  # characters of a name
_MOST = {"arguments": 16, "outputs": 8}


def record_of(schema: str, domain: str, **texts: str) -> OpSpec:
    """Makes a record from a schema in torch's language, `rms_norm(Tensor x, float eps=1e-6) -> Tensor`.

    Args:
        texts: other texts of the record, such as `dtypes` and `shapes`.

    Raises:
        RecordSyntaxError: the schema or another text does not parse.
    """
    found = _SCHEMA.fullmatch(schema)
    if found is None:
        begin = _BEGIN.match(schema)
        assert begin is not None
        raise _error(
            schema, begin.end(), "expected name(arguments) -> results, as in mish(Tensor x) -> Tensor"
        )
    name, arguments, results = found.groups()
    inputs: list[Input] = []
    attributes: list[Attribute] = []
    places: dict[str, list[int]] = {"arguments": [], "outputs": [], "written": []}
    for place, text in _arguments(arguments, found.start(2)):
        places["arguments"].append(place)
        kind, argument, default = _parse_argument(schema, place, text)
        if kind.startswith("Tensor"):
            if attributes or (inputs and inputs[-1].repeated):
                raise _error(
                    schema, place, "tensors come before attributes, and a Tensor[] is the last tensor"
                )
            written = kind.endswith("!)")
            if written and kind in schema[:place]:
                raise _error(schema, place, "each Tensor(a!) has a letter of its own")
            inputs.append(Input(argument, kind == "Tensor?", kind == "Tensor[]", written))
            places["written"] += [place] * written
        else:
            attributes.append(Attribute(argument, kind, default))
    outputs, places["outputs"] = _outputs(schema, results, found.start(3))
    outputs += tuple(f"{entry.name}_out" for entry in inputs if entry.written)
    places["outputs"] += places["written"]
    if not outputs:
        raise _error(schema, found.start(3), "an op that returns nothing writes an input: Tensor(a!) cache")
    if not inputs:
        raise _error(schema, found.start(2), "an op needs at least one Tensor")
    for what, most in _MOST.items():
        if (count := len(places[what])) > most:
            raise _error(schema, places[what][most], f"it has {count} {what}; an op has at most {most}")
    names = [entry.name for entry in inputs] + [entry.name for entry in attributes]
    if outputs[0] == "y" and "y" in names and results == "Tensor":  # the output has no name of the user's
        schema, outputs = f"{schema.rstrip()} out", ("out", *outputs[1:])
    names += outputs
    if repeated := next((each for each in names if names.count(each) > 1), None):
        raise _error(schema, _words(schema, repeated)[-1], f"{repeated} names two things")
    if longest := next((each for each in (name, *names) if len(each) > _LONGEST), None):
        place = (_words(schema, longest) or _words(schema, longest.removesuffix("_out")))[0]
        raise _error(schema, place, f"the name {longest} has more than {_LONGEST} characters")
    record = OpSpec(
        name,
        f"Custom{re.sub('(?:^|_)(.?)', lambda part: part[1].upper(), name)}",
        " ".join(schema.split()),
        tuple(inputs),
        tuple(attributes),
        outputs,
        domain=domain,
        **texts,  # type: ignore[arg-type]
    )
    check_texts(record)
    return record


def _words(schema: str, name: str) -> list[int]:
    """Returns where a name stands."""
    return [found.start() for found in re.finditer(rf"\b{name}\b", schema)]


def _arguments(text: str, begin: int) -> Iterator[tuple[int, str]]:
    """Splits at the commas outside brackets and quotes. Yields the place and the text of each argument."""
    for found in re.finditer(r"""\s*((?:\[[^]]*\]|"[^"]*"|'[^']*'|[^,])+)""", text):
        yield begin + found.start(1), found[1].strip()


def _parse_argument(schema: str, place: int, text: str) -> tuple[str, str, str | None]:
    found = _ARGUMENT.fullmatch(text)
    if found is None:
        raise _error(
            schema,
            place,
            f"{text!r} is not an argument; expected one of Tensor, Tensor?, Tensor[], Tensor(a!), int, "
            "float, bool, str, int[], then a name, and a default: float eps=1e-6",
        )
    kind, name, default = found.groups()
    if kind.startswith("Tensor"):
        if default not in (None, "None") or (default is not None and kind != "Tensor?"):
            raise _error(schema, place, f"{text!r}: only a Tensor? has a default, None")
    elif default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, SyntaxError):
            value = None
        is_bool_elsewhere = isinstance(value, bool) and kind != "bool"
        if not isinstance(value, _LITERALS[kind]) or is_bool_elsewhere:  # type: ignore[arg-type]
            raise _error(schema, place + found.start(3), f"{text!r}: its default is not of type {kind}")
    return kind, name, default


def _outputs(schema: str, results: str, begin: int) -> tuple[tuple[str, ...], list[int]]:
    """Returns the names of the outputs, and where they stand."""
    if re.fullmatch(r"\(\s*\)", results):
        return (), []
    if alias := re.search(r"Tensor\(", results):
        problem = "it does not return its Tensor(a!), which is the output <input>_out by itself"
        raise _error(schema, begin + alias.start(), problem)
    several = results.startswith("(") and results.endswith(")")
    inside = results.strip("()")
    begin += results.index(inside)
    names, places = [], []
    for text in inside.split(","):
        place, part = begin + len(text) - len(text.lstrip()), text.split()
        if not part or part[0] != "Tensor" or len(part) > 2:
            raise _error(schema, place, "it returns Tensor, or several with names: (Tensor y, Tensor mean)")
        if several and "," in inside and len(part) == 1:
            raise _error(schema, place, "several results have names: (Tensor y, Tensor mean)")
        names.append(part[1] if len(part) == 2 else "y")
        places.append(place)
        begin += len(text) + 1
    return tuple(names), places


def _error(schema: str, place: int, problem: str) -> RecordSyntaxError:
    return RecordSyntaxError("op schema", schema, place, problem)
