"""torch and ONNX Runtime give the same bits, and those that the function body means.

For every device, dtype, layout, alignment and size, with NaN, infinities and both zeros.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from twinop.libraries.kernel_op import DECLARED
from twinop.model.bodies import find_body
from twinop.record.op_spec import OpSpec

from ..messages import fail, first_difference, require_same_bits
from ..one_node import OrtRunner, poisoned
from ..references import as_close_as_torch_asks
from ..samples import (
    Sample,
    called,
    is_given,
    large_sample,
    make_sample,
    presence_patterns,
    run_in_place,
    run_in_torch,
    samples,
    wide_samples,
)
from ..ulps import is_defined, measure
from ..under_test import advice, op_of, reference_of

IN_BOTH = ("ONNX Runtime", "torch")
BOTH = "ONNX Runtime and torch differ, with one kernel of one file"


def cases(record: OpSpec, dtypes: dict[str, str]) -> Iterator[Sample]:
    return itertools.chain(samples(record, dtypes), wide_samples(record, dtypes))


def test_there_are_samples(record: OpSpec) -> None:
    """Inputs follow from the record, or the op's module gives them."""
    assert len(list(samples(record, record.combinations[0]))) >= 5, (
        f"{record.qualified_name}: samples({record.name!r}, dtype, size) in {op_of(record).place} gives "
        "fewer than 5 calls in all that fit the record's dtypes"
    )


def test_torch_and_onnxruntime_give_the_same_bits(
    record: OpSpec, dtypes: dict[str, str], device: str
) -> None:
    """One session takes all sizes; an op that writes into inputs gives the bits of its functional twin."""
    run_ort = OrtRunner(record, dtypes, device)
    for sample in cases(record, dtypes):
        sample = sample.to(device, record.host_inputs)
        expected = run_in_torch(record, sample)
        actual = tuple(map(poisoned, expected))
        run_ort(sample, actual)
        require_same_bits(record, sample, actual, expected, BOTH, IN_BOTH)
        if record.written:
            said, names = "the op and its functional twin differ", (record.name, record.functional_name)
            require_same_bits(record, sample, run_in_place(record, sample), expected, said, names)


def test_the_kernel_gives_what_the_body_means(record: OpSpec, dtypes: dict[str, str], device: str) -> None:
    """Errors are within the tolerance. NaN and infinities occur exactly where fp64 has them."""
    reference = reference_of(record)
    if find_body(record.key) is None and reference.compute is None:
        pytest.skip(f"{record.qualified_name} has no function body: nothing says what it should compute")
    for sample in cases(record, dtypes):
        if not is_defined(record, sample.inputs, sample.attributes):
            continue
        here = sample.to(device, record.host_inputs)
        results = run_in_torch(record, here)
        measured = measure(record, sample.inputs, sample.attributes, results)
        for name, result, each in zip(record.outputs, results, measured, strict=True):
            allowed = reference.allowed(dtypes[name])
            wrong = each.errors > allowed
            if record.key in DECLARED and reference.ulps is None:
                wrong &= ~as_close_as_torch_asks(result, each.exact)
            if not wrong.any():
                continue
            names = ("kernel", "function body in float64" if reference.compute is None else "reference")
            fail(
                f"{called(record, here)}: the kernel differs from its function body "
                f"by {each.worst:.4g} ulp, allowed {allowed}\n"
                + first_difference(name, wrong, result.cpu(), each.exact, sample, names)
                + f"\n{advice(record, 'ulps')}"
            )


# ---------------------------------------------------------------------------- addresses and layouts


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Copies the tensor to `by` elements after an aligned address."""
    memory = torch.full((tensor.numel() + 8,), 5, dtype=tensor.dtype, device=tensor.device)
    view = memory[by : by + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def mover(first: int, step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that shifts successive tensors by `first`, `first + step` and so on."""
    offsets = itertools.count(first, step)
    return lambda tensor: shifted(tensor, next(offsets) % 8)


@pytest.mark.backward_too
def test_addresses_do_not_change_bits(record: OpSpec, dtypes: dict[str, str], device: str) -> None:
    """Addresses do not change bits, whether all tensors have the same offset or each has its own.

    Triton compiles a kernel for aligned addresses by itself, which may sum in another order.
    """
    run_ort = OrtRunner(record, dtypes, device)
    chosen = [*list(samples(record, dtypes))[3::4], *wide_samples(record, dtypes)]
    close = record.key in DECLARED
    for seed, sample in enumerate(chosen, 3):
        sample = sample.to(device, record.host_inputs)
        expected = run_in_torch(record, sample)
        for each in (sample.map(mover(1, 0)), sample.map(mover(seed, 1))):
            said = "addresses that are not aligned change the result"
            names = ("not aligned", "aligned")
            require_same_bits(record, each, run_in_torch(record, each), expected, said, names, close)
            if not record.is_backward:
                actual = tuple(shifted(poisoned(e), 1 + i) for i, e in enumerate(expected))
                run_ort(each, actual)
                require_same_bits(record, each, actual, expected, f"in ONNX Runtime, {said}", names, close)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "strided": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "flipped": lambda x: x.flip(1).transpose(0, 1),
    "column": lambda x: x[..., 3],
    "scalar": lambda x: x[1, 2, 3],
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}
ANY_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second number": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
}


