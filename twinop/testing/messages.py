"""What is said where a result is wrong: the op, the dtype, the first wrong element and its inputs."""

from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from twinop.libraries.declare import CPU_FUNCTIONS
from twinop.record.dtypes import described, torch_name
from twinop.record.op_spec import OpSpec
from twinop.record.tolerance import TOLERANCE, scale_of

from .one_node import bits
from .samples import Sample, called

_SHOWN = 8  # numbers of a row


def fail(text: str) -> NoReturn:
    """Fails the test with this message alone."""
    pytest.fail(text, pytrace=False)


def require_same_bits(
    record: OpSpec,
    sample: Sample,
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    said: str,
    names: tuple[str, str],
    close: bool = False,
) -> None:
    """Fails the test where two ways to run the op, with these names, give different bits.

    On a CPU that runs the function body, torch's operators and ONNX Runtime's differ by rounding, and for
    infinities and NaN. If `close`, all may differ by rounding. What differs is `said`: "ONNX Runtime and
    torch differ, on one library".
    """
    for name, a, b in zip(record.outputs, found, expected, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            fail(
                f"{called(record, sample)}: {said}: {name} is {described(a)} ({names[0]}) instead of "
                f"{described(b)} ({names[1]})"
            )
        wrong = _far(a, b) if close or runs_body(record, a) else bits(a) != bits(b)
        if wrong.any():
            fail(f"{called(record, sample)}: {said}\n" + first_difference(name, wrong, a, b, sample, names))


def runs_body(record: OpSpec, result: Tensor) -> bool:
    """Whether a result was computed by the function body, because the op has no kernel for the CPU."""
    return result.device.type == "cpu" and record.key in CPU_FUNCTIONS


def _far(a: Tensor, b: Tensor) -> Tensor:
    """Where numbers differ by more than rounding, as in an export's comparison."""
    finite = a.isfinite() & b.isfinite()
    x, y = (torch.where(finite, each.double(), 0) for each in (a, b))
    tolerance = TOLERANCE.get(torch_name(a.dtype), 0.0)
    return (x - y).abs() > (tolerance * scale_of(b) if tolerance else 0.0)


def first_difference(
    name: str, wrong: Tensor, found: Tensor, expected: Tensor, sample: Sample, names: tuple[str, str]
) -> str:
    """Names the first of the `wrong` elements, of which there is one, its inputs, and both values."""
    index = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
    width = max(map(len, names)) + 1
    lines = [
        f"  first wrong element: {name}{_place(index)}; {int(wrong.sum())} of {wrong.numel()} are wrong",
        *(
            f"    {f'{each}:':{width}} {number(values[index])}"
            for each, values in zip(names, (found, expected), strict=True)
        ),
        "  inputs there: " + "; ".join(_input(k, t, index, wrong.shape) for k, t in sample.tensors().items()),
    ]
    if sample.attributes:
        lines.append("  attributes: " + ", ".join(f"{k}={v!r}" for k, v in sample.attributes.items()))
    return "\n".join(lines)


def number(tensor: Tensor) -> str:
    """Shows one number with all digits that its type has."""
    digits = {torch.float64: 17, torch.float32: 9, torch.float16: 5, torch.bfloat16: 4}.get(tensor.dtype)
    value = tensor.item()
    return f"{value:.{digits}g}" if digits else str(value)


def _place(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _input(name: str, tensor: Tensor, index: tuple[int, ...], shape: torch.Size) -> str:
    """The element of an input that a result's element is computed from, as far as shapes tell."""
    try:
        wide = tensor.broadcast_to(shape)
    except RuntimeError:
        is_of_row = len(index) + 1 == tensor.dim() and all(
            i < n for i, n in zip(index, tensor.shape, strict=False)
        )
        row = tensor[index] if is_of_row else tensor
        if row.numel() > _SHOWN:
            return f"{name} = {described(tensor)}"
        return f"{name} = [{', '.join(number(each) for each in row.flatten())}]"
    return f"{name}{_place(index)} = {number(wide[index])}"
