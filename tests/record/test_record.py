"""The C++ parser and Python's read the same in a record."""

import struct
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from record_driver import driver
from samples import ALL, RECORDS

from twinop.errors import RecordError
from twinop.export import op_schema
from twinop.libraries.library import find_library, read_library
from twinop.record.op_schema import default_of
from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION, OpSpec
from twinop.record.schema_text import entries, record_of_library

TORCH_TYPES = {"List[int]": "int[]", "Optional[Tensor]": "Tensor?"}


def assert_same_schema(record: OpSpec, schema: Any) -> None:
    """Checks that our parser and torch's read the schema alike."""
    assert record.name == schema.name.removeprefix(f"{record.namespace}::")
    ours = [(entry.name, "Tensor?" if entry.optional else "Tensor") for entry in record.inputs]
    ours += [(entry.name, entry.kind) for entry in record.attributes]
    torchs = [(entry.name, TORCH_TYPES.get(str(entry.type), str(entry.type))) for entry in schema.arguments]
    assert ours == torchs
    defaults = {entry.name: entry.default_value for entry in schema.arguments if entry.has_default_value()}
    attributes = {entry.name: entry.default for entry in record.attributes if not entry.required}
    assert attributes == {name: value for name, value in defaults.items() if record.attribute(name)}
    assert all(type(defaults[name]) is type(value) for name, value in attributes.items())
    tensors = {name: value for name, value in defaults.items() if not record.attribute(name)}
    assert set(tensors.values()) <= {None}
    assert set(tensors) <= {entry.name for entry in record.inputs if entry.optional}
    returned = record.outputs[: len(record.outputs) - len(record.written)]
    assert list(returned) == [entry.name or "y" for entry in schema.returns]


@pytest.mark.parametrize("record", ALL.values(), ids=list(ALL))
def test_the_library_and_torch_read_one_schema(record: OpSpec) -> None:
    schema = getattr(getattr(torch.ops, record.namespace), record.name).default._schema
    assert_same_schema(record, schema)
    assert_same_schema(record, torch._C.parse_schema(record.schema))


@pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))
def test_onnx_declares_the_op_like_the_record(record: OpSpec) -> None:
    schema: Any = op_schema(record)  # onnx's enumerations have no types
    assert (schema.name, schema.domain, schema.since_version) == (record.onnx_name, DOMAIN, DOMAIN_VERSION)
    assert [(entry.name, entry.option.name == "Optional") for entry in schema.inputs] == [
        (entry.name, entry.optional) for entry in record.inputs
    ]
    assert [entry.name for entry in schema.outputs] == list(record.outputs)
    kinds = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING", "int[]": "INTS"}
    attributes = dict(schema.attributes)
    for entry in record.attributes:
        found = attributes.pop(entry.name)
        assert (found.type.name, found.required) == (kinds[entry.kind], entry.required)
        value = helper.get_attribute_value(found.default_value)
        value = tuple(value) if entry.kind == "int[]" else value
        assert (value.decode() if isinstance(value, bytes) else value) == default_of(entry)
    assert not attributes


def test_schemas_of_another_domain() -> None:
    """Ops of another domain have the right schemas. They stay unloaded: other tests use all loaded ops."""
    library = read_library(find_library("test_abi"))
    assert library.records.keys() == {"packed", "scale_by", "spread", "take"}
    for record in library.records.values():
        assert (record.domain, record.domain_version) == ("test.abi", 2)
        assert_same_schema(record, torch._C.parse_schema(record.schema))
        assert record.host_inputs == ({"factors"} if record.name == "scale_by" else set())


NAMES = st.from_regex(r"v[A-Z0-9_]{1,6}", fullmatch=True)  # no keyword of Python, which torch refuses
INTS = st.integers(-(10**6), 10**6)
DEFAULTS = {
    "int": INTS.map(str),
    "float": st.one_of(
        INTS.map(str),
        st.floats(-1e30, 1e30, allow_subnormal=False).map(repr),
        st.sampled_from([".5", "5.", "-0.25e-3", "1E+4", "1e-6"]),
    ),
    "bool": st.sampled_from(["True", "False"]),
    "str": st.text("abz ,;:=()[]|'-_09", max_size=8).map(lambda text: f'"{text}"'),
    "int[]": st.lists(INTS, max_size=8).map(str),
}


