"""Derives the inputs that every op is tested with from its record.

Elementwise and row-wise ops need nothing here. Any other op has its cases in CASES.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from twinop import torch_op
from twinop.library import find_library
from twinop.record import Record
from twinop.shapes import input_shapes as shapes_of_inputs
from twinop.torch_op.second_derivatives import in_torch

torch_op.load(find_library("test_ops"))

ALL = torch_op.records()
RECORDS = {name: record for name, record in ALL.items() if not record.is_backward}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Sample:
    """One call: inputs by name (None if absent), and the attributes that differ from their defaults."""

    inputs: dict[str, torch.Tensor | None]
    attributes: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> "Sample":
        return self.map(lambda tensor: tensor.to(device))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Sample":
        """Returns the same call with every tensor changed."""
        inputs = {name: None if t is None else change(t) for name, t in self.inputs.items()}
        return Sample(inputs, self.attributes)

    def __str__(self) -> str:
        shapes = {name: None if t is None else tuple(t.shape) for name, t in self.inputs.items()}
        return f"{shapes} {self.attributes}"


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def combinations(records: Mapping[str, Record]) -> list[Any]:
    """Returns (record, dtypes) for every dtype combination of every op: a list for `parametrize`."""
    return [
        pytest.param(record, dtypes, id=f"{record.name}-{'-'.join(dict.fromkeys(dtypes.values()))}")
        for record in records.values()
        for dtypes in record.combinations
    ]


each_combination = pytest.mark.parametrize(("record", "dtypes"), combinations(RECORDS))


def has_derivative(record: Record) -> bool:
    """Whether the op can be differentiated; a backward op need not."""
    return bool(record.gradient or in_torch(record))


def run_in_torch(record: Record, sample: Sample, **attributes: Any) -> tuple[torch.Tensor, ...]:
    """Calls the op through `torch.ops`; returns its outputs, also a single one, as a tuple."""
    op = getattr(getattr(torch.ops, record.namespace), record.name)
    results = op(*sample.inputs.values(), **sample.attributes, **attributes)
    return results if isinstance(results, tuple) else (results,)


# ---------------------------------------------------------------------------- numbers


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Returns random numbers mixed with NaN (also with a payload), infinities, both zeros, and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    tensor = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
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


def _some(row: torch.Tensor) -> torch.Tensor:
    return row[row.numel() // 3 : row.numel() // 3 + 1]


ROW_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda row: None,
    "all equal": lambda row: row.fill_(1.7),
    "one huge value": lambda row: _some(row).fill_(3e4),
    "mean 1e4, std 1": lambda row: row.add_(1e4),
    "all -inf": lambda row: row.fill_(-torch.inf),
    "one NaN": lambda row: _some(row).fill_(torch.nan),
    "one inf": lambda row: _some(row).fill_(torch.inf),
    "some -inf": lambda row: row[::2].fill_(-torch.inf),
    "all zero": lambda row: row.fill_(-0.0),
    "spread": lambda row: row.mul_(30),
}
"""The kinds of row; the rows of a sample take them in turn. No value overflows when it is squared."""


def row_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if tensor.dim() > 0 and tensor.shape[-1] > 0:
        for row, make in zip(tensor.view(-1, tensor.shape[-1]), itertools.cycle(ROW_KINDS.values())):
            make(row)
    return tensor.to(dtype)


def plain_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------------- what the record says


def limits(record: Record) -> dict[str, str]:
    """Returns the limit of each attribute that has one: "of x", ">= 0", "in 0 | 1"."""
    parts = [part.strip().partition(" ") for part in record.limits.split(";") if part.strip()]
    return {name: limit for name, _, limit in parts}


# Ops that check the shapes of their inputs themselves.
OWN_SHAPES = {"pad_affine": "weight = x[-1:]; bias = x[-1:]"}


def input_shapes(
    record: Record, shape: Sequence[int], attributes: Mapping[str, Any] | None = None
) -> dict[str, tuple[int, ...]]:
    """Returns a shape for every input, given about that of the first (an odd width may become even)."""
    given = {entry.name: entry.default for entry in record.attributes} | dict(attributes or {})
    record = replace(record, input_shapes=record.input_shapes or OWN_SHAPES.get(record.name, ""))
    return shapes_of_inputs(record, shape, given)


def attribute_variants(record: Record, rank: int) -> list[dict[str, Any]]:
    """Returns sets of attributes: each one away from its default, and axes at every dimension."""
    found: list[dict[str, Any]] = [{}]
    for name, choices in record.attribute_choices.items():
        default = record.attribute(name)
        found += [{name: choice} for choice in choices if default is None or choice != default.default]
    for name, limit in limits(record).items():
        word, _, rest = limit.partition(" ")
        if word == "of":
            found += [{name: axis} for axis in (*range(-rank, -1), *range(rank))]
        elif word == "in":
            found += [{name: int(choice)} for choice in rest.split("|")]
        else:
            found += [{name: float(rest) + 0.25}]
    if len(found) > 2:  # and two at once
        found.append(found[1] | found[-1])
    return found


def presence_patterns(record: Record, dtypes: Mapping[str, str]) -> list[dict[str, bool]]:
    """Returns which inputs may be present for a dtype combination, all of them first.

    It leaves out patterns whose dtypes would select another combination.
    """
    optional = [entry.name for entry in record.inputs if entry.optional]
    found = []
    for given in itertools.product((True, False), repeat=len(optional)):
        present = {entry.name: True for entry in record.inputs} | dict(zip(optional, given, strict=True))
        if (
            record.combination_of({name: dtypes[name] for name, is_given in present.items() if is_given})
            == dtypes
        ):
            found.append(present)
    return found


def make_sample(
    record: Record,
    dtypes: Mapping[str, str],
    shape: Sequence[int],
    seed: int = 0,
    attributes: Mapping[str, Any] | None = None,
    present: Mapping[str, bool] | None = None,
    tame: bool = False,
) -> Sample:
    """Returns a call whose first input has about this shape.

    Args:
        tame: finite numbers of everyday size instead of special values.
    """
    inputs: dict[str, torch.Tensor | None] = {}
    shapes = input_shapes(record, shape, attributes)
    for i, (name, wanted) in enumerate(shapes.items()):
        dtype = torch_dtype(dtypes[name])
        if present and not present[name]:
            inputs[name] = None
        elif tame or (not record.is_elementwise and (i > 0 and wanted != shapes[record.inputs[0].name])):
            inputs[name] = plain_values(wanted, dtype, seed + 50 * i)
        elif record.is_elementwise:
            inputs[name] = values(wanted, dtype, seed + 50 * i, (1, 8, 60)[seed % 3])
        else:
            inputs[name] = row_values(wanted, dtype, seed + 50 * i)
    return Sample(inputs, dict(attributes or {}))


# ---------------------------------------------------------------------------- cases

SIZES = (0, 1, 2, 3, 4, 5, 7, 31, 33, 63, 64, 65, 127, 1023, 1025, 10007, 65537)
SHAPES = ((), (1,), (0, 3), (3, 0), (5, 7), (2, 3, 4), (1, 2, 1, 3, 1, 2, 1, 5))
PAIRS = (((3, 1), (1, 4)), ((5, 7), (7,)), ((), (6,)), ((33, 65), (33, 1)), ((2, 0), (1,)), ((1,), (3, 0, 2)))
WIDTHS = (1, 2, 3, 8, 31, 32, 33, 64, 127, 128, 129, 255, 257, 1023, 1024, 1025)
WIDE = (4095, 4096, 4097, 11008, 16383, 16384, 16385, 20000, 65537, 131080)
ROW_SHAPES = ((7,), (1, 5), (0, 4), (3, 0), (2, 0, 3), (2, 3, 65), (130, 17))


def samples(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    """Yields about forty small cases of an op for one dtype combination, on the CPU and contiguous."""
    if record.name in CASES:
        yield from CASES[record.name](dtypes)
    elif record.is_elementwise:
        yield from _elementwise(record, dtypes)
    else:
        yield from _rowwise(record, dtypes)


def wide_samples(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    """Yields cases with rows of up to 131,080 columns, for row-wise ops."""
    if record.name not in CASES and not record.is_elementwise:
        for seed, width in enumerate(WIDE):
            yield make_sample(record, dtypes, (4 if width < 5000 else 2, width), seed)


def large_sample(record: Record, dtypes: dict[str, str]) -> Sample:
    """Returns a case for several threads, with a size that no number of threads divides."""
    return make_sample(record, dtypes, (300_017,) if record.is_elementwise else (1009, 114), 5)


def _elementwise(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    for seed, shape in enumerate([(size,) for size in SIZES] + list(SHAPES)):
        yield make_sample(record, dtypes, shape, seed)
    for seed, attributes in enumerate(attribute_variants(record, 1)[1:]):
        for size in (1, 5, 127, 1025):
            yield make_sample(record, dtypes, (size,), seed, attributes)
    if "broadcast(" in record.shapes:
        for seed, pair in enumerate(PAIRS):
            inputs: dict[str, torch.Tensor | None] = {
                entry.name: values(shape, torch_dtype(dtypes[entry.name]), seed)
                for entry, shape in zip(record.inputs, pair, strict=True)
            }
            yield Sample(inputs)


def _rowwise(record: Record, dtypes: dict[str, str]) -> Iterator[Sample]:
    patterns = presence_patterns(record, dtypes)
    for seed, width in enumerate(WIDTHS):
        yield make_sample(record, dtypes, (len(ROW_KINDS), width), seed, present=patterns[0])
    for seed, shape in enumerate(ROW_SHAPES):
        yield make_sample(record, dtypes, shape, seed, present=patterns[0])
    for seed, present in enumerate(patterns[1:]):
        for shape in ((len(ROW_KINDS), 33), (1, 1024), (3, 0)):
            yield make_sample(record, dtypes, shape, seed, present=present)
    for seed, attributes in enumerate(attribute_variants(record, 3)[1:]):
        yield make_sample(record, dtypes, (4, 5, 6), seed, attributes, patterns[seed % len(patterns)])


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


def _matmul(dtypes: dict[str, str]) -> Iterator[Sample]:
    pairs = [
        ((1, 1), (1, 1)),
        ((5, 7), (7, 3)),
        ((33, 65), (65, 31)),
        ((128, 128), (128, 128)),
        ((0, 3), (3, 2)),
        ((2, 0), (0, 3)),
        ((3, 4, 5), (3, 5, 6)),
        ((4, 5), (2, 3, 5, 6)),
        ((129, 257), (257, 127)),
    ]
    for seed, (a, b) in enumerate(pairs):
        for attributes in ({}, {"variant": "naive"}, {"tile": 8}, {"tile": 32})[: 4 if seed % 2 else 1]:
            inputs: dict[str, torch.Tensor | None] = {
                "a": plain_values(a, torch_dtype(dtypes["a"]), seed),
                "b": plain_values(b, torch_dtype(dtypes["b"]), seed + 50),
            }
            yield Sample(inputs, attributes)


CASES: dict[str, Callable[[dict[str, str]], Iterator[Sample]]] = {
    "pad_affine": _pad_affine,
    "double_and_sum": _double_and_sum,
    "matmul": _matmul,
}
