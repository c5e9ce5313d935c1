"""The functions of math.h that call the C library, and the formulas for numbers of 16 bits on the host.

tests/ops/functions.h has the functions as one op, by their place in this list.
"""

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_driver import ROOT, compiler
from samples import DEVICES, HALVES
from test_math_ulp import FUNCTIONS as FORMULAS
from torch import Tensor
from ulps import errors

from twinop import torch_op
from twinop.libraries.library import find_library

OF_TORCH = "sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc exp2 expm1 log2 log10 log1p"
UNARY: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((name.capitalize(), getattr(torch, name)) for name in OF_TORCH.split()),
    ("Cbrt", lambda x: torch.from_numpy(np.cbrt(x.numpy()))),
]
EXACT: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("Abs", lambda x, _: x.abs()),
    ("Floor", lambda x, _: x.floor()),
    ("Ceil", lambda x, _: x.ceil()),
    ("Trunc", lambda x, _: x.trunc()),
    ("Rint", lambda x, _: x.round()),
    ("Min", torch.minimum),
    ("Max", torch.maximum),
    ("Copysign", torch.copysign),
    ("Fmod", torch.fmod),
]
BINARY = [("Atan2", torch.atan2), ("Hypot", torch.hypot)]
STD = [
    ("std::sin, std::pow", lambda x, y: torch.sin(x) * x**y),
    ("float(x)", lambda x, y: torch.maximum(x, y) + 2 * x.abs()),
]
NAMES = [name for name, *_ in (*UNARY, *EXACT, *BINARY, *STD)]
DTYPES = (*HALVES, torch.float32, torch.float64)
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@cache
def ops() -> Any:
    return torch_op.load(find_library("test_functions"))


def run(name: str, x: Tensor, other: Tensor, device: str) -> Tensor:
    return ops().function(x.to(device), other.to(device), NAMES.index(name)).cpu()


def inputs(dtype: torch.dtype) -> Tensor:
    """All numbers of a 16-bit type; of others all sizes, and intervals in which functions change."""
    if dtype in HALVES:
        return torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
    random = torch.Generator().manual_seed(1)
    uniform = torch.rand(3, 40_000, generator=random, dtype=torch.float64)
    sizes = torch.exp((uniform[0] * 2 - 1) * 80) * torch.where(uniform[1] < 0.5, -1, 1)
    infinity = float("inf")
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, infinity, -infinity, float("nan"), 88.8, 709.9]
    special = torch.tensor(edges, dtype=torch.float64)
    return torch.cat([sizes, 40 * uniform[1] - 20, 2 * uniform[2] - 1, special]).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = inputs(dtype)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    return x, x[order]


@each_dtype
@each_device
@pytest.mark.parametrize(("name", "function"), EXACT)
def test_exact_functions(name: str, function: Callable[..., Tensor], device: str, dtype: torch.dtype) -> None:
    """Min and Max are NaN where one value is, and 0 and -0 count as equal. The sign of a NaN is not kept."""
    x, other = pairs(dtype)
    if name == "Copysign":
        other = torch.where(other.isnan(), torch.ones_like(other), other)
    found, right = run(name, x, other, device).double(), function(x.double(), other.double())
    assert bool(((found == right) | (found.isnan() & right.isnan())).all())
    if name not in ("Min", "Max"):
        nan = right.isnan()
        assert torch.equal(found[~nan].signbit(), right[~nan].signbit())


def bound(device: str, dtype: torch.dtype) -> float:
    """On the CPU one rounding; on CUDA what NVIDIA documents, 5 units at most. In float64 torch errs, too."""
    if dtype in HALVES:
        return 0.51
    return 8 if dtype == torch.float64 else 0.51 if device == "cpu" else 5


@each_dtype
@each_device
@pytest.mark.parametrize(("name", "wide"), UNARY)
def test_functions_of_the_c_library(
    name: str, wide: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
) -> None:
    x = inputs(dtype)
    if dtype == torch.float64:  # near 710 torch's sinh and cosh overflow
        x = x[~((x.abs() - 710).abs() < 1)]
    found = run(name, x, x, device)
    assert float(errors(found, wide(x.double()), dtype).max()) <= bound(device, dtype)


