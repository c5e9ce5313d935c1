"""C++ and Python evaluate shape expressions alike. The outputs of ops have the resulting shapes."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_driver import driver
from samples import RECORDS, samples

from twinop import torch_op
from twinop.errors import RecordError
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.record.schema_text import parse_shape, record_of
from twinop.record.shapes import evaluate, output_shapes

TENSORS = "Tensor a, Tensor b, Tensor? c=None"
SCHEMA = f'f({TENSORS}, int n=1, bool t=True, int[] p=[1, 2], float e=1, str s="x") -> Tensor'
UNKNOWN = "?"


@cache
def base() -> OpSpec:
    return record_of(SCHEMA, DOMAIN)


def ask_cpp(text: str, shapes: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, ...] | str:
    """Returns the shape with UNKNOWN for unknown sizes, "*" for an unknown rank, or "error ..."."""
    fields = ["-" if s is None else s if s == "*" else ",".join(map(str, s)) for s in shapes.values()]
    values = [",".join(map(str, v)) if isinstance(v, list) else str(int(v)) for v in attributes.values()]
    answer = driver().ask("shape", SCHEMA, text, ";".join(fields), ";".join([*values, "", ""]))
    if answer.startswith("error") or answer == "*":
        return answer
    return tuple(size if size == UNKNOWN else int(size) for size in answer.split(",") if size)


def ask_python(text: str, shapes: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the shape, or None if it is refused. Exceptions other than RecordError fail the test."""
    try:
        return evaluate(
            base(), parse_shape(text, base().parameters), shapes, attributes | {"e": 1.0, "s": "x"}
        )
    except RecordError:
        return None


SHAPES: st.SearchStrategy[list[int]] = st.lists(
    st.sampled_from([2, 3, 1, 4, 0, 5]), min_size=1, max_size=3
) | st.just([])
VALUES = st.tuples(st.integers(-3, 3), st.booleans(), st.lists(st.integers(-2, 4), max_size=3))
SCOPES = st.tuples(SHAPES, SHAPES, SHAPES | st.none(), VALUES).map(
    lambda t: (dict(zip("abc", t[:3], strict=True)), dict(zip("ntp", t[3], strict=True)))
)


def expressions() -> st.SearchStrategy[str]:
    sizes, shapes = st.deferred(lambda: size), st.deferred(lambda: shape)
    inputs = st.sampled_from("aabbc")
    size = st.one_of(
        st.integers(0, 4).map(str),
        st.sampled_from("nt"),
        st.tuples(st.sampled_from("abp"), st.integers(-2, 1)).map("{0[0]}[{0[1]}]".format),
        st.tuples(st.sampled_from("abcp"), sizes).map("{0[0]}[{0[1]}]".format),
        st.tuples(sizes, st.sampled_from(["+", " - ", "*", " // ", "//"]), sizes).map("".join),
        sizes.map("({})".format),
        sizes.map("-{}".format),
        st.tuples(st.sampled_from(["len", "numel"]), shapes).map("{0[0]}({0[1]})".format),
    )
    shape = st.one_of(
        inputs,
        st.tuples(inputs, st.just("") | sizes, st.just("") | sizes).map("{0[0]}[{0[1]}:{0[2]}]".format),
        (st.lists(sizes, min_size=1, max_size=3) | st.just([])).map(", ".join).map("[{}]".format),
        st.tuples(shapes, shapes).map(" + ".join),
        st.tuples(shapes, shapes).map(", ".join).map("broadcast({})".format),
        shapes.map("({})".format),
    )
    return shape.filter(lambda text: len(text) < 80)


