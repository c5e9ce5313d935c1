"""Derives the inputs that every op is tested with from its record.

Where the record does not say what inputs fit, the function `samples` of the op's module gives calls.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from twinop.errors import RecordError, TwinopError
from twinop.libraries.declare import DERIVATIVES, SECOND_DERIVATIVES
from twinop.record.call_checks import check_attributes
from twinop.record.dtypes import described
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.record.shapes import input_shapes
from twinop.torch_op.rules import as_tuple

from . import child
from .under_test import given_calls, op_of
from .values import ROW_KINDS, integers, plain_values, row_values, values


class NoSamples(TwinopError):
    """The record does not say what inputs the op takes, and its module does not either."""


@dataclass
class Sample:
    """One call: inputs by name (None if absent), and the attributes that differ from their defaults."""

    inputs: dict[str, Any]  # a tensor or None
    attributes: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str, host: Sequence[str] | frozenset[str] = ()) -> "Sample":
        """Moves the call to a device, but for the inputs that stay in host memory."""
        moved = {name: t.to(device) for name, t in self.tensors().items() if name not in host}
        return Sample(self.inputs | moved, self.attributes)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Sample":
        """Returns the same call with every tensor changed."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return Sample(self.inputs | changed, self.attributes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the inputs that are present."""
        return {name: tensor for name, tensor in self.inputs.items() if tensor is not None}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def has_derivative(record: OpSpec) -> bool:
    """Whether the op can be differentiated; a backward op need not."""
    return bool(record.gradients or record.key in SECOND_DERIVATIVES or record.key in DERIVATIVES)


