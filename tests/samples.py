"""Inputs for every op under test, and its meaning in fp64: what the parity matrix runs over.

An elementwise op needs an entry in REFERENCES only; another op gives its cases as well. A new record without
an entry fails `test_every_op_has_samples`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from twinop import torch_op
from twinop.library import find_library
from twinop.record import Record

torch_op.load_library(find_library("test_ops_torch"))

RECORDS = {name: record for name, record in torch_op.records().items() if not record.is_backward}

# Largest distance from the fp64 reference, in units of the result's last place (eps of the dtype), per op.
# 0: the result is exact, or the reference rounded once.
TOLERANCE_ULP = {
    "relu": {"float32": 0, "float16": 0, "bfloat16": 0, "float64": 0},
    # fp32 arithmetic with a contraction here and there, then one rounding; sums of up to 257 terms.
    "pad_affine": {"float32": 4, "float16": 1, "bfloat16": 1, "float64": 4},
    "double_and_sum": {"float32": 257, "float16": 1, "bfloat16": 1, "float64": 257},
}


@dataclass
class Sample:
    """One call: inputs by name (None: absent) and attributes that are not left to their defaults."""

    inputs: dict[str, torch.Tensor | None]
    attributes: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> "Sample":
        inputs = {name: None if t is None else t.to(device) for name, t in self.inputs.items()}
        return Sample(inputs, self.attributes)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers, and among them NaN with a payload, infinities, both zeros, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.finfo(dtype)
    special = torch.tensor(
        [float("inf"), float("-inf"), 0.0, -0.0, info.tiny, -info.tiny, info.max, info.min, float("nan")],
        dtype=torch.float64,
    ).to(dtype)
    subnormal = special.new_tensor([info.tiny]) / 4
    payload = special[-1:].clone()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    payload.view(integer).add_(3)
    special = torch.cat([special, subnormal, -subnormal, payload])
    flat = tensor.view(-1)
    where = torch.randperm(flat.numel(), generator=generator)[: min(len(special), flat.numel() // 3)]
    flat[where] = special[: len(where)]
    return tensor


SIZES = (0, 1, 2, 3, 4, 5, 7, 31, 33, 63, 64, 65, 127, 1023, 1025, 10007, 65537)
SHAPES = ((), (1,), (0, 3), (3, 0), (5, 7), (2, 3, 4), (1, 2, 1, 3, 1, 2, 1, 5))


def samples(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    """The cases of one op for one dtype combination, on the CPU, contiguous."""
    if record.is_elementwise:
        for seed, shape in enumerate([(size,) for size in SIZES] + list(SHAPES)):
            yield Sample(
                {entry.name: values(shape, torch_dtype(dtypes[entry.name]), seed) for entry in record.inputs}
            )
    else:
        yield from CASES[record.name](dtypes)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _pad_affine(dtypes: dict[str, str]) -> Iterator[Sample]:
    for seed, shape in enumerate([(1,), (7,), (0, 4), (3, 0), (4, 33), (2, 3, 65), (130, 17)]):
        x = values(shape, torch_dtype(dtypes["x"]), seed)
        weight = values(shape[-1:], torch_dtype(dtypes["weight"]), seed + 50)
        bias = values(shape[-1:], torch_dtype(dtypes["bias"]), seed + 100)
        mixed = dtypes["weight"] != dtypes["x"]
        for given in ((True, True), (True, False), (False, True)) + (() if mixed else ((False, False),)):
            attributes = {"scale": 1.7, "sign": "minus", "pads": [2, seed % 3]} if seed % 2 else {}
            yield Sample(
                {"x": x, "weight": weight if given[0] else None, "bias": bias if given[1] else None},
                attributes,
            )


def _double_and_sum(dtypes: dict[str, str]) -> Iterator[Sample]:
    for seed, shape in enumerate([(1,), (7,), (0, 4), (3, 0), (4, 33), (2, 3, 65), (130, 257)]):
        yield Sample({"x": values(shape, torch_dtype(dtypes["x"]), seed)})


CASES: dict[str, Callable[[dict[str, str]], Iterator[Sample]]] = {
    "pad_affine": _pad_affine,
    "double_and_sum": _double_and_sum,
}


# ---------------------------------------------------------------------------- meaning, in fp64


def _relu(x: torch.Tensor, variant: str = "auto") -> torch.Tensor:
    return torch.where(x < 0, torch.zeros_like(x), x)


def _pad_affine_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float = 0.1,
    sign: str = "plus",
    pads: tuple[int, ...] = (0, 1),
) -> torch.Tensor:
    scale = float(torch.tensor(scale, dtype=torch.float32))
    y = scale * x if weight is None else scale * x * weight
    if bias is not None:
        y = y + bias if sign == "plus" else y - bias
    return torch.nn.functional.pad(y, list(pads))


def _double_and_sum_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * x, x.sum(-1)


REFERENCES: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "pad_affine": _pad_affine_reference,
    "double_and_sum": _double_and_sum_reference,
}
