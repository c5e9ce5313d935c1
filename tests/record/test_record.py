"""The record: one C++ parser, and what Python reads of it."""

import json
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from record_driver import ROOT, compiler, driver

from twinop import torch_op
from twinop.errors import RecordError
from twinop.library import find_library, read_library
from twinop.record import Record, entries

LIBRARIES = ("custom_ops", "test_ops")
TORCH_TYPES = {"List[int]": "int[]", "Optional[Tensor]": "Tensor?", "List[Tensor]": "Tensor[]"}


def records() -> list[Any]:
    return [
        pytest.param(record, id=record.name)
        for stem in LIBRARIES
        for record in torch_op.load(find_library(stem)).records.values()
    ]


def assert_same_schema(record: Record, schema: Any) -> None:
    """Our parser's view of the text equals torch's."""
    assert record.name == schema.name.removeprefix(f"{record.namespace}::")
    kinds = {(True, False): "Tensor?", (False, True): "Tensor[]"}
    ours = [(entry.name, kinds.get((entry.optional, entry.repeated), "Tensor")) for entry in record.inputs]
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
    assert list(record.outputs) == [entry.name or "y" for entry in schema.returns]


@pytest.mark.parametrize("record", records())
def test_the_library_and_torch_read_one_schema(record: Record) -> None:
    schema = getattr(getattr(torch.ops, record.namespace), record.name).default._schema
    assert_same_schema(record, schema)
    assert_same_schema(record, torch._C.parse_schema(record.schema))


def test_schemas_of_another_domain() -> None:
    """Read from the file only: loaded, these ops would be among those that other tests go through."""
    library = read_library(find_library("test_abi"))
    assert library.records.keys() == {"packed", "scale_by", "total", "spread"}
    for record in library.records.values():
        assert (record.domain, record.domain_version) == ("test.abi", 2)
        assert_same_schema(record, torch._C.parse_schema(record.schema))
        assert record.host_inputs == ({"factors"} if record.name == "scale_by" else set())
        assert record.has_repeated_input == (record.name == "total")


def test_the_smallest_library_has_one_op() -> None:
    assert set(read_library(find_library("custom_relu")).records) == {"relu", "relu_backward"}


# ---------------------------------------------------------------------------- the parser, on any text

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


def parse(text: str) -> Record | None:
    answer = driver().ask("schema", text)
    return None if answer.startswith("error ") else Record.from_json(json.loads(answer))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schemas())
def test_schemas_parse_as_in_torch(text: str) -> None:
    record = parse(text)
    assert record, driver().ask("schema", text)
    assert_same_schema(record, torch._C.parse_schema(text))
    assert record.schema == text
    values = driver().ask("defaults", text).split("|") if record.attributes else []
    for attribute, value in zip(record.attributes, _joined(values, record), strict=True):
        assert value == _as_cpp(attribute.kind, attribute.default), attribute


def _joined(values: list[str], record: Record) -> list[str]:
    """Undoes a split at "|" inside str defaults."""
    for i, attribute in enumerate(record.attributes):
        extra = str(attribute.default).count("|") if attribute.kind == "str" else 0
        values[i : i + extra + 1] = ["|".join(values[i : i + extra + 1])]
    return values


def _as_cpp(kind: str, default: Any) -> str:
    """A default as the launchers get it: floats narrowed to fp32, bools as ints."""
    if default is None:
        return ""
    if kind == "float":
        (narrow,) = struct.unpack("f", struct.pack("f", default))
        return f"{narrow:.17g}"
    return (
        ",".join(map(str, default)) if kind == "int[]" else str(int(default) if kind == "bool" else default)
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schemas(), st.data())
def test_what_our_parser_takes_torch_reads_the_same(text: str, data: st.DataObject) -> None:
    """Texts with one character lost, doubled or replaced: most are wrong, some another schema."""
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", text[at] * 2, *" ()[],=?x0.\"'-"])) + text[at + 1 :]
    record = parse(text)
    if record is not None:
        try:
            expected = torch._C.parse_schema(text)
        except IndexError:  # torch reads numbers with stod, which refuses subnormal ones
            assume(False)
        assert_same_schema(record, expected)