def run_in_torch(record: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Calls the op through `torch.ops`; returns its outputs, also a single one, as a tuple."""
    op = getattr(getattr(torch.ops, record.namespace), record.functional_name)
    _note(record, sample)
    return as_tuple(op(*sample.inputs.values(), **sample.attributes))


def run_in_place(record: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Calls an op that writes into inputs, on copies of them; returns the outputs, as its twin does."""
    copies = Sample(sample.inputs | {n: sample.inputs[n].clone() for n in record.written.values()})
    _note(record, sample)
    op = getattr(getattr(torch.ops, record.namespace), record.name)
    results = op(*copies.inputs.values(), **sample.attributes)
    returned = () if results is None else as_tuple(results)
    return (*returned, *(copies.inputs[name] for name in record.written.values()))


def call(record: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Calls the op's Python function; returns its outputs as a tuple."""
    _note(record, sample)
    return as_tuple(op_of(record).function(*sample.inputs.values(), **sample.attributes))


def called(record: OpSpec, sample: Sample) -> str:
    """The op and its inputs, as the messages of its checks show them."""
    given = {name: described(tensor) for name, tensor in sample.tensors().items()}
    device = next(iter(sample.tensors().values())).device.type
    return f"{record.qualified_name}({', '.join(f'{k}: {v}' for k, v in given.items())}), {device}"


def _note(record: OpSpec, sample: Sample) -> None:
    """Keeps the call, for the message if it ends the process."""
    if child.is_watched():
        child.note(f"{called(record, sample)} in {os.environ.get('PYTEST_CURRENT_TEST')}")


# ---------------------------------------------------------------------------- what the record says


def why_not_derived(record: OpSpec) -> str:
    """Returns what the record does not say of the inputs, or "" if inputs follow from it."""
    if required := [entry.name for entry in record.attributes if entry.required]:
        return f"{', '.join(required)}: attributes without a default"
    if record.host_inputs:
        return f"{', '.join(sorted(record.host_inputs))}: values in host memory have a meaning of their own"
    for dtypes in record.combinations:
        kinds = {entry.name: torch_dtype(dtypes[entry.name]) for entry in record.inputs}
        floating = {name: kind.is_floating_point and kind.itemsize > 1 for name, kind in kinds.items()}
        if len(set(floating.values())) > 1 and not record.is_elementwise:  # (there, stored numbers)
            named = ", ".join(name for name, is_float in floating.items() if not is_float)
            return f"{named}: integers and 8 bits beside numbers have a meaning of their own"
    if record.is_elementwise or record.rows or record.input_shapes or len(record.inputs) == 1:
        return ""
    return "the record says nothing of its inputs' shapes (input_shapes)"


def attribute_variants(record: OpSpec, rank: int) -> list[dict[str, Any]]:
    """Returns sets of attributes: each one away from its default, and axes at every dimension."""
    found: list[dict[str, Any]] = [{}]
    for name, choices in record.choices.items():
        default = getattr(record.attribute(name), "default", None)
        if isinstance(choices[0], str):
            found += [{name: choice} for choice in choices if choice != default]
        else:  # the first ones: a device may not have what the largest tile or block needs
            found += [{name: choice} for choice in choices[:3]]
    for name, word, rest in record.limits:
        if word == "of":
            found += [{name: axis} for axis in (*range(-rank, -1), *range(rank))]
        elif word != "in":
            found += [{name: value} for value in _near(record, name, rest)]
    if len(found) > 2:  # and two at once
        found.append(found[1] | found[-1])
    return found


def _near(record: OpSpec, name: str, bound: int | float) -> list[Any]:
    """Returns a number near a bound of an attribute that all its limits allow, if there is one."""
    whole = getattr(record.attribute(name), "kind", "float") == "int"
    steps = (1, -1, 0) if whole else (0.25, -0.25, 2**-10, -(2**-10), 0.0)
    for value in ((bound if whole else float(bound)) + step for step in steps):
        try:
            check_attributes(record, {name: value})
        except RecordError:
            continue
        return [value]
    return []


def presence_patterns(record: OpSpec, dtypes: Mapping[str, str]) -> list[dict[str, bool]]:
    """Returns which inputs may be present for these dtypes, all of them first."""
    optional = [entry.name for entry in record.inputs if entry.optional]
    found = []
    for given in itertools.product((True, False), repeat=len(optional)):
        present = {entry.name: True for entry in record.inputs} | dict(zip(optional, given, strict=True))
        if _selects(record, dtypes, [name for name, is_given in present.items() if is_given]):
            found.append(present)
    return found


def _selects(record: OpSpec, dtypes: Mapping[str, str], given: Sequence[str]) -> bool:
    return record.combination_of({name: dtypes[name] for name in given}) == dtypes


def make_sample(
    record: OpSpec,
    dtypes: Mapping[str, str],
    shape: Sequence[int],
    seed: int = 0,
    attributes: Mapping[str, Any] | None = None,
    present: Mapping[str, bool] | None = None,
    tame: bool = False,
) -> Sample:
    """Returns a call whose first input has about this shape; if the op's module gives calls, one of them.

    A `tame` one has finite numbers of everyday size instead of special values. NoSamples: the record does not
    say what inputs fit, nor does the op's module.
    """
    shapes = None if takes_given(record) else fits(record, shape, attributes)
    if shapes is None:
        size = min(shape[-1] if shape else 1, _MOST_GIVEN)
        tried = (size, *GIVEN_SIZES[3:])
        calls = (each for width in tried for each in given_samples(record, dtypes, width))
        if (sample := next(calls, None)) is None:
            dtypes_of_call = ", ".join(
                f"{name} {dtypes[name]}" for name in record.parameters if name in dtypes
            )
            raise NoSamples(
                f"{record.qualified_name}: samples({record.name!r}, dtype, size) in {op_of(record).place} "
                f"gives no call for {dtypes_of_call}"
            )
        inputs = {name: None if present and not present[name] else t for name, t in sample.inputs.items()}
        # Only of twinop's own ops it is known that other numbers fit, too: a probability is at most 1.
        factor = 1 + seed % 8 / 8 if record.domain == DOMAIN else 1
        moved = Sample(inputs, sample.attributes | dict(attributes or {}))
        return moved.map(lambda t: t * factor if t.is_floating_point() and t.itemsize > 1 else t)
    found: dict[str, torch.Tensor | None] = {}
    # An index or a whole number has no value that stands for NaN.
    kinds = [torch_dtype(dtypes[name]) for name in record.outputs if name in dtypes]
    gives_integers = any(not kind.is_floating_point and kind != torch.bool for kind in kinds)
    first = shapes[record.inputs[0].name]
    for i, entry in enumerate(record.inputs):
        if present and not present[entry.name]:
            found[entry.name] = None
            continue
        wanted, dtype = shapes[entry.name], torch_dtype(dtypes[entry.name])
        draw: Callable[..., torch.Tensor] = row_values if wanted == first else plain_values
        if record.is_elementwise:
            draw = partial(values, scale=(1, 8, 60)[seed % 50 % 3])
        draw = integers if not dtype.is_floating_point else plain_values if tame else draw
        tensor = draw(wanted, dtype, seed + 50 * i)
        if gives_integers and dtype.is_floating_point:
            tensor = tensor.nan_to_num(0.5, torch.inf, -torch.inf)
        found[entry.name] = tensor
    return Sample(found, dict(attributes or {}))


def fits(record: OpSpec, shape: Sequence[int], attributes: Any = None) -> dict[str, Any] | None:
    """Returns shapes of all inputs, the first one about this; None: the op wants other dimensions."""
    try:
        return input_shapes(record, shape, attributes)
    except RecordError:
        return None


def given_samples(record: OpSpec, dtypes: Mapping[str, str], size: int) -> Iterator[Sample]:
    """Yields the calls that the op's module gives, in a combination's dtypes; NoSamples: it gives none."""
    calls = given_calls(record, dtypes[record.inputs[0].name], size)
    if calls is None:
        reason = why_not_derived(record) or "its input_shapes take none of the usual shapes"
        raise NoSamples(
            f"{record.qualified_name}: inputs cannot be derived from the record: {reason}. "
            f"Write a function samples(op, dtype, size) in {op_of(record).place} that returns a list of "
            "calls, inputs and attributes by name, such as "
            f'[{{"{record.inputs[0].name}": torch.randn(3, size), ...}}]'
        )
    for given in calls:
        inputs = {}
        for entry in record.inputs:
            tensor = given.pop(entry.name, None)
            inputs[entry.name] = None if tensor is None else tensor.to(torch_dtype(dtypes[entry.name]))
        if _selects(record, dtypes, [name for name, tensor in inputs.items() if tensor is not None]):
            yield Sample(inputs, given)


# ---------------------------------------------------------------------------- cases

SIZES = (0, 1, 2, 3, 4, 5, 7, 31, 33, 63, 64, 65, 127, 1023, 1025, 10007, 65537)
SHAPES = ((), (1,), (0, 3), (3, 0), (5, 7), (2, 3, 4), (1, 2, 1, 3, 1, 2, 1, 5))
PAIRS = (((3, 1), (1, 4)), ((5, 7), (7,)), ((), (6,)), ((33, 65), (33, 1)), ((2, 0), (1,)), ((1,), (3, 0, 2)))
WIDTHS = (1, 2, 3, 8, 31, 32, 33, 64, 127, 128, 129, 255, 257, 1023, 1024, 1025)
WIDE = (4095, 4096, 4097, 11008, 16383, 16384, 16385, 20000, 65537, 131080)
ROW_SHAPES = ((7,), (1, 5), (0, 4), (3, 0), (2, 0, 3), (2, 3, 65), (130, 17))
GIVEN_SIZES = (0, 1, 2, 7, 33, 65, 128, 257)
_MOST_GIVEN = 1025  # a module's samples may be squares of this width


def samples(record: OpSpec, dtypes: dict[str, str]) -> Iterator[Sample]:
    """Yields about forty small cases of an op for a combination, on the CPU and contiguous; or NoSamples."""
    if is_given(record):
        for size in GIVEN_SIZES:
            yield from given_samples(record, dtypes, size)
    elif record.is_elementwise:
        yield from _elementwise(record, dtypes)
    else:
        yield from _rowwise(record, dtypes)


def is_given(record: OpSpec) -> bool:
    """Whether the op's module gives the calls."""
    return given_calls(record, record.combinations[0][record.inputs[0].name], 4) is not None or bool(
        why_not_derived(record)
    )


def takes_given(record: OpSpec) -> bool:
    """Whether the module's calls replace derived ones: twinop's own ops have these where they can."""
    return bool(why_not_derived(record)) or (record.domain != DOMAIN and is_given(record))


def wide_samples(record: OpSpec, dtypes: dict[str, str]) -> Iterator[Sample]:
    """Yields cases with rows of up to 131,080 columns, for row-wise ops."""
    if record.rows and not takes_given(record):
        for seed, width in enumerate(WIDE):
            yield make_sample(record, dtypes, (4 if width < 5000 else 2, width), seed)


def large_sample(record: OpSpec, dtypes: dict[str, str]) -> Sample:
    """Returns a case for several threads, with a size that no number of threads divides."""
    return make_sample(record, dtypes, (300_017,) if record.is_elementwise else (1009, 114), 5)


def _elementwise(record: OpSpec, dtypes: dict[str, str]) -> Iterator[Sample]:
    for seed, shape in enumerate([(size,) for size in SIZES] + list(SHAPES)):
        yield make_sample(record, dtypes, shape, seed)
    for seed, attributes in enumerate(attribute_variants(record, 1)[1:]):
        for size in (1, 5, 127, 1025):
            yield make_sample(record, dtypes, (size,), seed, attributes)
    if record.broadcasts and len(record.inputs) == 2:
        for seed, pair in enumerate(PAIRS):
            inputs = {
                entry.name: values(shape, torch_dtype(dtypes[entry.name]), seed)
                for entry, shape in zip(record.inputs, pair, strict=True)
            }
            yield Sample(inputs)


def _rowwise(record: OpSpec, dtypes: dict[str, str]) -> Iterator[Sample]:
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