@pytest.mark.backward_too
def test_layouts(record: OpSpec, device: str) -> None:
    """Layouts do not change bits. torch gets views, ONNX Runtime gets contiguous copies."""
    for dtypes in record.combinations[:4]:
        run_ort = OrtRunner(record, dtypes, device)
        for layout, view, sample in laid_out(record, dtypes):
            contiguous = sample.to(device, record.host_inputs).map(torch.Tensor.contiguous)
            expected = run_in_torch(record, contiguous)
            viewed = sample.to(device, record.host_inputs).map(view)
            said = f"the layout {layout!r} changes the result"
            found = run_in_torch(record, viewed)
            require_same_bits(record, viewed, found, expected, said, ("view", "contiguous copy"))
            if not record.is_backward:
                actual = tuple(map(poisoned, expected))
                run_ort(viewed.map(torch.Tensor.contiguous), actual)
                require_same_bits(record, viewed, actual, expected, BOTH, IN_BOTH)


def laid_out(record: OpSpec, dtypes: dict[str, str]) -> Iterator[tuple[str, Any, Sample]]:
    """Yields layouts, functions that give tensors that layout, and calls."""
    if is_given(record):
        for sample in list(samples(record, dtypes))[::4]:
            yield from ((layout, view, sample) for layout, view in ANY_LAYOUTS.items())
        return
    for layout, change in LAYOUTS.items():
        shape = change(torch.empty(4, 6, 10)).shape
        if not shape and not record.is_elementwise:
            continue  # most of these ops need a dimension
        for present in presence_patterns(record, dtypes)[:: 3 if record.is_backward else 1]:
            sample = make_sample(record, dtypes, shape, 1, present=present)
            view = viewer(layout, shape)
            yield layout, view, sample.map(view)


def viewer(layout: str, shape: torch.Size) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that gives tensors of this shape the strides of this layout."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != shape:  # a weight
            return tensor
        if layout == "expanded":
            return tensor[:1].expand(shape)
        memory = torch.empty(4, 6, 10, dtype=tensor.dtype, device=tensor.device)
        return LAYOUTS[layout](memory).copy_(tensor)

    return change


@pytest.mark.backward_too
def test_rows_of_a_wider_tensor(record: OpSpec, device: str) -> None:
    """Rows of a wider tensor give the same bits as contiguous rows."""
    if not record.rows:
        pytest.skip("not a row-wise op")
    for dtypes in record.combinations[:4]:
        for rows, width in itertools.product([(), (1,), (9,), (2, 5)], (1, 8, 31, 128, 1000, 4098)):
            contiguous = make_sample(record, dtypes, (*rows, width), width).to(device)
            expected = run_in_torch(record, contiguous)
            for gap, start in ((1, 0), (8, 0), (9, 3)):

                def wider(tensor: torch.Tensor, gap: int = gap, start: int = start) -> torch.Tensor:
                    memory = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + gap), 5.0)
                    return memory[..., start : start + tensor.shape[-1]].copy_(tensor)

                sample = contiguous.map(wider)
                found = run_in_torch(record, sample)
                said = "rows of a wider tensor change the result"
                require_same_bits(record, sample, found, expected, said, ("wider", "contiguous"))


def test_any_number_of_threads_gives_the_same_bits(record: OpSpec, dtypes: dict[str, str]) -> None:
    """Where a thread pool splits the work does not change a result."""
    sample = large_sample(record, dtypes)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run_in_torch(record, sample)
        for count in (2, 3):
            torch.set_num_threads(count)
            names = (f"{count} threads", "1 thread")
            said = "the number of torch's threads changes the result"
            require_same_bits(record, sample, run_in_torch(record, sample), expected, said, names)
    finally:
        torch.set_num_threads(before)
    for count in (1, 2, 3):
        actual = tuple(map(poisoned, expected))
        OrtRunner(record, dtypes, "cpu", threads=count)(sample, actual)
        require_same_bits(record, sample, actual, expected, f"{BOTH}, on {count} threads", IN_BOTH)
