"""layer_norm where squares overflow or the mean is much larger than the deviations; norms of scalars."""

import pytest
import torch
from same_bits import assert_same_bits
from samples import DEVICES, HALVES, RECORDS, Sample, moved, run_in_torch, torch_dtype

from twinop import torch_op
from twinop.testing.one_node import OrtRunner, poisoned

WIDTHS = (33, 512, 2049, 4095, 4096, 5120, 11008, 20000)  # one width for each way to hold a row
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-4}


def check(x: torch.Tensor, device: str) -> None:
    """Checks layer_norm of x at an aligned address and one element after it."""
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[-1:])
    rounding = ROUNDING[x.dtype]
    for given in (x.to(device), moved(x.to(device))):
        y = torch_op.layer_norm(given, eps=1e-5)
        torch.testing.assert_close(y.double().cpu(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_squares_may_overflow(dtype: torch.dtype, columns: int, device: str) -> None:
    """The squares of the inputs overflow. The squares of the deviations from the mean do not."""
    x = torch.full((3, columns), 1.5 * 2.0**62, dtype=torch.float64)
    x[:, ::2] *= 1 + 2.0**-6
    check(x.to(dtype), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_means_do_not_cancel(dtype: torch.dtype, columns: int, device: str) -> None:
    """Large means do not cause cancellation. From 8 standard deviations on, another algorithm runs."""
    means = torch.tensor([[0.0], [1.0], [7.0], [7.9], [8.1], [9.0], [-20.0], [100.0], [1000.0]])
    noise = torch.randn(len(means), columns, generator=torch.Generator().manual_seed(columns))
    check((means.double() + noise.double()).to(dtype), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_a_scalar_is_a_row_of_one(name: str, device: str) -> None:
    record = RECORDS[name]
    for dtypes in record.combinations[:4]:
        sample = Sample(dict.fromkeys(entry.name for entry in record.inputs))
        sample.inputs["x"] = torch.tensor(2.5, dtype=torch_dtype(dtypes["x"]), device=device)
        (expected,) = run_in_torch(record, sample)
        assert abs(expected.item() - {"softmax": 1, "layer_norm": 0, "rms_norm": 1}[name]) < 1e-6
        actual = poisoned(expected)
        OrtRunner(record, dtypes, device)(sample, (actual,))
        assert_same_bits(actual, expected, name)
