"""C++ (kernels, ONNX Runtime) and Python (fakes, export) check a call with the same result."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_driver import driver

from twinop.errors import RecordError
from twinop.record.call_checks import check_attributes, check_shapes, describe
from twinop.record.op_schema import infer_outputs
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.record.schema_text import record_of
from twinop.record.shapes import Unknown, output_shapes

SCHEMA = "f(Tensor x, Tensor? w=None, Tensor? b=None, int axis=-1, float eps=1e-5, int offset=0) -> Tensor"


def with_texts(record: dict[str, str]) -> OpSpec:
    texts = {name: text for name, text in record.items() if name != "layout"}
    return replace(record_of(SCHEMA, DOMAIN, **texts), is_elementwise="layout" in record)


NORM = {"input_shapes": "w = x[axis:]; b = w", "limits": "axis of x; eps >= 0; offset in 0 | 1"}
RECORDS = {
    "norm": NORM,
    "last dimension": {"input_shapes": "w = x[-1:]; b = x", "limits": "axis >= -1; eps >= -2"},
    "bounds": {"limits": "axis > -3; axis < 2; eps > -0.5; eps <= 0.1; offset < 2 ; offset >= -1"},
    "packed": {"input_shapes": "x = x[:-1] + [x[-1] // 2 * 2]; w = x[:-1] + [x[-1] // 2]"},
    "matmul": {"input_shapes": "w = w[:-2] + [x[-1], w[-1]]", "shapes": "y = x[:-1] + [w[-1]]"},
    "elementwise": {"layout": "elementwise"},
    "broadcast": {"layout": "elementwise", "shapes": "y = broadcast(broadcast(x, w), b)"},
}


def fields(record: dict[str, str]) -> list[str]:
    pairs = [(key, "") if key == "layout" else (key, value) for key, value in record.items()]
    return [text for key, value in pairs for text in ("elementwise" if key == "layout" else key, value)]


def ask_cpp(record: dict[str, str], shapes: dict[str, Any], attributes: dict[str, Any]) -> str:
    sizes = ["-" if shape is None else ",".join(map(str, shape)) for shape in shapes.values()]
    values = ";".join(str(value) for value in attributes.values())
    return driver().ask("check", SCHEMA, ";".join(sizes), values, *fields(record))


def ask_python(record: dict[str, str], shapes: dict[str, Any], attributes: dict[str, Any]) -> str:
    wanted = with_texts(record)
    try:
        check_attributes(wanted, attributes)
    except RecordError as error:
        return f"{DOMAIN}::f: {error}"
    try:
        check_shapes(wanted, shapes, attributes)
        output_shapes(wanted, shapes, attributes)
    except RecordError as error:
        return f"{describe(wanted, dict.fromkeys(shapes, 'float32'), shapes)}: {error}"
    return "fits"


SHAPE = st.lists(st.sampled_from([2, 3, 1, 4, 0, 5]), max_size=3)
CALLS = st.tuples(
    SHAPE,
    SHAPE | st.none(),
    SHAPE | st.none(),
    st.integers(-4, 3),
    st.sampled_from([1e-5, 0.0, -1.0, 0.1, 0.2, -0.5]),
    st.integers(-1, 2),
)


@pytest.mark.parametrize("name", RECORDS)
def test_cpp_and_python_say_the_same(name: str) -> None:
    outcomes = set()

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(CALLS, st.booleans(), st.booleans())
    def check(call: Any, matching: bool, all_given: bool) -> None:
        shapes = dict(zip("xwb", call[:3], strict=True))
        attributes = dict(zip(("axis", "eps", "offset"), call[3:], strict=True))
        if matching:  # shapes that mostly fit
            shapes |= {key: shapes["x"][attributes["axis"] :] for key in "wb" if shapes[key] is not None}
        if all_given or RECORDS[name].get("layout"):
            shapes |= {key: shapes["x"] for key in "wb" if shapes[key] is None}
        cpp, python = (ask(RECORDS[name], shapes, attributes) for ask in (ask_cpp, ask_python))
        outcomes.add(cpp == "fits")
        if "does not fit" in python:  # the expression has no value; the two messages differ
            assert cpp.startswith(f"{DOMAIN}::f(x: float32")
        else:
            assert cpp == python

    check()
    assert outcomes == {True, False}


MESSAGES = [
    ("norm", {"w": [5]}, {}, "w: float32[5], b: absent): w has shape [5], expected x[axis:] = [8]"),
    ("norm", {"w": [8]}, {"axis": -2}, "w has shape [8], expected x[axis:] = [2, 8]"),
    ("norm", {}, {"axis": 2}, "b: absent): attribute axis is 2, expected a dimension of x: -2 to 1"),
    ("norm", {"x": []}, {"axis": 1}, "attribute axis is 1, expected a dimension of x: -1 to 0"),
    ("norm", {}, {"eps": math.nan}, "f: attribute eps is nan, expected a finite number >= 0"),
    ("norm", {}, {"offset": 2}, "f: attribute offset is 2, expected one of 0 | 1"),
    ("last dimension", {}, {"axis": -2}, "f: attribute axis is -2, expected a number >= -1"),
    ("bounds", {}, {"axis": -3}, "f: attribute axis is -3, expected a number > -3 and < 2"),
    ("bounds", {}, {"eps": -0.5}, "f: attribute eps is -0.5, expected a finite number > -0.5 and <= 0.1"),
    ("bounds", {}, {"eps": -math.inf}, "attribute eps is -inf, expected a finite number > -0.5 and <= 0.1"),
    ("bounds", {}, {"offset": 2}, "f: attribute offset is 2, expected a number >= -1 and < 2"),
    ("packed", {"x": [2, 7]}, {}, "x has shape [2, 7], expected x[:-1] + [x[-1] // 2 * 2] = [2, 6]"),
    ("matmul", {"w": [7, 3]}, {}, "w has shape [7, 3], expected w[:-2] + [x[-1], w[-1]] = [8, 3]"),
    ("matmul", {"w": [8]}, {}, "w has 1 dimension, expected at least 2 (unsqueeze adds one)"),
    ("matmul", {"x": [], "w": [8, 3]}, {}, "x has 0 dimensions, expected at least 1 (unsqueeze adds one)"),
    ("elementwise", {"w": [2, 8], "b": [8]}, {}, "one shape: x has [2, 8], w has [2, 8], b has [8]"),
    (
        "broadcast",
        {"w": [3, 1, 1], "b": [3]},
        {},
        "the inputs' shapes do not broadcast: x has [2, 8], w has [3, 1, 1], b has [3]; from the last "
        "dimension on, sizes must be equal or 1",
    ),
]


@pytest.mark.parametrize(("name", "shapes", "attributes", "message"), MESSAGES)
def test_messages(name: str, shapes: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    all_shapes = {"x": [2, 8], "w": None, "b": None} | shapes
    all_attributes = {"axis": -1, "eps": 1e-5, "offset": 0} | attributes
    cpp = ask_cpp(RECORDS[name], all_shapes, all_attributes)
    assert cpp.startswith(f"{DOMAIN}::f") and cpp.endswith(message), cpp
    assert ask_python(RECORDS[name], all_shapes, all_attributes) == cpp


def test_sizes_that_are_no_numbers_are_left_to_the_kernel() -> None:
    record = with_texts(NORM)
    attributes = {"axis": -1, "eps": 1e-5, "offset": 0}
    check_shapes(record, {"x": [2, Unknown("n")], "w": [5], "b": None}, attributes)
    check_shapes(record, {"w": [5], "b": None}, attributes)  # nothing is known of x
    with pytest.raises(RecordError, match=r"w has shape \[5, 1\], expected x\[axis:\]"):  # the rank is known
        check_shapes(record, {"x": [2, Unknown("n")], "w": [5, 1], "b": None}, attributes)
    elementwise = with_texts({"layout": "elementwise"})
    check_shapes(elementwise, {"x": [2, Unknown()], "w": [2, 3], "b": [2, 3]}, attributes)
    with pytest.raises(RecordError, match=r"one shape: x has \[2, 3\], w has \[3, 3\]"):
        check_shapes(elementwise, {"x": [2, 3], "w": [3, 3], "b": None}, attributes)


def of(*dims: Any) -> tuple[str, Any]:
    return "float32", list(dims)


INFERRED: dict[str, tuple[dict[str, tuple[str, Any]], dict[str, Any], Any]] = {
    # The inferred output or the error message, at export and in onnx's shape inference.
    "weight": ({"x": of(2, 3), "w": of(4)}, {}, r"CustomF: w has shape \[4\], expected x\[axis:\] = \[3\]"),
    "limit": ({"x": of(2, 3)}, {"eps": -1.0}, "CustomF: attribute eps is -1, expected a finite number >= 0"),
    "dimension": ({"x": of(Unknown("n"), 3)}, {"axis": 2}, "axis is 2, expected a dimension of x: -2"),
    "unknown size": ({"x": of(2, Unknown("n")), "w": of(4)}, {}, [2, Unknown("n")]),
    "unknown rank": ({"x": ("float32", None), "w": of(4)}, {"axis": 7}, None),
    "unknown weight": ({"x": of(2, 3), "w": ("float32", None)}, {}, [2, 3]),
    "absent weight": ({"x": of(2, 3), "b": of(3)}, {}, [2, 3]),
}


@pytest.mark.parametrize("name", INFERRED)
def test_inference_of_nodes(name: str) -> None:
    inputs, attributes, expected = INFERRED[name]
    record = with_texts({**NORM, "input_shapes": "w = x[axis:]; b = x[axis:]"})
    given = {"axis": -1, "eps": 1e-5, "offset": 0} | attributes
    if isinstance(expected, str):
        with pytest.raises(RecordError, match=expected):
            infer_outputs(record, inputs, given)
    else:
        dtype, shape = infer_outputs(record, inputs, given)["y"]
        assert dtype == "float32" and (shape if shape is None else list(shape)) == expected


N, M = Unknown("n"), Unknown("m")
BROADCASTS: list[tuple[list[Any], list[Any], list[Any]]] = [
    ([N, 3], [3], [N, 3]),
    ([N, 3], [N, 1], [N, 3]),
    ([N], [M], [Unknown()]),  # either could be the 1
    ([N], [Unknown()], [Unknown()]),
    ([Unknown()], [Unknown()], [Unknown()]),
    ([N], [5], [5]),
    ([N, 1], [M], [N, M]),
]


@pytest.mark.parametrize(("a", "b", "expected"), BROADCASTS)
def test_inference_of_broadcast_operands(a: list[Any], b: list[Any], expected: list[Any]) -> None:
    record = record_of(SCHEMA.replace("Tensor? b=None, ", ""), DOMAIN, shapes="y = broadcast(x, w)")
    record = replace(record, is_elementwise=True)
    attributes = {"axis": -1, "eps": 1e-5, "offset": 0}
    for pair in ((a, b), (b, a)):
        inputs = dict(zip("xw", (of(*dims) for dims in pair), strict=True))
        assert list(infer_outputs(record, inputs, attributes)["y"][1] or ()) == expected
    with pytest.raises(RecordError, match=r"CustomF: .*do not broadcast: x has \[2, 3\], w has \[4\]"):
        infer_outputs(record, {"x": of(2, 3), "w": of(4)}, attributes)