VALUED = {  # a = (2, 3, 4), b = (3, 1), c absent, n = -7, t = True, p = [5, 6]
    "a": (2, 3, 4),
    "a[:-1] + [a[-1] * 2]": (2, 3, 8),
    "a[1:] + a[:1]": (3, 4, 2),
    "a[2:1] + a[-9:1] + a[:9]": (2, 2, 3, 4),
    "a[:len(b)]": (2, 3),
    "a[-n // 4:]": (3, 4),
    "[]": (),
    "[p[0], p[-1], p[t],]": (5, 6, 6),
    "[-n // 2, -(n // 2), 0 - n // -2 + 9]": (3, 4, 6),
    "[2 + 3 * 4 - 5, (2 + 3) * 4, 20 // 3 * 3, -n - 1 - 1]": (9, 20, 18, 5),
    "[len(a + b), numel(a), numel([]), numel(b + [0])]": (5, 24, 1, 0),
    "broadcast(a, b + [4])": None,
    "broadcast(a, [3, 1])": (2, 3, 4),
    "broadcast([1, 4], (b))": (3, 4),
    "broadcast(b, [])": (3, 1),
    "c": (0,),  # absent
    "a[3:] + [a[3]]": None,
    "[p[2]]": None,
    "[n // (n + 7)]": None,
    "[n]": None,
}


@pytest.mark.parametrize(("text", "expected"), VALUED.items())
def test_values(text: str, expected: tuple[int, ...] | None) -> None:
    scope = ({"a": [2, 3, 4], "b": [3, 1], "c": None}, {"n": -7, "t": True, "p": [5, 6]})
    assert ask_python(text, *scope) == expected
    cpp = ask_cpp(text, *scope)
    assert (None if isinstance(cpp, str) else cpp) == expected, cpp


# Values that a file may hold. INT64_MIN stands for "not known" in C++.
HUGE = [-(2**63), -(2**63) + 1, 2**63 - 1, 2**62, 2**32, -(2**32), -1, 0, 1, 3]
OVERFLOWS = {
    "[n * n]": ({2**62, 2**32}, {2**63 - 1}),
    "[n + n]": ({2**62}, {2**63 - 1}),
    "[2 - n]": ({-(2**63) + 1}, {2**63 - 1}),
    "[-n]": ({-(2**63)}, {-(2**63) + 1}),
    "[n, n]": ({2**62}, {2**32}),
    "[p[0]]": ({-(2**63)}, set()),
    "a[n:]": ({-(2**63)}, set()),
    "[numel(a + [n, n])]": ({2**62, 2**32}, set()),
    "[n - n]": ({-(2**63)}, set()),
    "[n // -1 + 1]": ({-(2**63)}, set()),
    "broadcast([n, 1], [n])": ({2**62, 2**63 - 1}, set()),
}


@pytest.mark.parametrize("text", OVERFLOWS)
def test_sizes_that_do_not_fit_in_64_bits_are_refused(text: str) -> None:
    refused = set()
    for n in HUGE:
        scope = ({"a": [2, 3, 4], "b": [3, 1], "c": None}, {"n": n, "t": True, "p": [n, 6]})
        cpp = ask_cpp(text, *scope)
        assert isinstance(cpp, str) or cpp == ask_python(text, *scope), n
        assert not isinstance(cpp, str) or ("error" in cpp and cpp != "*")
        if isinstance(cpp, str) and ("64 bits" in cpp or "too many elements" in cpp):
            refused.add(n)
    assert refused >= OVERFLOWS[text][0] and not refused & {-1, 0, 1, 3}


INFERRED = {  # a = (?, 3, 4), b of unknown rank
    "a": (UNKNOWN, 3, 4),
    "a[1:] + [a[0] * 0]": (3, 4, UNKNOWN),
    "b": "*",
    "a + b": "*",
    "b[:1]": "*",
    "a[:b[0]]": "*",  # not an empty shape
    "a[a[0]:]": "*",
    "a[:len(b)]": "*",
    "[len(b), numel(b), numel(a)]": (UNKNOWN, UNKNOWN, UNKNOWN),
    "[len(a), p[a[0]], a[a[0]]]": (3, UNKNOWN, UNKNOWN),
    "[8 // a[0], a[0] - a[0]]": (UNKNOWN, UNKNOWN),
    "broadcast(a, [1, 1])": (UNKNOWN, 3, 4),
    "broadcast(a[:1], [5])": (5,),
    "broadcast(a[:1], [1])": (UNKNOWN,),
}