MALFORMED_SCHEMAS = {
    "": "a name is missing",
    "f": "a token is missing",
    "f() -> Tensor": "at least one Tensor",
    "f(int n) -> Tensor": "at least one Tensor",
    "f(Tenso x) -> Tensor": "not Tensor, Tensor?, Tensor[], int, float, bool, str or int[]",
    "f(Tensor(a!) x) -> Tensor": "a name is missing",
    "f(Tensor x, double n) -> Tensor": "not Tensor, Tensor?",
    "f(Tensor x, int? n=None) -> Tensor": "a name is missing",
    "f(Tensor x, int n, Tensor w) -> Tensor": "its tensors before its attributes",
    "f(Tensor x, int n=1, int m) -> Tensor": "without a default come before",
    "f(Tensor x=None) -> Tensor": "no value of its kind",
    "f(Tensor x, int n=1.5) -> Tensor": "no value of its kind",
    "f(Tensor x, int n=01) -> Tensor": "starts with 0",
    "f(Tensor x, int n=1234567890123456789) -> Tensor": "too long",
    "f(Tensor x, float n=one) -> Tensor": "no value of its kind",
    "f(Tensor x, float n=.) -> Tensor": "no value of its kind",
    "f(Tensor x, bool n=true) -> Tensor": "no value of its kind",
    "f(Tensor x, str n=auto) -> Tensor": "no value of its kind",
    "f(Tensor x, str n=\"a') -> Tensor": "no value of its kind",
    "f(Tensor x, int[] n=[1, 2, 3, 4, 5, 6, 7, 8, 9]) -> Tensor": "no value of its kind",
    "f(Tensor x, int[] n=0) -> Tensor": "a token is missing",
    "f(Tensor x, Tensor x) -> Tensor": "one name twice",
    "f(Tensor y) -> Tensor": "one name twice",
    "f(Tensor 1x) -> Tensor": "starts with a digit",
    f"f(Tensor {'x' * 48}) -> Tensor": "too long",
    f"f({', '.join(f'Tensor x{i}' for i in range(17))}) -> Tensor": "too many arguments",
    "f(Tensor x) -> Tensor junk more": "goes on after its outputs",
    "f(Tensor x) -> int": "returns Tensor",
    "f(Tensor x) -> ()": "a name is missing",
    "f(Tensor x) -> (Tensor, Tensor)": "names them",
    f"f(Tensor x) -> ({', '.join(f'Tensor y{i}' for i in range(9))})": "too many outputs",
    "f(Tensor[] x, Tensor w) -> Tensor": "Tensor[] is its last tensor",
    "f(Tensor[] x=[]) -> Tensor": "no value of its kind",
}
MALFORMED_RECORDS = [
    (("dtypes", "float33"), "a dtype that does not exist"),
    (("dtypes", "float32; "), "a name is missing"),
    (("dtypes", "float16 w=float32"), "name no tensor of its op"),
    (("shapes", "z = x"), "names no argument or output"),
    (("shapes", "y = z"), "names no input or attribute"),
    (("shapes", "y = x[:-1"), "a token is missing"),
    (("shapes", "y = x junk"), "goes on after its end"),
    (("shapes", "y = [f]"), "no int, bool or int[]"),
    (("shapes", "y = x; y = x"), "two entries of one name"),
    (("shapes", "y ="), "is empty"),
    (("scratch", "4 * "), "a name is missing"),
    (("scratch", "4 // 0"), "divides by zero"),
    (("in_place", "y = n"), "in_place names no input"),
    (("choices", "mode = a | b"), "names no argument or output"),
    (("choices", "n = a | b"), "names no argument or output"),  # limits are for numbers
    (("input_shapes", "y = x"), "names no argument or output"),
    (("input_shapes", "x = z[1:]"), "names no input or attribute"),
    (("input_shapes", "x = x[n:"), "a name is missing"),
    (("limits", "eps >= 0"), "limits name no attribute"),
    (("limits", "n of w"), "`a of x` is for an int and an input"),
    (("limits", "f of x"), "`a of x` is for an int and an input"),
    (("limits", "f >= 0.5"), "a token is missing"),
    (("limits", "n of x; n in 0 | 1"), "limits name an attribute twice"),
    (("limits", "f in 0 | 1"), "`in` is for an int"),
    (("limits", "n in 0 | one"), "a number is wanted"),
    (("limits", "n in 0, 1"), "lists ints"),
    (("limits", "n < 3"), "a token is missing"),
    (("rows", "f"), "rows name no int attribute"),
    (("rows", "axis:"), "rows name no int attribute"),
    (("rows", "-1 n"), "rows are"),
    (("elementwise", "", "shapes", "y = x[1:]"), "has the shape of an input, or of all"),
    (("elementwise", "", "shapes", "y = broadcast(x, [3])"), "a name is missing"),
    (("elementwise", "", "rows", "-1"), "an elementwise op has no rows"),
    (("gradient", "y = grad"), "gradient names no input"),
    (("gradient", "x, y = f(grad)"), "gradient names no input"),
    (("gradient", "x, x = f(grad)"), "an input twice"),
    (("gradient", "x, _ = f(grad); x = grad"), "an input twice"),
    (("gradient", "x, = f(grad)"), "a name is missing"),
    (("gradient", "x ="), "gradient is empty"),
    (("autocast", "fp32"), "autocast is keep or widest"),
    (("memory", "w = host"), "names no argument or output"),
    (("memory", "x = device"), "memory is host"),
    (("memory", "x = host"), "first input is in the device's memory"),
]


