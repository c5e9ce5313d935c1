"""The op record of `kernels/record/record.h` in Python, read from a library or made by hand.

Every adapter is derived from it: torch registration, exporters, checks of models.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

DOMAIN = "custom_domain"
"""The domain of twinop's own ops. Other libraries have other domains (`OpSpec.domain`)."""
DOMAIN_VERSION = 1

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2",
    "complex64", "complex128",
)  # fmt: skip
"""The dtypes that records may have (`kernels/record/call.h`)."""


@dataclass(frozen=True)
class Input:
    """A tensor of the schema."""

    name: str
    optional: bool = False
    # The call writes into it (`Tensor(a!)`), and the op has an output `<name>_out` for it.
    written: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of the schema. `kind`: int, float, bool, str or int[]. `default` None: it is required."""

    name: str
    kind: str
    default: Any = field(default=None, hash=False)

    @property
    def required(self) -> bool:
        """Whether a call must give the attribute."""
        return self.default is None


@dataclass(frozen=True)
class Expression:
    """A shape: the text, which messages show, and the tree that `shapes.evaluate` evaluates.

    A tree is a number, the name of an input, an attribute or a size, or a list: an operation, then what it
    works on. ["slice", "x", "axis", None] is x[axis:], ["at", "x", -1] is x[-1].
    """

    text: str
    tree: Any


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
    """One op. Dicts have the names of inputs, outputs, attributes or sizes as keys."""

    name: str
    onnx_name: str
    schema: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[str, ...]
    dtypes: str  # the combinations as messages show them
    combinations: tuple[dict[str, str], ...]  # the allowed dtypes, of every input and output
    shapes: dict[str, Expression]  # of the outputs
    input_shapes: dict[str, Expression] = field(default_factory=dict)  # that inputs must have
    # Of outputs, that come from the data, with their bounds.
    sizes: dict[str, Expression | None] = field(default_factory=dict)
    # (attribute, word, value): ("dim", "of", "x"), ("n", "in", 0), ("eps", ">", 0).
    limits: tuple[tuple[str, str, Any], ...] = ()
    # The inputs that outputs may overwrite or, if they are written, are.
    in_place: dict[str, str] = field(default_factory=dict)
    gradients: tuple[Gradient, ...] = ()  # in the order of their evaluation
    autocast: str = "keep"
    is_elementwise: bool = False
    # Their dimension, a number or an attribute's name; whether they go on to the last one.
    rows: tuple[str | int, bool] | None = None
    host_inputs: frozenset[str] = frozenset()  # are in host memory on every device
    optional_outputs: frozenset[str] = frozenset()  # a node may omit these
    devices: tuple[str, ...] = ()
    domain: str = DOMAIN
    domain_version: int = DOMAIN_VERSION
    torch_namespace: str = ""  # where it is not the domain's
    # What a declaration in Python says, by the names of `kernels/record/record.h`.
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        return hash((self.domain, self.schema))

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
    def functional_schema(self) -> str:
        """The schema of that op, which returns the new content of the inputs that this one writes."""
        if not self.written:
            return self.schema
        arguments = re.sub(r"Tensor *\([^)]*\)", "Tensor", self.schema[self.schema.index("(") :])
        outputs = ", ".join(f"Tensor {name}" for name in self.outputs)
        return f"{self.functional_name}{arguments[: arguments.rindex('->')]}-> ({outputs})"

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
    def schema_hash(self) -> str:
        """A hash of the op's signature (16 hex digits), which exported models carry."""
        return hashlib.sha256(self.schema.encode()).hexdigest()[:16]

    @property
    def former_hashes(self) -> set[str]:
        """The hashes without the last attributes, whose defaults do what the op did before it had them."""
        parts = re.fullmatch(r"(.*)(\)\s*->.*)", self.schema, re.DOTALL)
        assert parts is not None, self.schema
        (arguments, rest), found = parts.groups(), set[str]()
        for each in reversed(self.attributes):
            if each.required:
                break
            kind = re.escape(each.kind).replace(r"\[", r" *\[")
            *_, last = re.finditer(rf"\s*,\s*{kind}\s+{each.name}\s*=", arguments)
            arguments = arguments[: last.start()]
            found.add(replace(self, schema=arguments + rest).schema_hash)
        return found

    def combination_of(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """Returns the first dtype combination with these dtypes (by tensor name), or None."""
        for combination in self.combinations:
            if all(combination[name] == dtype for name, dtype in given.items()):
                return combination
        return None

    @cached_property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The allowed values of attributes that must have one of some, by name."""
        found = [(name, value) for name, word, value in self.limits if word == "in"]
        return {name: tuple(value for each, value in found if each == name) for name, _ in found}

    @property
    def broadcasts(self) -> bool:
        """Whether this is an elementwise op whose inputs broadcast."""
        tree = self.shapes[self.outputs[0]].tree
        return self.is_elementwise and isinstance(tree, list) and tree[0] == "broadcast"

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