@each_dtype
@each_device
@pytest.mark.parametrize(("name", "function"), [*BINARY, *STD])
def test_functions_of_two_values(
    name: str, function: Callable[[Tensor, Tensor], Tensor], device: str, dtype: torch.dtype
) -> None:
    x, other = pairs(dtype)
    if name == "float(x)" and dtype == torch.float64:
        pytest.skip("float(x) rounds")
    if name in dict(STD):  # results of moderate size, and no subnormal factor
        moderate = (x.abs() > 0.01) & (x.abs() < 30) & (other.abs() > 0.01) & (other.abs() < 3)
        x, other = x[moderate], other[moderate]
    found, right = run(name, x, other, device), function(x.double(), other.double())
    allowed = bound(device, dtype) if name in dict(BINARY) else bound(device, dtype) + 2
    assert float(errors(found, right, dtype).max()) <= allowed


@each_dtype
@each_device
@pytest.mark.parametrize("count", [1, 8, 100])
def test_a_functor_decides_what_a_nan_gives(count: int, device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf, 2, -2], dtype=dtype).repeat(20)[:count]
    right = x.nan_to_num(3, torch.inf, -torch.inf)
    for given in (x, torch.stack([x, x], 1)[:, 0]):
        assert torch.equal(ops().or_three(given.to(device)).cpu(), right)


SOURCE = """
#include "twinop/math/gelu.h"
#define FORMULA(name, expression)                                             \\
  extern "C" void name(const float* values, float* y, long count) {           \\
    for (long i = 0; i < count; ++i) {                                        \\
      const twinop::ApproxFloat x = values[i];                               \\
      y[i] = float(twinop::ApproxFloat(expression));                         \\
    }                                                                         \\
  }
FORMULA(f_exp, twinop::Exp(x))
FORMULA(f_log, twinop::Log(x))
FORMULA(f_sigmoid, twinop::Sigmoid(x))
FORMULA(f_silu, twinop::Sigmoid(x, x))
FORMULA(f_tanh, twinop::Tanh(x))
FORMULA(f_softplus, twinop::Softplus(x))
FORMULA(f_gelu, twinop::Gelu<twinop::ApproxFloat>{}(x))
FORMULA(f_gelu_tanh, twinop::TanhGelu<twinop::ApproxFloat>{}(x))
"""


@cache
def formulas() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="twinop-formulas-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "formulas.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT}/twinop/include"]
    target = folder / "formulas.so"
    subprocess.run([compiler(), *flags, str(folder / "formulas.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def formula(name: str, x: Tensor) -> Tensor:
    """The formula that CUDA computes for results of 16 bits, in fp32, with exact 2^x and 1/x."""
    values, y = x.float().contiguous(), torch.empty(x.shape, dtype=torch.float32)
    function = getattr(formulas(), f"f_{name.replace(' ', '_')}")
    function(*(ctypes.c_void_p(t.data_ptr()) for t in (values, y)), ctypes.c_long(x.numel()))
    return y


REDUCED = [name for name in FORMULAS if name != "square"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_formulas_for_16_bits(name: str, dtype: torch.dtype) -> None:
    """Little more than one rounding, of every number: the hardware's functions add next to nothing."""
    x = inputs(dtype)
    found = formula(name, x).to(dtype)
    assert float(errors(found, FORMULAS[name].wide(x.double()), dtype).max()) <= 0.52


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gelu_of_sums_that_are_not_rounded(dtype: torch.dtype) -> None:
    """`linear` activates sums in fp32; results near 0 and of large negative sums are as exact as others."""
    x = torch.cat([torch.linspace(-14, 14, 200_001), torch.logspace(-40, 38, 40_001), inputs(torch.float32)])
    x = torch.cat([x, -x])
    found = formula("gelu", x).to(dtype)
    assert float(errors(found, FORMULAS["gelu"].wide(x.double()), dtype).max()) <= 0.52


@pytest.mark.parametrize("name", REDUCED)
def test_special_values_of_the_formulas(name: str) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    found, right = formula(name, x), FORMULAS[name].torch(x.double()).float()
    torch.testing.assert_close(found, right, equal_nan=True)
    assert torch.equal(found[:2].signbit(), right[:2].signbit())
