"""Every CUDA kernel at a few small sizes: what compute-sanitizer runs (it is some hundred times slower).

Data comes from the CPU and results go back to it, so that torch's own kernels take no part.
"""

import pytest
import torch
from one_node import assert_same_bits, library_of, make_session, one_node_model, run_bound
from samples import ALL, RECORDS, Sample, make_sample, samples, values
from ulps import as_tuple

from twinop.record import Record

ops = torch.ops.custom_domain
pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

VARIANTS = ("auto", "scalar", "vec4")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def assert_same_values(cuda: torch.Tensor, cpu: torch.Tensor) -> None:
    """A 16-bit NaN has other payload bits on the two devices; all else is equal."""
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_kernels(dtype: torch.dtype) -> None:
    for size, shift in ((1, 0), (33, 1), (1025, 0), (4099, 3)):
        cpu = values((size + shift,), dtype, size)
        x = cpu.cuda()[shift:]
        for variant in VARIANTS:
            assert_same_values(ops.relu(x, variant), ops.relu(cpu[shift:]))
        assert_same_values(ops.relu_backward(x, x), ops.relu_backward(cpu[shift:], cpu[shift:]))


def test_the_kernel_of_middle_sizes() -> None:
    """8 MiB: four vectors a thread, and a tail."""
    cpu = torch.arange(-(1 << 20), (1 << 20) + 3, dtype=torch.float32)
    assert_same_values(ops.relu(cpu.cuda()), ops.relu(cpu))


@pytest.mark.parametrize("record", list(RECORDS.values()), ids=list(RECORDS))
def test_through_ort(record: Record) -> None:
    dtypes = record.combinations[0]
    chosen = list(samples(record, dtypes))[4:6]
    session = None
    for sample in chosen:
        sample = Sample(sample.inputs)  # default attributes: one session serves them all
        if session is None:
            present = [tensor is not None for tensor in sample.inputs.values()]
            session = make_session(one_node_model(record, dtypes, present, {}), library_of(record), "cuda")
        if [tensor is not None for tensor in sample.inputs.values()] != present:
            continue
        device = sample.to("cuda")
        expected = getattr(ops, record.name)(*device.inputs.values())
        expected = expected if isinstance(expected, tuple) else (expected,)
        actual = tuple(torch.zeros(t.shape, dtype=t.dtype).cuda() for t in expected)
        inputs = {name: tensor for name, tensor in device.inputs.items() if tensor is not None}
        run_bound(session, inputs, dict(zip(record.outputs, actual, strict=True)))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a.cpu(), e.cpu(), record.name)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element behind a 16-byte boundary."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("record", ALL.values(), ids=list(ALL))
def test_through_torch(record: Record) -> None:
    """Backward too, aligned and not: a part of a warp, a warp and a block for a row, and a row in pieces."""
    dtypes = next((c for c in record.combinations if "bfloat16" in c.values()), record.combinations[0])
    for shape in ((3, 10), (2, 258), (2, 2050), (2, 16386)) if record.rows else ((3, 10), (2, 1030)):
        aligned = make_sample(record, dtypes, shape, 1, tame=True).to("cuda")
        call = getattr(ops, record.name)
        expected = as_tuple(call(*aligned.inputs.values()))
        actual = as_tuple(call(*aligned.map(misaligned).inputs.values()))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a.cpu(), e.cpu(), f"{record.name} {shape}")