@pytest.mark.parametrize(("text", "expected"), INFERRED.items())
def test_inferred_values(text: str, expected: tuple[int | str, ...] | str) -> None:
    shapes = {"a": (UNKNOWN, 3, 4), "b": "*", "c": None}
    assert ask_cpp(text, shapes, {"n": -7, "t": True, "p": [5, 6]}) == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions(), SCOPES)
def test_cpp_and_python_agree(text: str, scope: Any) -> None:
    cpp = ask_cpp(text, *scope)
    assert isinstance(cpp, str) or ask_python(text, *scope) == cpp


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions(), SCOPES, st.data())
def test_unknown_sizes_never_become_wrong_ones(text: str, scope: Any, data: st.DataObject) -> None:
    """Unknown input sizes may make output sizes unknown. They do not change known output sizes."""
    shapes, attributes = scope
    exact = ask_cpp(text, shapes, attributes)
    hidden = {
        name: shape
        if shape is None
        else data.draw(st.just("*") | st.tuples(*(st.sampled_from([size, UNKNOWN]) for size in shape)))
        for name, shape in shapes.items()
    }
    inferred = ask_cpp(text, hidden, attributes)
    if isinstance(exact, str):
        return
    assert inferred == "*" or not isinstance(inferred, str), inferred
    if inferred != "*":
        assert len(inferred) == len(exact)
        assert all(size in (UNKNOWN, truth) for size, truth in zip(inferred, exact, strict=True))


REFUSED = ["1", "n", "[a]", "a[0]", "a - b", "[s]", "[1.5]", "[n ** 2]", "a.shape", "__import__('os')"]
REFUSED_BY_CPP = ["p", "a[::2]", "[True]", "[01]", "[n if t else 1]", "(a, b)", "[len(n)]", "lambda: a"]


@pytest.mark.parametrize("text", REFUSED + REFUSED_BY_CPP)
def test_nothing_else_of_python(text: str) -> None:
    """C++ checks a record when it compiles it. Python refuses what is not in the language, or not a shape."""
    scope = ({"a": [2], "b": [2], "c": [2]}, {"n": 1, "t": True, "p": [1, 2]})
    assert text in REFUSED_BY_CPP or ask_python(text, *scope) is None
    assert str(ask_cpp(text, *scope)).startswith("error ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a[3:] + [a[3]]", "index out of range"),
        ("[p[2]]", "index out of range"),
        ("[n // (n - 1)]", "zero"),
        ("[n - 2]", "a size would be negative"),
        ("broadcast(a, b)", r"\(2,\) and \(3,\) do not broadcast"),
    ],
)
def test_errors_say_what_does_not_fit(text: str, reason: str) -> None:
    shapes = {"a": [2], "b": [3], "c": None}
    with pytest.raises(RecordError, match=reason) as error:
        evaluate(base(), parse_shape(text, base().parameters), shapes, {"n": 1, "t": True, "p": [1, 2]})
    assert text in str(error.value) and "a=(2,), b=(3,), c=None, n=1" in str(error.value)


CELLS = [
    pytest.param(record, dtypes, id=f"{record.name}-{'-'.join(dict.fromkeys(dtypes.values()))}")
    for record in RECORDS.values()
    for dtypes in (record.combinations[0], record.combinations[-1])
]


@pytest.mark.parametrize(("record", "dtypes"), CELLS)
def test_outputs_have_the_inferred_shapes(record: OpSpec, dtypes: dict[str, str]) -> None:
    """Kernels and fakes return the inferred shapes. The matrix covers ONNX Runtime."""
    assert torch_op.records()[record.name] == record
    op = getattr(getattr(torch.ops, DOMAIN), record.functional_name)
    defaults = {entry.name: entry.default for entry in record.attributes}
    for sample in list(samples(record, dtypes))[::3]:
        shapes = {name: None if tensor is None else tensor.shape for name, tensor in sample.inputs.items()}
        expected = output_shapes(record, shapes, defaults | sample.attributes)
        meta = {name: None if tensor is None else tensor.to("meta") for name, tensor in sample.inputs.items()}
        for inputs in (sample.inputs, meta):
            results = op(*inputs.values(), **sample.attributes)
            results = results if isinstance(results, tuple) else (results,)
            assert [tuple(result.shape) for result in results] == [expected[name] for name in record.outputs]