@pytest.mark.parametrize(("text", "reason"), MALFORMED_SCHEMAS.items())
def test_malformed_schemas_are_refused(text: str, reason: str) -> None:
    answer = driver().ask("schema", text)
    assert answer.startswith("error ") and reason in answer


@pytest.mark.parametrize(("field", "reason"), MALFORMED_RECORDS)
def test_malformed_records_are_refused(field: tuple[str, ...], reason: str) -> None:
    schema = "f(Tensor x, int n=1, float f=1) -> Tensor"
    answer = driver().ask("validate", schema, *field)
    assert answer.startswith("error ") and reason in answer


WELL_FORMED_RECORDS = [
    ("shapes", "y = [n - 8, 8 // n] + x[n:]"),
    ("shapes", "y = w"),  # absent, it is [0]
    ("input_shapes", "w = x[n:]; x = x[:-1] + [x[-1] // 2 * 2]"),
    ("limits", "n of x; f >= 0"),
    ("limits", "n in -1 | 0 | 1 ; f >= -2;"),
    ("rows", "n:"),
    ("rows", "n"),
    ("rows", "-1"),
    ("elementwise", "", "shapes", "y = broadcast(x, w)"),
    ("elementwise", "", "shapes", "y = broadcast(broadcast(w, x), (x))"),
    ("elementwise", "", "shapes", "y = w"),
    ("gradient", "x, w, _ = f(grad, (1, 2), 'a = b; c'); "),
    ("gradient", "x, _, _ = f(grad); w = grad_x"),
    ("gradient", "x = f(grad == 0)"),
]