@st.composite
def schemas(draw: st.DrawFn) -> str:
    names = draw(st.lists(NAMES, min_size=9, max_size=9, unique=True))
    with_default = False
    arguments = []
    for kind in ["Tensor", *draw(st.lists(st.sampled_from(["Tensor", "Tensor?"]), max_size=2))]:
        with_default = with_default or (kind == "Tensor?" and draw(st.booleans()))
        arguments.append(f"Tensor? {names.pop()}=None" if with_default else f"{kind} {names.pop()}")
    for kind in draw(st.lists(st.sampled_from(sorted(DEFAULTS)), max_size=3)):
        with_default = with_default or draw(st.booleans())
        arguments.append(f"{kind} {names.pop()}" + (f"={draw(DEFAULTS[kind])}" if with_default else ""))
    outputs = draw(
        st.sampled_from(["Tensor", f"Tensor {names[-1]}", f"(Tensor {names[-1]}, Tensor {names[-2]})"])
    )
    separator = draw(st.sampled_from([", ", ",", " , "]))
    return f"{names[0]}0({separator.join(arguments)}) -> {outputs}"


def signature(record: OpSpec) -> str:
    """Returns what the driver says of a record."""
    found = [f"{record.name} {record.onnx_name}"]
    for entry in record.inputs:
        kind = "Tensor?" if entry.optional else "Tensor(a!)" if entry.written else "Tensor"
        types = [each[entry.name] for each in record.combinations]
        found.append(" ".join([kind, entry.name, *types, *["on host"] * (entry.name in record.host_inputs)]))
    found += [f"{entry.kind} {entry.name}" for entry in record.attributes]
    for name in record.outputs:
        more = [f"in {record.in_place[name]}"] if name in record.in_place else []
        more += ["optional"] * (name in record.optional_outputs)
        found.append(" ".join([name, *(each[name] for each in record.combinations), *more]))
    rows = [f"rows {record.rows[0]}{':' * record.rows[1]}"] if record.rows else []
    return "|".join(found + rows)


def parse(text: str, **texts: str) -> OpSpec | None:
    """Returns the record, which both parsers read alike; None: the C++ parser refuses it."""
    answer = driver().ask("schema", text, *(field for item in texts.items() for field in item))
    if answer.startswith("error "):
        return None
    record = record_of_library({"schema": text, "elementwise": False, "devices": []} | texts, DOMAIN, 1)
    assert signature(record) == answer
    return record


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schemas())
def test_schemas_parse_as_in_torch(text: str) -> None:
    record = parse(text)
    assert record, driver().ask("schema", text)
    assert_same_schema(record, torch._C.parse_schema(text))
    assert record.schema == text
    values = driver().ask("defaults", text).split("|") if record.attributes else []
    for attribute, value in zip(record.attributes, _joined(values, record), strict=True):
        assert value == _as_cpp(attribute.kind, attribute.default), attribute


def _joined(values: list[str], record: OpSpec) -> list[str]:
    """Undoes a split at "|" inside str defaults."""
    for i, attribute in enumerate(record.attributes):
        extra = str(attribute.default).count("|") if attribute.kind == "str" else 0
        values[i : i + extra + 1] = ["|".join(values[i : i + extra + 1])]
    return values


def _as_cpp(kind: str, default: Any) -> str:
    """Returns a default as the launchers get it: floats rounded to fp32, bools as ints."""
    if default is None:
        return ""
    if kind == "float":
        (narrow,) = struct.unpack("f", struct.pack("f", default))
        return f"{narrow:.17g}"
    return (
        ",".join(map(str, default)) if kind == "int[]" else str(int(default) if kind == "bool" else default)
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schemas(), st.data())
def test_what_our_parser_takes_torch_reads_the_same(text: str, data: st.DataObject) -> None:
    """If our parser accepts a text with one changed character, torch reads the same schema."""
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", text[at] * 2, *" ()[],=?x0.\"'-"])) + text[at + 1 :]
    record = parse(text)
    if record is not None:
        try:
            expected = torch._C.parse_schema(text)
        except IndexError:  # torch reads numbers with stod, which refuses subnormal ones
            assume(False)
        assert_same_schema(record, expected)


ENTRIES = {
    "": {},
    "y = x": {"y": "x"},
    " y=x ; s = x[:-1]; ": {"y": "x", "s": "x[:-1]"},
    "a = 1 if n == 2 else 3": {"a": "1 if n == 2 else 3"},
    "a = f(x, 'p;q') ; b = \"c = d; e\"": {"a": "f(x, 'p;q')", "b": '"c = d; e"'},
    "a = '[' ; b = x": {"a": "'['", "b": "x"},
}


@pytest.mark.parametrize(("text", "expected"), ENTRIES.items())
def test_entries(text: str, expected: dict[str, str]) -> None:
    assert entries(text) == expected
    assert {name: driver().ask("entry", text, name) for name in expected} == expected


@pytest.mark.parametrize("text", ["x", "= x", "y =", "y = x; y = x", "a b = x", "y = x;; z = x", ";", "="])
def test_wrong_entries_are_refused(text: str) -> None:
    with pytest.raises(RecordError, match="expected entries `name = value`, each name once"):
        entries(text)


