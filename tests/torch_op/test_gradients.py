"""Derivatives of every op match the fp64 reference and are reproducible, also compiled and batched.

`test_torch_op.py` covers the rest of autograd: opcheck, transforms and layouts.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import advice, reference_of
from samples import (
    ALL,
    DEVICES,
    RECORDS,
    Sample,
    attribute_variants,
    each_combination,
    has_derivative,
    make_sample,
    presence_patterns,
    torch_dtype,
)
from torch.autograd import gradcheck, gradgradcheck
from ulps import as_tuple, compute

from twinop import torch_op
from twinop.errors import RecordError
from twinop.record import Record

each_op = pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))


def call(record: Record, sample: Sample) -> tuple[torch.Tensor, ...]:
    return as_tuple(getattr(torch_op, record.name)(*sample.inputs.values(), **sample.attributes))


def smooth(record: Record, sample: Sample) -> Sample:
    """Moves the sample to where the op is differentiable."""
    return sample.map(reference_of(record.name).smooth)


def leaves(sample: Sample) -> Sample:
    return sample.map(lambda t: t.detach().clone().requires_grad_())


def small(record: Record, dtypes: dict[str, str], device: str = "cpu") -> Iterator[Sample]:
    """Yields every presence pattern and every attribute, in two and three dimensions."""
    patterns = presence_patterns(record, dtypes)
    for seed, present in enumerate(patterns):
        yield make_sample(record, dtypes, (3, 4), seed, present=present, tame=True).to(device)
    if record.name != "matmul":
        for seed, attributes in enumerate(attribute_variants(record, 3)[1:]):
            present = patterns[seed % len(patterns)]
            yield make_sample(record, dtypes, (2, 3, 4), seed, attributes, present, tame=True).to(device)


def gradients(record: Record, sample: Sample, results: tuple[torch.Tensor, ...], seed: int = 0) -> list[Any]:
    """Returns the gradients of all given inputs for random gradients of all outputs."""
    generator = torch.Generator().manual_seed(12345 + seed)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
    given = [t for t in sample.inputs.values() if t is not None]
    return list(torch.autograd.grad(results, given, weights))


@pytest.mark.parametrize("device", DEVICES)
@each_combination
def test_gradients_against_fp64(record: Record, dtypes: dict[str, str], device: str) -> None:
    """Gradients are within the tolerance, in units of the largest gradient of each input."""
    allowed = reference_of(record.name).gradient_ulps
    many = [make_sample(record, dtypes, shape, 7, tame=True) for shape in ((130, 18), (5, 1026))]
    for sample in [*(s for s in small(record, dtypes)), *many]:
        sample = smooth(record, sample)
        here = leaves(sample.to(device))
        wide = leaves(sample.map(torch.Tensor.double))
        stored = torch_dtype(dtypes[record.inputs[0].name])
        truth = compute(record.name, list(wide.inputs.values()), sample.attributes, stored)
        found = call(record, here)
        # The gradients of the outputs, rounded to the type that the op's have.
        weights = [
            torch.randn(y.shape, generator=torch.Generator().manual_seed(12345)).to(y.dtype) for y in found
        ]
        given = [t for t in here.inputs.values() if t is not None]
        mine = torch.autograd.grad(found, given, [w.to(device) for w in weights])
        exact = torch.autograd.grad(
            truth, [t for t in wide.inputs.values() if t is not None], [w.double() for w in weights]
        )
        for tensor, a, b in zip(given, mine, exact, strict=True):
            assert a.dtype == tensor.dtype and a.shape == b.shape
            unit = torch.finfo(a.dtype).eps * float(b.abs().max())
            error = float((a.cpu().double() - b).abs().max()) / unit
            assert error <= allowed, (
                f"{record.name} {sample}: {error:.2f} ulp of the largest, allowed {allowed}"
                + advice(record.name, "gradient_ulps, or smooth where a derivative has kinks")
            )


@pytest.mark.filterwarnings("ignore:.*double precision")  # of matmul, which is fp32 only
@pytest.mark.parametrize("device", DEVICES)
@each_op
def test_gradcheck(record: Record, device: str) -> None:
    dtypes = record.combinations[-1] if record.name == "matmul" else double(record)
    for i, sample in enumerate(small(record, dtypes, device)):
        sample = leaves(smooth(record, sample))
        given = {name: t for name, t in sample.inputs.items() if t is not None}

        def function(*tensors: torch.Tensor, given: Any = given, sample: Sample = sample) -> Any:
            inputs = dict.fromkeys(sample.inputs) | dict(zip(given, tensors, strict=True))
            return call(record, Sample(inputs, sample.attributes))

        # Every derivative by every element with the first sample; the others along random directions.
        options: dict[str, Any] = {"atol": 1e-7, "rtol": 1e-5, "fast_mode": i > 0}
        if record.name == "matmul":  # fp32 only
            options = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
        assert gradcheck(function, tuple(given.values()), **options), str(sample)
        if has_second_derivative(record):
            assert gradgradcheck(function, tuple(given.values()), **options), str(sample)
        else:
            with pytest.raises(RecordError, match="it can be differentiated once, not twice"):
                gradgradcheck(function, tuple(given.values()))


def has_second_derivative(record: Record) -> bool:
    """Returns whether the backward ops in the op's formulas have formulas."""
    return all(has_derivative(ALL[name]) for name in re.findall(r"\w+_backward", record.gradient))


