"""Every CUDA kernel runs at a few small sizes, because compute-sanitizer is slow.

Inputs are made and results are compared on the CPU, so that few of torch's kernels run.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from same_bits import assert_same_bits
from samples import ALL, RECORDS, library_of, make_sample, moved, run_in_torch, samples, values

from twinop import torch_op
from twinop.record.op_spec import OpSpec
from twinop.testing.one_node import make_session, one_node_model, run_bound
from twinop.torch_op.rules import as_tuple

ops = torch.ops.custom_domain
pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def watched(records: Mapping[str, OpSpec]) -> list[Any]:
    """The ops; initcheck watches twinop's kernels only, and cuBLASLt writes what those of `linear` read."""
    unwatched = [pytest.mark.torch_writes]
    return [
        pytest.param(each, marks=unwatched if name.startswith("linear") else [])
        for name, each in records.items()
    ]


def assert_same_values(cuda: torch.Tensor, cpu: torch.Tensor) -> None:
    """Checks that the values are equal. The payload bits of a 16-bit NaN may differ between the devices."""
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_kernels(dtype: torch.dtype) -> None:
    for size, shift in ((1, 0), (33, 1), (1025, 0), (4099, 3)):
        cpu = values((size + shift,), dtype, size)
        x = cpu.cuda()[shift:]
        assert_same_values(ops.relu(x), ops.relu(cpu[shift:]))
        assert_same_values(ops.relu_backward(x, x), ops.relu_backward(cpu[shift:], cpu[shift:]))


def test_the_kernel_of_middle_sizes() -> None:
    """A tensor of 8 MiB gives each thread four vectors and leaves a tail."""
    cpu = torch.arange(-(1 << 20), (1 << 20) + 3, dtype=torch.float32)
    assert_same_values(ops.relu(cpu.cuda()), ops.relu(cpu))


@pytest.mark.parametrize("n", [2064, 16400])
def test_invariant_products_of_many_rows(n: int) -> None:
    """With and without clusters; no block is full at the edges."""
    x, weight = (torch.randn(rows, 128).half().cuda() for rows in (200, n))
    residual = torch.randn(200, n).half().cuda()
    y = torch_op.linear(x, weight, None, residual, rms_eps=1e-3, invariant=True).cpu()
    few = torch_op.linear(x[:3], weight, None, residual[:3], rms_eps=1e-3).cpu()
    assert_same_bits(y[:3], few, f"{n} columns")
    y = torch_op.linear_swiglu(x, weight, invariant=True).cpu()
    assert_same_bits(y[:3], torch_op.linear_swiglu(x[:3], weight).cpu(), f"{n} columns with a gate")


@pytest.mark.parametrize("record", watched(RECORDS), ids=list(RECORDS))
def test_through_ort(record: OpSpec) -> None:
    dtypes = record.combinations[0]
    session, served = None, None
    for sample in list(samples(record, dtypes))[4:6]:
        present = [tensor is not None for tensor in sample.inputs.values()]
        if served != (present, sample.attributes):  # sessions take long to make
            served = present, sample.attributes
            model = one_node_model(record, dtypes, present, sample.attributes)
            session = make_session(model, library_of(record), "cuda")
        device = sample.to("cuda")
        expected = run_in_torch(record, device)
        actual = tuple(torch.zeros(t.shape, dtype=t.dtype).cuda() for t in expected)
        inputs = {name: tensor for name, tensor in device.inputs.items() if tensor is not None}
        run_bound(session, inputs, dict(zip(record.outputs, actual, strict=True)))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a.cpu(), e.cpu(), record.name)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_attention_over_a_cache(size: int) -> None:
    """Steps and prompts, of sequences with fewer and more keys than a block takes at a time.

    The blocks of a step are a cluster, or have two teams of warps, or are alone.
    """
    for batch, tokens in ((2, 1), (64, 1), (300, 1), (2, 18)):
        qkv, cache = torch.randn(batch, tokens, 4 * size).half(), torch.randn(batch, 1, 300, size).half()
        position = torch.tensor([20, 290], dtype=torch.int32).repeat(batch // 2)
        given = [qkv, cache, cache.flip(2), position, None, torch.randn(300, size).half()]
        expected = ops.attention_cached_functional(*given)
        actual = ops.attention_cached_functional(*(each if each is None else each.cuda() for each in given))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("record", watched(ALL), ids=list(ALL))
def test_through_torch(record: OpSpec) -> None:
    """Alignment does not change the bits of forward and backward ops.

    A row takes a part of a warp, a warp, a block, or several pieces.
    """
    dtypes = next((c for c in record.combinations if "bfloat16" in c.values()), record.combinations[0])
    for shape in ((3, 10), (2, 258), (2, 2050), (2, 16386)) if record.rows else ((3, 10), (2, 1030)):
        aligned = make_sample(record, dtypes, shape, 1, tame=True).to("cuda", record.host_inputs)
        call = getattr(ops, record.functional_name)
        expected = as_tuple(call(*aligned.inputs.values()))
        actual = as_tuple(call(*aligned.map(moved).inputs.values()))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a.cpu(), e.cpu(), f"{record.name} {shape}")
