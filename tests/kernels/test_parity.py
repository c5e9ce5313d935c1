"""torch and ONNX Runtime give the same, correct bits for every device, op, dtype and layout."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_node import assert_same_bits, library_of, make_session, one_node_model, run_bound
from references import advice, reference_of
from samples import (
    ALL,
    DEVICES,
    RECORDS,
    SIZES,
    Sample,
    combinations,
    each_combination,
    make_sample,
    presence_patterns,
    run_in_torch,
    samples,
    torch_dtype,
    values,
    wide_samples,
)
from ulps import errors_in_ulps

from twinop.record import Record


class OrtRunner:
    """Runs samples. It keeps one session for each presence pattern and attribute set."""

    def __init__(self, record: Record, dtypes: dict[str, str], device: str) -> None:
        self.record, self.dtypes, self.device = record, dtypes, device
        self.sessions: dict[str, Any] = {}

    def __call__(self, sample: Sample, outputs: tuple[torch.Tensor, ...], **attributes: Any) -> None:
        present = [tensor is not None for tensor in sample.inputs.values()]
        given = sample.attributes | attributes
        key = f"{present}{given}"
        if key not in self.sessions:
            model = one_node_model(self.record, self.dtypes, present, given)
            self.sessions[key] = make_session(model, library_of(self.record), self.device)
        inputs = {name: tensor for name, tensor in sample.inputs.items() if tensor is not None}
        run_bound(self.sessions[key], inputs, dict(zip(self.record.outputs, outputs, strict=True)))


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Returns memory for an output, filled with a value that no op returns by chance."""
    return torch.full_like(like, 123.0, memory_format=torch.contiguous_format)


def test_every_op_has_samples() -> None:
    for record in RECORDS.values():
        assert len(list(samples(record, record.combinations[0]))) >= 5, record.name


