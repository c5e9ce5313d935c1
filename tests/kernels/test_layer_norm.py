"""layer_norm where its sums are difficult: squares that overflow, and means that are most of the values."""

import pytest
import torch
from samples import DEVICES, HALVES

from twinop import torch_op

WIDTHS = (33, 512, 2049, 4095, 4096, 5120, 11008, 20000)  # each way to hold a row
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-4}


def check(x: torch.Tensor, device: str) -> None:
    """Aligned, and one element behind an aligned address."""
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[-1:])
    rounding = ROUNDING[x.dtype]
    for behind in (0, 1):
        given = torch.empty(x.numel() + behind, dtype=x.dtype, device=device)[behind:].view_as(x).copy_(x)
        y = torch_op.layer_norm(given, eps=1e-5)
        torch.testing.assert_close(y.double().cpu(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_squares_may_overflow(dtype: torch.dtype, columns: int, device: str) -> None:
    """Of what is left without the mean they do not."""
    x = torch.full((3, columns), 1.5 * 2.0**62, dtype=torch.float64)
    x[:, ::2] *= 1 + 2.0**-6
    check(x.to(dtype), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_means_do_not_cancel(dtype: torch.dtype, columns: int, device: str) -> None:
    """Of 1 to 1000 standard deviations; from 8 on the kernels take another way."""
    means = torch.tensor([[0.0], [1.0], [7.0], [7.9], [8.1], [9.0], [-20.0], [100.0], [1000.0]])
    noise = torch.randn(len(means), columns, generator=torch.Generator().manual_seed(columns))
    check((means.double() + noise.double()).to(dtype), device)
