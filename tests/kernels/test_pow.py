"""pow follows C's special cases, has a bounded error, and computes each element independently."""

import numpy as np
import pytest
import torch
from samples import DEVICES, HALVES
from torch import Tensor
from ulps import errors

from twinop import torch_op

INFINITY = float("inf")
NUMBERS = [0.0, 1.0, 2.0, 0.5, 3.0, 1.5, 2.5, 127.0, 255.0, 2047.0, 2048.0, 1e-40, 6e-8, 1e30, 3e38, INFINITY]
NUMBERS += [8388609.0, 16777217.0, 1 - 2.0**-24, 1 + 2.0**-23]
NUMBERS += [5e-324, 1e-310, 1.7e308, 2.0**52 + 1, 2.0**53 - 1, 2.0**63, 1 - 2.0**-53, 1 + 2.0**-52]
SPECIAL = [*NUMBERS, *(-number for number in NUMBERS), float("nan")]


def pairs(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Returns all pairs of special numbers."""
    numbers = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    a, b = torch.cartesian_prod(numbers, numbers).T.contiguous()
    return a.to(device), b.to(device)


def samples(dtype: torch.dtype, device: str, count: int = 1 << 20) -> tuple[Tensor, Tensor]:
    """Returns bases of all magnitudes, with exponents that keep the result in range."""
    u, v = torch.rand(2, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    least, most = {torch.float16: (-14, 15), torch.float64: (-1060, 1023)}.get(dtype, (-125, 126))
    a = torch.exp2(least + (most - least) * u).to(dtype)
    a[: count // 2] = torch.exp2(u[: count // 2] - 0.5).to(dtype)  # bases near 1 have large exponents
    a[a == 1] = 1.5
    b = (least + (most - least) * v) / a.double().log2()
    return a.to(device), b.to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=str)
def test_special_cases_are_cs(dtype: torch.dtype, device: str) -> None:
    a, b = pairs(dtype, device)
    found, exact = torch_op.pow(a, b).cpu(), torch.pow(a.cpu().double(), b.cpu().double())
    torch.testing.assert_close(found, exact.to(dtype), equal_nan=True)
    sure = ~exact.isnan()
    assert torch.equal(found.signbit()[sure], exact.signbit()[sure])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_error(dtype: torch.dtype, device: str) -> None:
    """The error is bounded. For the largest exponents, the fp32 bound is that of CUDA's powf."""
    a, b = samples(dtype, device)
    exact = torch.pow(a.cpu().double(), b.cpu().double())
    assert float(errors(torch_op.pow(a, b), exact, dtype).max()) <= (0.51 if dtype in HALVES else 2.2)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="no longer floats than float64 here")
@pytest.mark.parametrize("device", DEVICES)
def test_error_of_float64(device: str) -> None:
    a, b = samples(torch.float64, device)
    exact = np.power(a.cpu().numpy().astype(np.longdouble), b.cpu().numpy())
    distance = np.abs(torch_op.pow(a, b).cpu().numpy() - exact)
    assert float((distance / np.spacing(exact.astype(np.float64))).max()) <= (0.9 if device == "cpu" else 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=str)
def test_neighbours_do_not_matter(dtype: torch.dtype, device: str) -> None:
    """Neighbours do not change a result. On CUDA, vectors of ordinary numbers take a faster path."""
    a, b = samples(dtype, device, 1 << 12)
    alone = torch_op.pow(a, b)
    among = torch.stack([a, -a], 1).flatten(), torch.stack([b, b], 1).flatten()
    assert torch.equal(torch_op.pow(*among)[::2], alone)
    assert torch.equal(torch_op.pow(a[1:], b[1:]), alone[1:])
