"""relu gives the same bits at every alignment; a scalar is a row; relu is torch's relu."""

import pytest
import torch
from same_bits import assert_same_bits
from samples import DEVICES, RECORDS, Sample, run_in_torch, torch_dtype, values

from twinop.testing.one_node import OrtRunner, poisoned
from twinop.testing.samples import SIZES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_alignment_does_not_change_bits(dtype: str, device: str) -> None:
    """Tensors may start 1 to 7 elements after an aligned address. The op writes only to its output."""
    record = RECORDS["relu"]
    run_ort = OrtRunner(record, next(c for c in record.combinations if c["x"] == dtype), device)
    for size in SIZES:
        aligned = values((size,), torch_dtype(dtype), size).to(device)
        (expected,) = run_in_torch(record, Sample({"x": aligned}))
        for shift in range(1, 8):
            buffer = torch.full((size + 16,), -5.0, dtype=aligned.dtype, device=device)
            x = buffer[shift : shift + size]
            x.copy_(aligned)
            sample = Sample({"x": x})
            (result,) = run_in_torch(record, sample)
            assert_same_bits(result, expected, f"torch {size}+{shift}")
            out = torch.full((size + 16,), 123.0, dtype=aligned.dtype, device=device)
            window = out[8 - shift : 8 - shift + size]
            run_ort(sample, (window,))
            assert_same_bits(window, expected, f"ORT {size}+{shift}")
            assert (out[: 8 - shift] == 123).all() and (out[8 - shift + size :] == 123).all(), (size, shift)


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
