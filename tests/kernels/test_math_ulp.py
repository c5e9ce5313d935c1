"""Bounds the largest error of every unary elementwise op and of its derivative, in units in the last place.

float16 and bfloat16 are tested on all 65536 numbers, float32 and float64 on dense samples. The reference of
float64 is mpmath. The reference of all other types is float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from samples import DEVICES, HALVES
from torch import Tensor
from torch.nn import functional as F
from ulps import errors, units

from twinop import torch_op

Maths = Any  # torch, for tensors in fp64, or mpmath


@dataclass(frozen=True)
class Function:
    """
    Attributes:
        torch: torch's function of x.
        exact: the function of x.
        slope: the factor of grad_y in the backward op's result. Its argument is x or y.
        float32, float64: the error bounds of the op and its backward op.
        zero: where the slope crosses 0. Near it, the unit of the error is the last place of 1/8.
    """

    torch: Callable[[Tensor], Tensor]
    exact: Callable[[Maths, Any], Any]
    slope: Callable[[Maths, Any], Any]
    float32: tuple[float, float]
    float64: tuple[float, float]
    zero: float = float("nan")
    attributes: tuple[str, ...] = ()

    def wide(self, x: Tensor) -> Tensor:
        """The function in fp64, for the narrower types."""
        return self.exact(torch, x)


def number(m: Maths, text: str) -> Any:
    return mpmath.mpf(text) if m is mpmath else float(text)


def sigmoid(m: Maths, x: Any) -> Any:
    return 1 / (1 + m.exp(-x))


def softplus(m: Maths, x: Any) -> Any:
    positive = x.clamp(min=0) if m is torch else max(x, mpmath.mpf(0))
    return positive + m.log1p(m.exp(-abs(x)))


def normal(m: Maths, x: Any) -> Any:
    return m.erfc(-x / number(m, "2") ** 0.5) / 2


def density(m: Maths, x: Any) -> Any:
    return m.exp(-x * x / 2) / (2 * m.pi) ** 0.5


def tanh_argument(m: Maths, x: Any) -> Any:
    return (8 / m.pi) ** 0.5 * (x + number(m, "0.044715") * x**3)


def tanh_slope(m: Maths, x: Any) -> Any:
    u, step = tanh_argument(m, x), (8 / m.pi) ** 0.5 * (1 + 3 * number(m, "0.044715") * x * x)
    return sigmoid(m, u) * (1 + x * sigmoid(m, -u) * step)


FUNCTIONS = {
    "exp": Function(torch.exp, lambda m, x: m.exp(x), lambda m, y: y, (0.8, 0), (0.9, 0)),
    "log": Function(torch.log, lambda m, x: m.log(x), lambda m, x: 1 / x, (0.9, 0.51), (1, 0.51)),
    "square": Function(torch.square, lambda m, x: x * x, lambda m, x: 2 * x, (0.51, 0), (0.51, 0)),
    "sigmoid": Function(torch.sigmoid, sigmoid, lambda m, y: (1 - y) * y, (2.8, 1.6), (2.8, 1.6)),
    "silu": Function(
        F.silu,
        lambda m, x: x * sigmoid(m, x),
        lambda m, x: sigmoid(m, x) * (1 + x * sigmoid(m, -x)),
        (3.3, 9.5),
        (3.3, 8),
        zero=-1.2784645,
    ),
    "tanh": Function(
        torch.tanh, lambda m, x: m.tanh(x), lambda m, y: (1 - y) * (1 + y), (2.6, 1.6), (2.8, 1.6)
    ),
    "softplus": Function(F.softplus, softplus, sigmoid, (2, 2.8), (2.2, 2.8)),
    "gelu": Function(
        F.gelu,
        lambda m, x: x * normal(m, x),
        lambda m, x: normal(m, x) + x * density(m, x),
        (6.5, 7),
        (6, 7),
        zero=-0.7517916,
    ),
    "gelu tanh": Function(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda m, x: x * sigmoid(m, tanh_argument(m, x)),
        tanh_slope,
        (3.4, 9),
        (3.5, 8),
        zero=-0.7524614,
        attributes=("tanh",),
    ),
}


def inputs(dtype: torch.dtype) -> Tensor:
    """Returns all numbers of a 16-bit type. Other types get all exponents, dense intervals and edge cases."""
    if dtype in HALVES:
        return torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
    generator, count = torch.Generator().manual_seed(1), 1 << 18
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    info = torch.iinfo(integer)
    uniform = torch.rand(3, count, generator=generator, dtype=torch.float64)
    edges = [0.625, 1, 14.2, 16.27, 20, 37.5, 46.13, 87.34, 88.72283, 88.7229, 103.97, 132.4, 709.8, 745.2]
    edges += [1064, 0.0, float("inf"), torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 4]
    exponents = torch.randint(info.min, info.max, (count,), generator=generator, dtype=integer).view(dtype)
    intervals = torch.cat([40 * uniform[0] - 20, 2 * uniform[1] - 1, 200 * uniform[2] - 110]).to(dtype)
    near_1 = torch.linspace(0.99, 1.01, count // 4, dtype=dtype)
    special = torch.tensor([*edges, *(-each for each in edges), float("nan")], dtype=dtype)
    return torch.cat([exponents, intervals, near_1, special])


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
    exact = function.slope(torch, x.double())
    unit = units(exact, dtype)
    near = (x.double() - function.zero).abs() < 0.25
    if dtype not in HALVES:
        unit = torch.where(near, unit.clamp(min=torch.finfo(dtype).eps / 8), unit)
    return float(errors(run_backward(name, x.to(device)), exact, dtype, unit).max())


def exactly(function: Callable[[Maths, Any], Any], x: Tensor) -> list[mpmath.mpf]:
    with mpmath.workdps(50):
        return [function(mpmath, mpmath.mpf(value)) for value in x.tolist()]


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
    uniform = torch.rand(3, 400, generator=generator, dtype=torch.float64)
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