def cases(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    return itertools.chain(samples(record, dtypes), wide_samples(record, dtypes))


@pytest.mark.parametrize("device", DEVICES)
@each_combination
def test_same_bits(record: Record, dtypes: dict[str, str], device: str) -> None:
    run_ort = OrtRunner(record, dtypes, device)
    for sample in cases(record, dtypes):
        sample = sample.to(device)
        expected = run_in_torch(record, sample)
        actual = tuple(map(poisoned, expected))
        run_ort(sample, actual)
        for name, a, e in zip(record.outputs, actual, expected, strict=True):
            assert_same_bits(a, e, f"{record.name}.{name} {sample}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", ["auto", "scalar", "vec4"])
def test_variants_have_the_same_bits(variant: str, dtype: str, device: str) -> None:
    record = RECORDS["relu"]
    dtypes = next(c for c in record.combinations if c["x"] == dtype)
    run_ort = OrtRunner(record, dtypes, device)
    for sample in samples(record, dtypes):
        sample = Sample(sample.to(device).inputs)
        (expected,) = run_in_torch(record, sample)
        (result,) = run_in_torch(record, sample, variant=variant)
        actual = poisoned(expected)
        run_ort(sample, (actual,), variant=variant)
        assert_same_bits(result, expected, f"torch {variant} {tuple(expected.shape)}")
        assert_same_bits(actual, expected, f"ORT {variant} {tuple(expected.shape)}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", ["auto", "scalar", "vec4"])
def test_alignment_does_not_change_bits(variant: str, dtype: str, device: str) -> None:
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
            (result,) = run_in_torch(record, sample, variant=variant)
            assert_same_bits(result, expected, f"torch {size}+{shift}")
            out = torch.full((size + 16,), 123.0, dtype=aligned.dtype, device=device)
            window = out[8 - shift : 8 - shift + size]
            run_ort(sample, (window,), variant=variant)
            assert_same_bits(window, expected, f"ORT {size}+{shift}")
            assert (out[: 8 - shift] == 123).all() and (out[8 - shift + size :] == 123).all(), (
                f"{size}+{shift}"
            )


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


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Copies the tensor to `by` elements after an aligned address."""
    memory = torch.full((tensor.numel() + 8,), -5.0, dtype=tensor.dtype, device=tensor.device)
    view = memory[by : by + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def mover(first: int, step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that shifts successive tensors by `first`, `first + step` and so on."""
    offsets = itertools.count(first, step)
    return lambda tensor: shifted(tensor, next(offsets) % 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("record", "dtypes"), combinations(ALL))
def test_addresses_do_not_change_bits(record: Record, dtypes: dict[str, str], device: str) -> None:
    """Addresses do not change bits, whether all tensors have the same offset or each has its own."""
    run_ort = OrtRunner(record, dtypes, device)
    chosen = [*list(samples(record, dtypes))[3::4], *wide_samples(record, dtypes)]
    for seed, sample in enumerate(chosen, 3):
        sample = sample.to(device)
        expected = run_in_torch(record, sample)
        for moved in (sample.map(mover(1, 0)), sample.map(mover(seed, 1))):
            for a, e in zip(run_in_torch(record, moved), expected, strict=True):
                assert_same_bits(a, e, f"torch {record.name} {sample}")
            if not record.is_backward:
                actual = tuple(shifted(poisoned(e), 1 + i) for i, e in enumerate(expected))
                run_ort(moved, actual)
                for a, e in zip(actual, expected, strict=True):
                    assert_same_bits(a, e, f"ORT {record.name} {sample}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("record", list(ALL.values()), ids=list(ALL))
def test_layouts(record: Record, layout: str, device: str) -> None:
    """Layouts do not change bits. torch gets views, ONNX Runtime gets contiguous copies."""
    for dtypes in record.combinations[:4]:
        for present in presence_patterns(record, dtypes)[:: 3 if record.is_backward else 1]:
            shape = LAYOUTS[layout](torch.empty(4, 6, 10)).shape
            if not shape and not record.is_elementwise:
                continue  # most of these ops need a dimension
            sample = make_sample(record, dtypes, shape, 1, present=present).to(device)
            sample = sample.map(viewer(layout, shape))
            contiguous = sample.map(torch.Tensor.contiguous)
            expected = run_in_torch(record, contiguous)
            for a, e in zip(run_in_torch(record, sample), expected, strict=True):
                assert_same_bits(a, e, f"torch {record.name} {layout} {sample}")
            if not record.is_backward:
                actual = tuple(map(poisoned, expected))
                OrtRunner(record, dtypes, device)(contiguous, actual)
                for a, e in zip(actual, expected, strict=True):
                    assert_same_bits(a, e, f"ORT {record.name} {layout} {sample}")


def viewer(layout: str, shape: torch.Size) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that gives tensors of this shape the strides of this layout."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != shape:  # a weight
            return tensor
        if layout == "expanded":
            return tensor[:1].expand(shape)
        return LAYOUTS[layout](torch.empty(4, 6, 10, dtype=tensor.dtype, device=tensor.device)).copy_(tensor)

    return change


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(), (1,), (9,), (2, 5)])
@pytest.mark.parametrize("record", [r for r in ALL.values() if r.rows], ids=lambda record: record.name)
def test_rows_of_a_wider_tensor(record: Record, rows: tuple[int, ...], device: str) -> None:
    """Rows of a wider tensor give the same bits as contiguous rows."""
    for dtypes in record.combinations[:4]:
        for width in (1, 8, 31, 128, 1000, 4098):
            contiguous = make_sample(record, dtypes, (*rows, width), width).to(device)
            first = next(iter(contiguous.inputs.values()))
            assert first is not None
            for gap, start in ((1, 0), (8, 0), (9, 3)):

                def wider(tensor: torch.Tensor, gap: int = gap, start: int = start) -> torch.Tensor:
                    memory = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + gap), 5.0)
                    return memory[..., start : start + tensor.shape[-1]].copy_(tensor)

                sample = contiguous.map(wider)
                for a, e in zip(run_in_torch(record, sample), run_in_torch(record, contiguous), strict=True):
                    assert_same_bits(a, e, f"{record.name} {gap} {start} {sample}")


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


@pytest.mark.parametrize("device", DEVICES)
@each_combination
def test_against_fp64(record: Record, dtypes: dict[str, str], device: str) -> None:
    """Errors are within the tolerance. NaN and infinities occur exactly where fp64 has them."""
    allowed = reference_of(record.name).allowed(dtypes[record.outputs[0]])
    for sample in cases(record, dtypes):
        results = run_in_torch(record, sample.to(device))
        errors = errors_in_ulps(record.name, sample.inputs, sample.attributes, results)
        for name, error in zip(record.outputs, errors, strict=True):
            assert error <= allowed, (
                f"{record.name}.{name} {sample}: {error:.2f} ulp, allowed {allowed}"
                + advice(record.name, "ulps")
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_relu_is_torchs_relu(dtype: str, device: str) -> None:
    """relu and its gradient equal torch's, also for NaN, infinities, 0 and -0."""
    for size in SIZES:
        x = values((size,), torch_dtype(dtype), size).to(device).requires_grad_()
        ours, theirs = torch.ops.custom_domain.relu(x), torch.relu(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        grad = values((size,), torch_dtype(dtype), size + 1).to(device)
        (mine,) = torch.autograd.grad(ours, x, grad)
        (expected,) = torch.autograd.grad(theirs, x, grad)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
