"""The op record of `kernels/record/record.h` in Python, read from a library or made by hand.

A record is text, so that both C++ and Python can make one. Every adapter is derived from it: torch
registration, exporters, checks of models.
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from ..errors import RecordSyntaxError

DOMAIN = "custom_domain"
"""The domain of twinop's own ops. Other libraries have other domains (`OpSpec.domain`)."""
DOMAIN_VERSION = 1


_LIMIT = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?P<word>\bof\b|\bin\b|[<>]=?)\s*(?P<value>[^<>=\s](?:[^<>=]*[^<>=\s])?)\s*"
)
_NUMBERS = {"int": r"-?\d+", "float": r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"}


@dataclass(frozen=True)
class Input:
    """A tensor of the schema.

    `repeated`: one or more tensors (`Tensor[]`), only as the last input. `written`: the call writes into it
    (`Tensor(a!)`), and the op has an output `<name>_out` for it.
    """

    name: str
    optional: bool = False
    repeated: bool = False
    written: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of the schema. `kind`: int, float, bool, str or int[]. `default_text`: a literal."""

    name: str
    kind: str
    default_text: str | None = None

    @property
    def required(self) -> bool:
        """Whether a call must give the attribute."""
        return self.default_text is None

    @property
    def default(self) -> Any:
        """The default as a Python value, or None for a required attribute."""
        if self.default_text is None:
            return None
        value = ast.literal_eval(self.default_text)
        return float(value) if self.kind == "float" else value


@dataclass(frozen=True)
class Gradient:
    """A derivative formula: a Python expression over the op's arguments for one or several gradients."""

    names: tuple[str, ...]  # of the inputs, or "_" for an unused result
    text: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs whose gradients the formula gives."""
        return tuple(name for name in self.names if name != "_")


@dataclass(frozen=True)
class OpSpec:
    """One op. `kernels/record/record.h` explains each of the texts."""

    name: str
    onnx_name: str
    schema: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[str, ...]
    dtypes: str = "float32; float16; bfloat16; float64"
    shapes: str = ""
    input_shapes: str = ""
    limits: str = ""
    in_place: str = ""
    choices: str = ""
    gradient: str = ""
    autocast: str = "keep"
    layout: str = "contiguous"
    rows: str = ""
    memory: str = ""
    sizes: str = ""
    devices: tuple[str, ...] = ()
    domain: str = DOMAIN
    domain_version: int = DOMAIN_VERSION
    torch_namespace: str = ""  # where it is not the domain's

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "OpSpec":
        """Reads a record from a library's JSON (`kernels/record/json.h`), to which its domain was added.

        Raises:
            KeyError, TypeError, ValueError, RecordError: it is damaged.
        """
        special = {
            "inputs": tuple(Input(**entry) for entry in fields["inputs"]),
            "attributes": tuple(
                Attribute(entry["name"], entry["kind"], entry.get("default"))
                for entry in fields["attributes"]
            ),
            "outputs": tuple(fields["outputs"]),
            "devices": tuple(fields["devices"]),
        }
        record = cls(**{**fields, **special})
        for name, value in vars(record).items():
            check_kind(name, value, {"domain_version": int}.get(name, tuple if name in special else str))
        kinds = [attribute.kind for attribute in record.attributes]
        for text in (*record.parameters, *record.outputs, *record.devices, *kinds):
            check_kind("name", text, str)
        try:  # what is parsed when it is needed must parse
            copy = cls(**vars(record))
            _ = [attribute.default for attribute in copy.attributes], copy.combinations, copy.gradients
            _ = copy.attribute_choices, copy.attribute_limits, copy.host_inputs, copy.optional_outputs
            _ = copy.size_bounds
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return record

    @property
    def qualified_name(self) -> str:
        """The op with its domain, `custom_domain::relu`, as messages show it."""
        return f"{self.domain}::{self.name}"

    @property
    def key(self) -> str:
        """The op's name among all domains: with its domain, unless that is twinop's own."""
        return key_of(self.domain, self.name)

    @property
    def namespace(self) -> str:
        """The op's namespace in `torch.ops`: mostly the domain, without dots."""
        return self.torch_namespace or self.domain.replace(".", "_")

    @cached_property
    def written(self) -> dict[str, str]:
        """The inputs that a call writes, by the names of their outputs, which come after all others."""
        return {f"{entry.name}_out": entry.name for entry in self.inputs if entry.written}

    @property
    def functional_name(self) -> str:
        """The name of the op in `torch.ops` that writes no input: its own, or that of its functional twin."""
        return f"{self.name}_functional" if self.written else self.name

    @property
    def torch_name(self) -> str:
        """The name of the op that writes no input in torch's dispatcher."""
        return f"{self.namespace}::{self.functional_name}"

    @property
    def torch_path(self) -> str:
        """That op in Python."""
        return f"torch.ops.{self.namespace}.{self.functional_name}"

    @property
    def node_type(self) -> tuple[str, str]:
        """The domain and type of the op's nodes in ONNX models."""
        return self.domain, self.onnx_name

    @property
    def metadata_key(self) -> str:
        """The key of the schema's hash in an exported model's metadata."""
        place = "" if self.domain == DOMAIN else f"{self.domain}."
        return f"twinop.schema.{place}{self.onnx_name}"

    @property
    def parameters(self) -> list[str]:
        """The names of the inputs and attributes."""
        return [each.name for each in self.inputs] + [each.name for each in self.attributes]

    @property
    def is_backward(self) -> bool:
        """Whether this is a backward op, which exists in torch only."""
        return self.name.endswith("_backward")

    @property
    def is_elementwise(self) -> bool:
        """Whether the op runs on the elementwise skeleton."""
        return self.layout == "elementwise"

    @property
    def schema_hash(self) -> str:
        """A hash of the op's signature (16 hex digits), which exported models carry."""
        return hashlib.sha256(self.schema.encode()).hexdigest()[:16]

    @property
    def former_hashes(self) -> set[str]:
        """The hashes without the last attributes, whose defaults do what the op did before it had them."""
        schema, found = self.schema, set[str]()
        for each in reversed(self.attributes):
            schema = schema.replace(f", {each.kind} {each.name}={each.default_text})", ")")
            found.add(replace(self, schema=schema).schema_hash)
        return found

    @cached_property
    def combinations(self) -> tuple[dict[str, str], ...]:
        """The allowed dtypes: in each combination a dtype by the name of every input and output."""
        names = [entry.name for entry in self.inputs] + list(self.outputs)
        result = []
        for text in self.dtypes.split(";"):
            first, _, rest = text.strip().partition(" ")
            found = dict.fromkeys(names, first) | dict(re.findall(r"(\w+) *= *(\w+)", rest))
            result.append(found | {output: found[name] for output, name in self.written.items()})
        return tuple(result)

    def combination_of(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """Returns the first dtype combination with these dtypes (by tensor name), or None."""
        for combination in self.combinations:
            if all(combination[name] == dtype for name, dtype in given.items()):
                return combination
        return None

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The derivative formulas, in the order of their evaluation."""
        result = []
        for part in filter(str.strip, _parts(self.gradient)):
            names, _, text = part.partition("=")
            result.append(Gradient(tuple(map(str.strip, names.split(","))), text.strip()))
        return tuple(result)

    @cached_property
    def attribute_choices(self) -> dict[str, tuple[str, ...]]:
        """The allowed values of str attributes, by name."""
        return {name: tuple(map(str.strip, text.split("|"))) for name, text in entries(self.choices).items()}

    @cached_property
    def attribute_limits(self) -> tuple[tuple[str, str, str], ...]:
        """The limits: attribute, word, value: ("dim", "of", "x"), ("n", "in", "0 | 1"), ("eps", ">", "0").

        Raises:
            RecordSyntaxError: the text does not parse.
        """
        found = []
        for part in re.finditer(r"[^;]*[^;\s][^;]*", self.limits):
            limit = _LIMIT.fullmatch(part[0])
            if limit is None or not self._is_limit(**limit.groupdict()):
                problem = (
                    "expected `axis of x` or `n in 0 | 1` for an int, or a bound of an int or a float: "
                    "`eps > 0`, `p <= 0.5`"
                )
                raise RecordSyntaxError("limits", self.limits, part.start(), problem)
            found.append((limit["name"], limit["word"], limit["value"]))
        return tuple(found)

    def _is_limit(self, name: str, word: str, value: str) -> bool:
        kind = getattr(self.attribute(name), "kind", "")
        if word == "of":
            return kind == "int" and any(value == entry.name for entry in self.inputs)
        if word == "in":
            return kind == "int" and re.fullmatch(r"-?\d+( *\| *-?\d+)*", value) is not None
        return kind in _NUMBERS and re.fullmatch(_NUMBERS[kind], value) is not None

    @cached_property
    def host_inputs(self) -> frozenset[str]:
        """The inputs that are in host memory on every device."""
        return frozenset(name for name, place in entries(self.memory).items() if place == "host")

    @cached_property
    def optional_outputs(self) -> frozenset[str]:
        """The outputs that a node may omit."""
        return frozenset(name for name, what in entries(self.memory).items() if what == "optional")

    @cached_property
    def size_bounds(self) -> dict[str, str]:
        """The sizes of outputs that come from the data, by name: the bound in the language of shapes, or "".

        Raises:
            RecordSyntaxError: the text does not parse, or a name is taken.
        """
        found: dict[str, str] = {}
        for part in re.finditer(r"[^;]*[^;\s][^;]*", self.sizes):
            name, sign, bound = (text.strip() for text in part[0].partition("<="))
            if not name.isidentifier() or bool(sign) != bool(bound):
                problem = "expected names with bounds, `n <= x[0]; m`"
            elif name in found or name in self.parameters or name in self.outputs:
                problem = f"{name} is an argument, an output or another size already"
            else:
                found[name] = bound
                continue
            raise RecordSyntaxError("sizes", self.sizes, part.start(), problem)
        return found

    @property
    def has_repeated_input(self) -> bool:
        """Whether the last input is a list of tensors."""
        return len(self.inputs) > 0 and self.inputs[-1].repeated  # torch 2.11 cannot trace bool() of a tuple

    @property
    def broadcasts(self) -> bool:
        """Whether this is an elementwise op whose inputs broadcast."""
        return self.is_elementwise and "broadcast(" in self.shapes

    def attribute(self, name: str) -> Attribute | None:
        return next((entry for entry in self.attributes if entry.name == name), None)


def check_kind(name: str, value: Any, kind: type) -> Any:
    """Returns a value of a record's JSON. Raises TypeError if it has another type."""
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.80}, expected {kind.__name__}")
    return value


def key_of(domain: str, name: str) -> str:
    """Returns an op's `OpSpec.key`."""
    return name if domain == DOMAIN else f"{domain}::{name}"


@cache
def entries(text: str) -> dict[str, str]:
    """Parses `"y = x; s = x[:-1]"` into a dict, which is kept. A value may contain "=" and, in quotes, ";".

    Raises:
        RecordSyntaxError: an entry is not `name = value`, or a name occurs twice.
    """
    result: dict[str, str] = {}
    *parts, last = _parts(text)
    begin = 0
    for part in [*parts, last] if last.strip() else parts:
        name, _, value = map(str.strip, part.partition("="))
        if not name.isidentifier() or not value or name in result:
            begin += len(part) - len(part.lstrip())
            raise RecordSyntaxError("record", text, begin, "expected entries `name = value`, each name once")
        result[name] = value
        begin += len(part) + 1
    return result


def _parts(text: str) -> list[str]:
    """Splits at the semicolons outside quotes."""
    return re.split(r""";(?=(?:[^"']|"[^"]*"|'[^']*')*$)""", text)