def double(record: Record) -> dict[str, str]:
    return next(c for c in record.combinations if set(c.values()) == {"float64"})


@pytest.mark.parametrize("device", DEVICES)
@each_op
def test_gradients_are_the_same_on_every_run(record: Record, device: str) -> None:
    """Gradients have the same bits for every number of threads and every address."""
    for dtypes in (record.combinations[0], record.combinations[-1]):
        for shape in ((1000, 34), (3, 514 if record.name == "matmul" else 4098)):
            sample = make_sample(record, dtypes, shape, 11, tame=True).to(device)
            sample = leaves(smooth(record, sample))
            first = gradients(record, sample, call(record, sample))
            for threads in (1, 3):
                before = torch.get_num_threads()
                torch.set_num_threads(threads)
                again = gradients(record, sample, call(record, sample))
                torch.set_num_threads(before)
                assert all(map(torch.equal, first, again)), f"{record.name} {sample}"


@pytest.mark.parametrize("device", DEVICES)
@each_op
def test_vmap(record: Record, device: str) -> None:
    """A batched call gives the results of separate calls, for any batch dimension."""
    dtypes = record.combinations[0]
    names = [entry.name for entry in record.inputs]
    for present in presence_patterns(record, dtypes):
        one = [
            make_sample(record, dtypes, (3, 4), seed, present=present, tame=True).to(device)
            for seed in (1, 2)
        ]
        one = [smooth(record, sample) for sample in one]
        given = [name for name, t in one[0].inputs.items() if t is not None]
        expected = [call(record, sample) for sample in one]
        for dim in (0, -1):

            def function(*tensors: torch.Tensor, given: Any = given) -> Any:
                inputs: Any = dict.fromkeys(names) | dict(zip(given, tensors, strict=True))
                return call(record, Sample(inputs))

            batch = [torch.stack([sample.inputs[name] for sample in one], dim) for name in given]  # type: ignore[misc]
            found = torch.vmap(function, in_dims=dim)(*batch)
            for i, wanted in enumerate(expected):
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a[i], b, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@each_op
def test_compile_without_graph_break(record: Record, device: str) -> None:
    """Forward and backward compile with fixed and dynamic sizes. test_torch_op.py covers inductor."""
    dtypes = record.combinations[0]
    torch._dynamo.reset()

    def function(*tensors: Any) -> Any:
        return sum(y.double().sin().sum() for y in as_tuple(getattr(torch_op, record.name)(*tensors)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for width in (6, 8):  # the second one makes it dynamic
        sample = leaves(smooth(record, make_sample(record, dtypes, (5, width), width, tame=True).to(device)))
        given: Any = list(sample.inputs.values())
        found, expected = compiled(*given), function(*given)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for a, b in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
