"""torch and ONNX Runtime give the same bits: every device, op, dtype and layout. And the bits are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_node import assert_same_bits, library_of, make_session, one_node_model, run_bound
from samples import RECORDS, REFERENCES, SIZES, TOLERANCE_ULP, Sample, samples, torch_dtype, values

from twinop import torch_op
from twinop.record import DOMAIN, Record

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def torch_results(record: Record, sample: Sample, **attributes: Any) -> tuple[torch.Tensor, ...]:
    op = getattr(getattr(torch.ops, DOMAIN), record.name)
    results = op(*sample.inputs.values(), **sample.attributes, **attributes)
    return results if isinstance(results, tuple) else (results,)


class OrtRunner:
    """One session per presence pattern and attributes; runs samples at any rank and alignment."""

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
    """Memory for an output, full of a value that no op leaves by chance."""
    return torch.full_like(like, 123.0, memory_format=torch.contiguous_format)


def combinations() -> list[Any]:
    return [
        pytest.param(record, dtypes, id=f"{record.name}-{'-'.join(dict.fromkeys(dtypes.values()))}")
        for record in RECORDS.values()
        for dtypes in record.combinations
    ]


def test_every_op_has_samples() -> None:
    for record in RECORDS.values():
        assert record.name in REFERENCES and record.name in TOLERANCE_ULP, record.name
        assert len(list(samples(record, record.combinations[0]))) >= 5, record.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("record", "dtypes"), combinations())
def test_same_bits(record: Record, dtypes: dict[str, str], device: str) -> None:
    run_ort = OrtRunner(record, dtypes, device)
    for sample in samples(record, dtypes):
        sample = sample.to(device)
        expected = torch_results(record, sample)
        actual = tuple(map(poisoned, expected))
        run_ort(sample, actual)
        for name, a, e in zip(record.outputs, actual, expected, strict=True):
            shapes = {name: None if t is None else tuple(t.shape) for name, t in sample.inputs.items()}
            assert_same_bits(a, e, f"{record.name}.{name} {shapes} {sample.attributes}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", ["auto", "scalar", "vec4"])
def test_variants_have_the_same_bits(variant: str, dtype: str, device: str) -> None:
    record = RECORDS["relu"]
    dtypes = next(c for c in record.combinations if c["x"] == dtype)
    run_ort = OrtRunner(record, dtypes, device)
    for sample in samples(record, dtypes):
        sample = sample.to(device)
        (expected,) = torch_results(record, sample)
        (result,) = torch_results(record, sample, variant=variant)
        actual = poisoned(expected)
        run_ort(sample, (actual,), variant=variant)
        assert_same_bits(result, expected, f"torch {variant} {tuple(expected.shape)}")
        assert_same_bits(actual, expected, f"ORT {variant} {tuple(expected.shape)}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", ["auto", "scalar", "vec4"])
def test_alignment_does_not_change_bits(variant: str, dtype: str, device: str) -> None:
    """Inputs and outputs that start 1 to 7 elements behind an aligned address, nothing written outside."""
    record = RECORDS["relu"]
    run_ort = OrtRunner(record, next(c for c in record.combinations if c["x"] == dtype), device)
    for size in SIZES:
        aligned = values((size,), torch_dtype(dtype), size).to(device)
        (expected,) = torch_results(record, Sample({"x": aligned}))
        for shift in range(1, 8):
            buffer = torch.full((size + 16,), -5.0, dtype=aligned.dtype, device=device)
            x = buffer[shift : shift + size]
            x.copy_(aligned)
            sample = Sample({"x": x})
            (result,) = torch_results(record, sample, variant=variant)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("record", list(RECORDS.values()), ids=list(RECORDS))
def test_layouts(record: Record, layout: str, device: str) -> None:
    """ORT has no strides: it gets the contiguous copy of what torch reads in place or copies."""
    for dtypes in record.combinations[:4]:
        view = LAYOUTS[layout](values((4, 6, 10), torch_dtype(dtypes["x"]), 1).to(device))
        if view.dim() == 0 and not record.is_elementwise:
            continue  # these ops need a dimension: test_errors
        sample = Sample({entry.name: view if i == 0 else None for i, entry in enumerate(record.inputs)})
        expected = torch_results(record, sample)
        if record.is_elementwise:
            assert expected[0].stride() == torch.empty_like(view).stride()
        actual = tuple(map(poisoned, expected))
        contiguous = Sample({n: None if t is None else t.contiguous() for n, t in sample.inputs.items()})
        OrtRunner(record, dtypes, device)(contiguous, actual)
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e.contiguous(), f"{record.name} {layout} {dtypes['x']}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("record", "dtypes"), combinations())
def test_against_fp64(record: Record, dtypes: dict[str, str], device: str) -> None:
    ulps = TOLERANCE_ULP[record.name][dtypes["x"]]
    for sample in samples(record, dtypes):
        finite = {
            name: None if tensor is None else tensor.nan_to_num(0.5, 2.0, -2.0).clamp(-100, 100)
            for name, tensor in sample.inputs.items()
        }
        results = torch_results(record, Sample(finite, sample.attributes).to(device))
        wide = {name: None if tensor is None else tensor.double() for name, tensor in finite.items()}
        reference = REFERENCES[record.name](*wide.values(), **sample.attributes)
        for result, exact in zip(
            results, reference if isinstance(reference, tuple) else (reference,), strict=True
        ):
            rounded = exact.to(result.dtype).double()
            unit = torch.finfo(result.dtype).eps * exact.abs().clamp(min=1.0)
            error = (
                ((result.cpu().double() - rounded).abs() / unit).max() if exact.numel() else torch.tensor(0.0)
            )
            assert error <= ulps, f"{record.name} {dtypes['x']}: {error:.2f} ulp, allowed {ulps}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_relu_is_torchs_relu(dtype: str, device: str) -> None:
    """NaN stays NaN, infinities and -0 as torch; the gradient as torch's, NaN and 0 included."""
    for size in SIZES:
        x = values((size,), torch_dtype(dtype), size).to(device).requires_grad_()
        ours, theirs = torch.ops.custom_domain.relu(x), torch.relu(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        grad = values((size,), torch_dtype(dtype), size + 1).to(device)
        (mine,) = torch.autograd.grad(ours, x, grad)
        (expected,) = torch.autograd.grad(theirs, x, grad)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_than_2_to_the_31_elements(dtype: str) -> None:
    """64-bit counts and offsets: 2^31 + 9 elements, through torch and ORT, aligned and not."""
    size = (1 << 31) + 9
    record = RECORDS["relu"]
    dtypes = next(c for c in record.combinations if c["x"] == dtype)
    buffer = torch.empty(size + 1, dtype=torch_dtype(dtype), device="cuda")
    for part in buffer.split(1 << 28):
        part.normal_()
    for x in (buffer[:size], buffer[1 : size + 1]):
        result = torch_op.relu(x)
        for mine, theirs in zip(result.split(1 << 28), x.split(1 << 28), strict=True):
            assert torch.equal(mine, torch.relu(theirs))
        actual = torch.full_like(result, 7.0)
        OrtRunner(record, dtypes, "cuda")(Sample({"x": x}), (actual,))
        for mine, theirs in zip(actual.split(1 << 28), result.split(1 << 28), strict=True):
            assert torch.equal(mine, theirs)
        del result, actual


@pytest.mark.cuda
@pytest.mark.parametrize("record", list(RECORDS.values()), ids=list(RECORDS))
def test_cpu_and_cuda_agree(record: Record) -> None:
    """Within the tolerance of the op (exact ops: the same values)."""
    for dtypes in record.combinations:
        for sample in samples(record, dtypes):
            cpu, cuda = torch_results(record, sample), torch_results(record, sample.to("cuda"))
            ulps = TOLERANCE_ULP[record.name][dtypes["x"]]
            for a, b in zip(cpu, cuda, strict=True):
                eps = torch.finfo(a.dtype).eps * max(ulps, 0)
                torch.testing.assert_close(b.cpu(), a, rtol=eps, atol=eps, equal_nan=True)
