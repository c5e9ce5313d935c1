"""Makes records by hand: parses op schemas as `kernels/record/schema.h` does in C++."""

import ast
import re

from .errors import RecordError
from .record import Attribute, Input, Record

_ARGUMENT = re.compile(r"(Tensor\??|Tensor\[\]|int|float|bool|str|int\[\])\s+([A-Za-z_]\w*)\s*(?:=\s*(.+))?")
_SCHEMA = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*->\s*(.+?)\s*", re.DOTALL)
_LITERALS = {"int": int, "bool": bool, "str": str, "float": (int, float), "int[]": list}
_LONGEST = 47  # characters of a name
_MOST = {"arguments": 16, "outputs": 8}


def record_of(schema: str, domain: str, **texts: str) -> Record:
    """Makes a record from a schema in torch's language, `rms_norm(Tensor x, float eps=1e-6) -> Tensor`.

    Args:
        texts: other texts of the record, such as `dtypes` and `shapes`.

    Raises:
        RecordError: the schema does not parse.
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
            if attributes or (inputs and inputs[-1].repeated):
                raise _error(schema, "tensors come before attributes, and a Tensor[] is the last tensor")
            inputs.append(Input(argument, kind == "Tensor?", kind == "Tensor[]"))
        else:
            attributes.append(Attribute(argument, kind, default))
    outputs = _outputs(schema, results)
    if not inputs:
        raise _error(schema, "an op needs at least one Tensor")
    for what, count in (("arguments", len(inputs) + len(attributes)), ("outputs", len(outputs))):
        if count > _MOST[what]:
            raise _error(schema, f"it has {count} {what}; an op has at most {_MOST[what]}")
    names = [entry.name for entry in inputs] + [entry.name for entry in attributes]
    if outputs == ("y",) and "y" in names and results == "Tensor":  # the output has no name of the user's
        schema, outputs = f"{schema.rstrip()} out", ("out",)
    names += outputs
    if repeated := next((each for each in names if names.count(each) > 1), None):
        raise _error(schema, f"{repeated} names two things")
    if longest := next((each for each in (name, *names) if len(each) > _LONGEST), None):
        raise _error(schema, f"the name {longest} has more than {_LONGEST} characters")
    return Record(
        name,
        f"Custom{re.sub('(?:^|_)(.?)', lambda part: part[1].upper(), name)}",
        " ".join(schema.split()),
        tuple(inputs),
        tuple(attributes),
        outputs,
        domain=domain,
        **texts,  # type: ignore[arg-type]
    )


def _arguments(text: str) -> list[str]:
    """Splits at the commas outside brackets and quotes."""
    return [part.strip() for part in re.findall(r"""(?:\[[^]]*\]|"[^"]*"|'[^']*'|[^,])+""", text)]


def _parse_argument(schema: str, text: str) -> tuple[str, str, str | None]:
    found = _ARGUMENT.fullmatch(text)
    if found is None:
        raise _error(
            schema,
            f"{text!r} is no argument; expected one of Tensor, Tensor?, Tensor[], int, float, bool, str, "
            "int[], then a name, and a default: float eps=1e-6",
        )
    kind, name, default = found.groups()
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
            raise _error(schema, f"{text!r}: its default is no {kind}")
    return kind, name, default


def _outputs(schema: str, results: str) -> tuple[str, ...]:
    several = results.startswith("(") and results.endswith(")")
    parts = [part.split() for part in results.strip("()").split(",")]
    if any(not part or part[0] != "Tensor" or len(part) > 2 for part in parts):
        raise _error(schema, "it returns Tensor, or several with names: (Tensor y, Tensor mean)")
    if several and len(parts) > 1 and any(len(part) == 1 for part in parts):
        raise _error(schema, "several results have names: (Tensor y, Tensor mean)")
    return tuple(part[1] if len(part) == 2 else "y" for part in parts)


def _error(schema: str, problem: str) -> RecordError:
    return RecordError(f"op schema {schema!r}: {problem}")
