"""The parser refuses malformed records with a reason. That they do not compile: test_build_errors.py."""

import pytest
from record_driver import driver

MALFORMED_SCHEMAS = {
    "": "a name is missing",
    "f": "a token is missing",
    "f() -> Tensor": "at least one Tensor",
    "f(Tenso x) -> Tensor": "not Tensor, Tensor?, int, float, bool, str or int[]",
    "f(Tensor(a) x) -> Tensor": "an alias in a schema is Tensor(a!)",
    "f(Tensor(a!)? x) -> Tensor": "neither optional nor a list",
    "f(Tensor(a!) x, Tensor(a!) w) -> Tensor": "a letter of its own",
    "f(Tensor(a!) x) -> Tensor(a!)": "does not return its Tensor(a!), which is the output <input>_out",
    "f(Tensor(a!) x, Tensor x_out) -> Tensor": "one name twice",
    f"f(Tensor(a!) {'x' * 44}) -> Tensor": "too long",
    "f(Tensor x, int? n=None) -> Tensor": "a name is missing",
    "f(Tensor x, int n, Tensor w) -> Tensor": "its tensors before its attributes",
    "f(Tensor x, int n=1, int m) -> Tensor": "without a default come before",
    "f(Tensor x=None) -> Tensor": "no value of its kind",
    "f(Tensor x, int n=01) -> Tensor": "starts with 0",
    "f(Tensor x, int n=1234567890123456789) -> Tensor": "too long",
    "f(Tensor x, float e=1.5 e+16) -> Tensor": "no value of its kind",
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
    "f(Tensor x) -> ()": "returns nothing writes an input, Tensor(a!)",
    "f(Tensor x) -> (Tensor, Tensor)": "names them",
    f"f(Tensor x) -> ({', '.join(f'Tensor y{i}' for i in range(9))})": "too many outputs",
    "f(Tensor[] x) -> Tensor": "not Tensor, Tensor?, int",
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
    (("shapes", "y = [4 * ]"), "a name is missing"),
    (("shapes", "y = [4 // 0]"), "divides by zero"),
    (("in_place", "y = n"), "in_place names no input"),
    (("choices", "mode = a | b"), "names no argument or output"),
    (("input_shapes", "y = x"), "names no argument or output"),
    (("input_shapes", "x = z[1:]"), "names no input or attribute"),
    (("input_shapes", "x = x[n:"), "a name is missing"),
    (("limits", "eps >= 0"), "limits name no attribute"),
    (("limits", "n of w"), "`a of x` is for an int and an input"),
    (("limits", "n >= 0.5"), "a limit's number is no value of its attribute's kind"),
    (("limits", "f > 0 1"), "a limit's number is no value of its attribute's kind"),
    (("limits", "f > 0; f >= 1"), "limits name an attribute twice"),
    (("limits", "n of x; n in 0 | 1"), "limits name an attribute twice"),
    (("limits", "f in 0 | 1"), "`in` is for an int"),
    (("limits", "n in 0 | one"), "a number is wanted"),
    (("limits", "n in 0, 1"), "lists ints"),
    (("limits", "n = 3"), "a token is missing"),
    (("rows", "f"), "rows name no int attribute"),
    (("rows", "axis:"), "rows name no int attribute"),
    (("rows", "-1 n"), "rows are"),
    (("elementwise", "", "shapes", "y = x[1:]"), "has the shape of an input, or of all"),
    (("elementwise", "", "shapes", "y = broadcast(x, [3])"), "lists its inputs"),
    (("elementwise", "", "rows", "-1"), "an elementwise op has no rows"),
    (("gradient", "y = grad"), "gradient names no input"),
    (("gradient", "x, y = f(grad)"), "gradient names no input"),
    (("gradient", "x, x = f(grad)"), "an input twice"),
    (("gradient", "x, = f(grad)"), "a name is missing"),
    (("gradient", "x ="), "gradient is empty"),
    (("autocast", "fp32"), "autocast is keep, widest or lower"),
    (("memory", "w = host"), "names no argument or output"),
    (("memory", "x = device"), "memory is host"),
    (("memory", "y = host"), "memory is optional for outputs"),
    (("memory", "y = optional"), "first output is not optional"),
    (("memory", "x = host"), "first input is in the device's memory"),
    (("sizes", "m <= x[0]"), "sizes are those of its outputs"),
    (("sizes", "m", "shapes", "y = [m]"), "a size has a bound"),
    (("sizes", "m <=", "shapes", "y = [m]"), "a name is missing"),
    (("sizes", "m <= x[0] 1", "shapes", "y = [m]"), "goes on after its end"),
    (("sizes", "m <= k", "shapes", "y = [m]"), "names no input or attribute"),
    (("sizes", "n <= x[0]", "shapes", "y = [n]"), "the name of an argument"),
    (("sizes", "m <= 1; m <= 2", "shapes", "y = [m]"), "another size"),
    (("sizes", "a; b; c; d; e"), "too many sizes"),
    (("sizes", "m <= x[0]", "shapes", "y = [3, m]"), "an output's first dimension"),
    (("sizes", "m <= x[0]", "shapes", "y = [m]", "input_shapes", "x = [m]"), "names no input or attribute"),
    (("sizes", "m <= x[0]", "shapes", "y = [m]", "rows", "-1"), "not elementwise, row-wise or in pieces"),
    (("sizes", "m <= x[0]", "shapes", "y = [m]", "in_place", "y = x"), "and writes no input"),
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
    ("limits", "n<3;f > -1.5e-3"),
    ("limits", "f >= 0.5; f < 1."),
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
    ("sizes", "m <= x[-1] * n;k<=len(x)", "shapes", "y = ([m] + x[1:]) + [n]"),
]


@pytest.mark.parametrize("field", WELL_FORMED_RECORDS)
def test_well_formed_records(field: tuple[str, ...]) -> None:
    schema = "f(Tensor x, Tensor? w=None, int n=1, float f=1) -> Tensor"
    assert driver().ask("validate", schema, *field) == "valid"
