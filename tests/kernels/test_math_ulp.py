"""Bounds the largest error of every unary elementwise op and of its derivative, in units in the last place.

float16 and bfloat16 are tested on all 65536 numbers, float32 and float64 on dense samples. The reference of
float64 is mpmath. The reference of all other types is float64.
`python tests/kernels/test_math_ulp.py [cpu|cuda]` prints the table.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from samples import DEVICES, HALVES, RECORDS
from torch import Tensor
from torch.nn import functional as F
from ulps import errors, units

from twinop import torch_op
from twinop.testing.ulps import as_tuple, measure
from twinop.testing.under_test import advice, reference_of

CUBIC, LINEAR = 0.044715, (8 / torch.pi) ** 0.5


@dataclass(frozen=True)
class Function:
    """
    Attributes:
        torch: torch's function of x.
        exact: the function of x in mpmath.
        slope: the factor of grad_y in the backward op's result, in mpmath. Its argument is x or y.
        wide, wide_slope: the same functions in fp64, for the narrower types.
        float32, float64: the error bounds of the op and its backward op.
        zero: where the slope crosses 0. Near it, the unit of the error is the last place of 1/8.
    """

    torch: Callable[[Tensor], Tensor]
    wide: Callable[[Tensor], Tensor]
    wide_slope: Callable[[Tensor], Tensor]
    exact: Callable[[mpmath.mpf], mpmath.mpf]
    slope: Callable[[mpmath.mpf], mpmath.mpf]
    float32: tuple[float, float]
    float64: tuple[float, float]
    zero: float = float("nan")
    attributes: tuple[str, ...] = ()


def wide_sigmoid(x: Tensor) -> Tensor:
    z = torch.exp(-x.abs())
    return torch.where(x < 0, z, 1.0) / (1 + z)


def wide_phi(x: Tensor) -> Tensor:
    return torch.special.erfc(-x * 0.5**0.5) / 2


def wide_tanh_slope(x: Tensor) -> Tensor:
    u = LINEAR * (x + CUBIC * x**3)
    return wide_sigmoid(u) * (1 + x * wide_sigmoid(-u) * LINEAR * (1 + 3 * CUBIC * x * x))


def sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def tanh_argument(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)


def tanh_slope(x: mpmath.mpf) -> mpmath.mpf:
    s = sigmoid(tanh_argument(x))
    step = mpmath.sqrt(8 / mpmath.pi) * (1 + 3 * mpmath.mpf("0.044715") * x**2)
    return s * (1 + x * sigmoid(-tanh_argument(x)) * step)


FUNCTIONS = {
    "exp": Function(torch.exp, torch.exp, lambda y: y, mpmath.exp, lambda y: y, (0.8, 0), (0.9, 0)),
    "log": Function(
        torch.log, torch.log, lambda x: 1 / x, mpmath.log, lambda x: 1 / x, (0.9, 0.51), (1, 0.51)
    ),
    "square": Function(
        torch.square, lambda x: x * x, lambda x: 2 * x, lambda x: x * x, lambda x: 2 * x, (0.51, 0), (0.51, 0)
    ),
    "sigmoid": Function(
        torch.sigmoid,
        wide_sigmoid,
        lambda y: (1 - y) * y,
        sigmoid,
        lambda y: (1 - y) * y,
        (2.8, 1.6),
        (2.8, 1.6),
    ),
    "silu": Function(
        F.silu,
        lambda x: x * wide_sigmoid(x),
        lambda x: wide_sigmoid(x) * (1 + x * wide_sigmoid(-x)),
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) * (1 + x * sigmoid(-x)),
        (3.3, 9.5),
        (3.3, 8),
        zero=-1.2784645,
    ),
    "tanh": Function(
        torch.tanh,
        torch.tanh,
        lambda y: (1 - y) * (1 + y),
        mpmath.tanh,
        lambda y: (1 - y) * (1 + y),
        (2.6, 1.6),
        (2.8, 1.6),
    ),
    "softplus": Function(
        F.softplus,
        lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
        wide_sigmoid,
        lambda x: max(x, mpmath.mpf(0)) + mpmath.log1p(mpmath.exp(-abs(x))),
        sigmoid,
        (2, 2.8),
        (2.2, 2.8),
    ),
    "gelu": Function(
        F.gelu,
        lambda x: x * wide_phi(x),
        lambda x: wide_phi(x) + x * torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5,
        lambda x: x * mpmath.ncdf(x),
        lambda x: mpmath.ncdf(x) + x * mpmath.npdf(x),
        (6.5, 7),
        (6, 7),
        zero=-0.7517916,
    ),
    "gelu tanh": Function(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * wide_sigmoid(LINEAR * (x + CUBIC * x**3)),
        wide_tanh_slope,
        lambda x: x * sigmoid(tanh_argument(x)),
        tanh_slope,
        (3.4, 9),
        (3.5, 8),
        zero=-0.7524614,
        attributes=("tanh",),
    ),
}


def inputs(dtype: torch.dtype, count: int = 1 << 20) -> Tensor:
    """Returns all numbers of a 16-bit type. Other types get all exponents, dense intervals and edge cases."""
    if dtype in HALVES:
        return torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(1)
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    info = torch.iinfo(integer)
    uniform = torch.rand(3, count, generator=generator, dtype=torch.float64)
    edges = [
        0.625,
        1,
        14.2,
        16.27,
        20,
        37.5,
        46.13,
        87.34,
        88.72283,
        88.7229,
        103.97,
        132.4,
        709.8,
        745.2,
        1064,
    ]
    edges += [0.0, float("inf"), torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 4]
    return torch.cat(
        [
            torch.randint(info.min, info.max, (count,), generator=generator, dtype=integer).view(dtype),
            (40 * uniform[0] - 20).to(dtype),
            (2 * uniform[1] - 1).to(dtype),
            (200 * uniform[2] - 110).to(dtype),
            torch.linspace(0.99, 1.01, count // 4, dtype=dtype),
            torch.tensor(edges, dtype=dtype),
            -torch.tensor(edges, dtype=dtype),
            torch.tensor([float("nan")], dtype=dtype),
        ]
    )


def run(name: str, x: Tensor) -> Tensor:
    function = FUNCTIONS[name]
    return getattr(torch_op, name.split()[0])(x, *function.attributes)


def run_backward(name: str, x: Tensor) -> Tensor:
    """Returns the slope, which is the result of the backward op for a gradient of 1."""
    backward = getattr(torch_op, f"{name.split()[0]}_backward")
    return backward(torch.ones_like(x), x, *FUNCTIONS[name].attributes)


def largest_error(name: str, dtype: torch.dtype, device: str) -> float:
    x = inputs(dtype)
    return float(errors(run(name, x.to(device)), FUNCTIONS[name].wide(x.double()), dtype).max())


def largest_slope_error(name: str, dtype: torch.dtype, device: str) -> float:
    function = FUNCTIONS[name]
    x = inputs(dtype)
    # At infinities, one factor of a product may be 0 and the other infinite.
    x = x[x.isfinite() & (x.abs().double() < 1e18)]
    exact = function.wide_slope(x.double())
    unit = units(exact, dtype)
    near = (x.double() - function.zero).abs() < 0.25
    if dtype not in HALVES:
        unit = torch.where(near, unit.clamp(min=torch.finfo(dtype).eps / 8), unit)
    return float(errors(run_backward(name, x.to(device)), exact, dtype, unit).max())


def exactly(function: Callable[[mpmath.mpf], mpmath.mpf], x: Tensor) -> list[mpmath.mpf]:
    with mpmath.workdps(50):
        return [function(mpmath.mpf(value)) for value in x.tolist()]


def error_in_float64(result: Tensor, exact: list[mpmath.mpf], least: list[float]) -> float:
    """Does what `errors` does, with mpmath instead of fp64 as the reference."""
    largest = 0.0
    with mpmath.workdps(50):
        for found, wanted, floor in zip(result.tolist(), exact, least, strict=True):
            unit = mpmath.ldexp(1, max(mpmath.frexp(max(abs(wanted), floor, 1e-320))[1] - 53, -1074))
            largest = max(largest, float(abs(mpmath.mpf(found) - wanted) / unit))
    return largest


def inputs64(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    uniform = torch.rand(3, 1500, generator=generator, dtype=torch.float64)
    x = torch.cat([40 * uniform[0] - 20, 2 * uniform[1] - 1, 1000 * uniform[2] - 700, 1e-5 * uniform[0]])
    return x.abs() + 1e-300 if name == "log" else x


def float64_error(name: str, device: str) -> float:
    x = inputs64(name)
    exact = exactly(FUNCTIONS[name].exact, x)
    return error_in_float64(run(name, x.to(device)).cpu(), exact, [0] * len(exact))


def float64_slope_error(name: str, device: str) -> float:
    function = FUNCTIONS[name]
    x = inputs64(name)
    exact = exactly(function.slope, x)
    least = [1 / 8 if abs(value - function.zero) < 0.25 else 0 for value in x.tolist()]
    return error_in_float64(run_backward(name, x.to(device)).cpu(), exact, least)


each_function = pytest.mark.parametrize("name", FUNCTIONS)


UNARY = [name for name, record in RECORDS.items() if record.is_elementwise and len(record.inputs) == 1]


@pytest.mark.parametrize("name", sorted(set(UNARY) - {name.split()[0] for name in FUNCTIONS}))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=str)
def test_ops_without_an_entry_against_their_references(name: str, dtype: torch.dtype, device: str) -> None:
    """Ops without an entry in FUNCTIONS meet the tolerance of their reference.

    An entry in FUNCTIONS also bounds the derivative, and checks float64 against more digits.
    """
    x = inputs(dtype, 1 << 16)
    results = as_tuple(getattr(torch_op, name)(x.to(device)))
    record = RECORDS[name]
    allowed = reference_of(record).allowed(str(dtype).removeprefix("torch."))
    for each in measure(record, {record.inputs[0].name: x}, {}, results):
        assert each.worst <= allowed, (
            f"{name}: {each.worst:.2f} ulp, allowed {allowed}. {advice(record, 'ulps')}"
        )


@each_function
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bits(name: str, dtype: torch.dtype, device: str) -> None:
    """The error is about one rounding on the CPU, and at most one unit on CUDA."""
    assert largest_error(name, dtype, device) <= (0.51 if device == "cpu" else 1)
    assert largest_slope_error(name, dtype, device) <= (0.6 if device == "cpu" else 1)


@each_function
@pytest.mark.parametrize("device", DEVICES)
def test_float32(name: str, device: str) -> None:
    value, slope = FUNCTIONS[name].float32
    assert largest_error(name, torch.float32, device) <= value
    assert largest_slope_error(name, torch.float32, device) <= slope


@each_function
@pytest.mark.parametrize("device", DEVICES)
def test_float64(name: str, device: str) -> None:
    value, slope = FUNCTIONS[name].float64
    assert float64_error(name, device) <= value
    assert float64_slope_error(name, device) <= slope


@each_function
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=str)
def test_special_values_are_torchs(name: str, dtype: torch.dtype, device: str) -> None:
    infinity = float("inf")
    x = torch.tensor([infinity, -infinity, float("nan"), 0.0, -0.0], dtype=dtype, device=device)
    found = run(name, x)
    expected = FUNCTIONS[name].torch(x.double()).to(dtype)  # torch's fp32 gelu(inf) is NaN on some CPUs
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.equal(found.signbit()[3:], expected.signbit()[3:])


def print_table(device: str) -> None:
    print(f"largest error in units of the last place, {device}: op | backward op | torch's op")
    for name, function in FUNCTIONS.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = inputs(dtype)
            theirs = float(errors(function.torch(x.to(device)), function.wide(x.double()), dtype).max())
            ours = largest_error(name, dtype, device), largest_slope_error(name, dtype, device)
            print(f"{name:10} {str(dtype)[6:]:9} {ours[0]:9.3f} {ours[1]:9.3f} {theirs:12.5g}")
        x = inputs64(name)
        exact = exactly(function.exact, x)
        theirs = error_in_float64(function.torch(x.to(device)).cpu(), exact, [0] * len(exact))
        ours = float64_error(name, device), float64_slope_error(name, device)
        print(f"{name:10} {'float64':9} {ours[0]:9.3f} {ours[1]:9.3f} {theirs:12.5g}", flush=True)


if __name__ == "__main__":
    print_table(sys.argv[1] if len(sys.argv) > 1 else "cpu")