@pytest.mark.parametrize("field", WELL_FORMED_RECORDS)
def test_well_formed_records(field: tuple[str, ...]) -> None:
    assert (
        driver().ask("validate", "f(Tensor x, Tensor? w=None, int n=1, float f=1) -> Tensor", *field)
        == "valid"
    )


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('Record("g(Tenso x) -> Tensor")', "not Tensor, Tensor?, Tensor[], int, float, bool, str or int[]"),
        ('Record("g(Tensor x, int n=a) -> Tensor")', "a number is wanted"),
        ('Record("g(Tensor x) -> Tensor").shapes("y = x[0")', "a token is missing"),
        ('Record("g(Tensor x) -> Tensor").dtypes("float31")', "a dtype that does not exist"),
        ('Record("g(Tensor x, int n=0) -> Tensor").limits("n of y")', "is for an int and an input"),
        ('Record("g(Tensor x) -> Tensor").gradient("x, y = f(grad)")', "names no input"),
        ('Record("f(Tensor x) -> Tensor")', "static assertion failed"),  # the id is not the schema's name
    ],
)
def test_a_malformed_record_does_not_compile(record: str, reason: str) -> None:
    """The compiler stops at the `throw` whose text says what is wrong."""
    include = '#include "kernels/record/registry.h"\n'
    source = f"{include}namespace twinop {{ TWINOP_OP(g, {record}, nullptr, nullptr) }}\n"
    command = [compiler(), "-std=c++17", f"-I{ROOT}", "-fsyntax-only", "-x", "c++", "-"]
    good = source.replace(record, 'Record("g(Tensor x) -> Tensor")')
    assert subprocess.run(command, input=good, text=True, capture_output=True).returncode == 0
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode != 0 and reason in done.stderr


# ---------------------------------------------------------------------------- the small texts


ENTRIES = {
    "": {},
    "y = x": {"y": "x"},
    " y=x ; s = x[:-1]; ": {"y": "x", "s": "x[:-1]"},
    "a = 1 if n == 2 else 3": {"a": "1 if n == 2 else 3"},
    "a = f(x, 'p;q') ; b = \"c = d; e\"": {"a": "f(x, 'p;q')", "b": '"c = d; e"'},
    "a = [x; y] + (z; w); b = x": {"a": "[x; y] + (z; w)", "b": "x"},
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


def test_combinations() -> None:
    record = parse("f(Tensor x, Tensor? w=None) -> Tensor")
    assert record
    text = "float32; float16 w=float32;bfloat16 w = float32 y=float64"
    wide = Record(**{**vars(record), "dtypes": text})
    assert driver().ask("validate", record.schema, "dtypes", text) == "valid"
    assert wide.combinations == (
        {"x": "float32", "w": "float32", "y": "float32"},
        {"x": "float16", "w": "float32", "y": "float16"},
        {"x": "bfloat16", "w": "float32", "y": "float64"},
    )


def test_gradients_and_limits() -> None:
    record = parse("f(Tensor x, Tensor? w=None, int n=1, float e=1) -> Tensor")
    assert record
    text = "x, w, _ = f(grad, n == 1, 'a; b = c') ; w = grad_x;"
    record = Record(**{**vars(record), "gradient": text, "limits": "n of x; e >= 0 ;"})
    assert [(gradient.names, gradient.text) for gradient in record.gradients] == [
        (("x", "w", "_"), "f(grad, n == 1, 'a; b = c')"),
        (("w",), "grad_x"),
    ]
    assert record.gradients[0].inputs == ("x", "w")
    assert record.attribute_limits == {"n": ("of", "x"), "e": (">=", "0")}


def test_the_schema_hash_follows_the_signature() -> None:
    one, other = parse("f(Tensor x, int n=1) -> Tensor"), parse("f(Tensor x, int n=2) -> Tensor")
    assert one and other and one.schema_hash != other.schema_hash and len(one.schema_hash) == 16


INT_AND_BOOL = """
import torch
from twinop import torch_op
from twinop.library import find_library

probe = torch_op.load(find_library("test_probe")).probe  # not in the other tests' process: it has no body
x = torch.tensor([1.0, float("nan")])
for arguments, expected in (((), [-7, 1]), ((-(2**40), False), [-(2**40), 0]), ((3, True), [3, 1])):
    same, report = probe(x, *arguments)
    assert report[2:].tolist() == expected, (arguments, report)
    assert same.view(torch.int32).equal(x.view(torch.int32))
    assert report[:2].tolist() == [x.data_ptr(), same.data_ptr()] and x.data_ptr() != same.data_ptr()
"""


def test_int_and_bool_attributes_reach_the_launcher() -> None:
    """The kinds of attribute that no other op has; ort_cases.py does the same in ONNX Runtime."""
    done = subprocess.run([sys.executable, "-c", INT_AND_BOOL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