def parsed(schema: str, **texts: str) -> OpSpec:
    record = parse(schema, **texts)
    assert record, driver().ask("schema", schema, *(field for item in texts.items() for field in item))
    return record


def test_combinations() -> None:
    text = "float32; float16 w=float32;bfloat16 w = float32 y=float64"
    assert parsed("f(Tensor x, Tensor? w=None) -> Tensor", dtypes=text).combinations == (
        {"x": "float32", "w": "float32", "y": "float32"},
        {"x": "float16", "w": "float32", "y": "float16"},
        {"x": "bfloat16", "w": "float32", "y": "float64"},
    )


def test_gradients_and_limits() -> None:
    schema = "f(Tensor x, Tensor w, Tensor? b=None, int n=1, float e=1, str s='a', int k=0) -> Tensor"
    gradient = "x, w, _ = f(grad, n == 1, 'a; b = c') ; b = grad_x;"
    limits = "n of x; e >= 0 ; e<.5; k in -1 | 7;"
    record = parsed(schema, gradient=gradient, limits=limits, choices="s = a | b_2")
    assert [(gradient.names, gradient.text) for gradient in record.gradients] == [
        (("x", "w", "_"), "f(grad, n == 1, 'a; b = c')"),
        (("b",), "grad_x"),
    ]
    assert record.gradients[0].inputs == ("x", "w")
    assert record.limits == (
        *(("s", "in", "a"), ("s", "in", "b_2"), ("n", "of", "x"), ("e", ">=", 0), ("e", "<", 0.5)),
        *(("k", "in", -1), ("k", "in", 7)),
    )
    assert record.choices == {"s": ("a", "b_2"), "k": (-1, 7)}


def test_trees() -> None:
    """All of the language of shapes, and the small texts."""
    tensors, attributes = "Tensor x, Tensor(a!) c, Tensor? w=None", "str m='a', int[] p=[1, -2], int n=3"
    schema = f"f({tensors}, {attributes}) -> (Tensor y, Tensor z)"
    shapes = 'y = x[:-1] + [(x[-1] + n) // 2 * p[0] - len(w), -n, numel(c[n:])]; z = [n if m == "a" else 0]'
    texts = {"shapes": shapes, "memory": "w = host; z = optional", "in_place": "y = x"}
    record = parsed(schema, **texts, input_shapes="w = broadcast(x, c) + []")
    of_last = ["-", ["*", ["//", ["+", ["at", "x", -1], "n"], 2], ["at", "p", 0]], ["len", "w"]]
    numel = ["numel", ["slice", "c", "n", None]]
    assert record.shapes["y"].tree == ["+", ["slice", "x", None, -1], ["list", of_last, ["-", 0, "n"], numel]]
    assert record.shapes["z"].tree == ["list", ["if", "m", "a", "n", 0]]
    assert record.shapes["c_out"].tree == "c" and record.in_place == {"y": "x", "c_out": "c"}
    assert record.host_inputs == {"w"} and record.optional_outputs == {"z"}
    for rows, found in (("n:", ("n", True)), ("-1", (-1, False)), ("n", ("n", False))):
        assert parsed("f(Tensor x, int n=1) -> Tensor", rows=rows).rows == found
    counted = parsed("f(Tensor x) -> Tensor", shapes="y = [k] + x[1:]", sizes="k <= x[0] * 2")
    assert counted.sizes["k"] and counted.sizes["k"].tree == ["*", ["at", "x", 0], 2]


def test_the_schema_hash_follows_the_signature() -> None:
    one, other = parse("f(Tensor x, int n=1) -> Tensor"), parse("f(Tensor x, int n=2) -> Tensor")
    assert one and other and one.schema_hash != other.schema_hash and len(one.schema_hash) == 16


def test_former_hashes_are_those_without_the_last_attributes() -> None:
    def hash_of(attributes: str) -> str:
        record = parse(f"f(Tensor x{attributes}) -> Tensor")
        assert record
        return record.schema_hash

    record = parse('f(Tensor x, int n=1, str s="a, b", bool b=False) -> Tensor')
    former = {hash_of(text) for text in ("", ", int n=1", ', int n=1, str s="a, b"')}
    assert record and record.former_hashes == former
    record = parse("f(Tensor x, int n, bool b=False) -> Tensor")
    assert record and record.former_hashes == {hash_of(", int n")}
    record = parse("f(Tensor x,int[] n = [1], str s = ') -> T', bool b =True) -> Tensor")
    assert record and record.former_hashes == {hash_of(""), hash_of(",int[] n = [1]")} | {
        hash_of(",int[] n = [1], str s = ') -> T'")
    }
