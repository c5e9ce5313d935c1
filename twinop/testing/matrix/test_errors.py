"""What does not fit the op's record is refused with a message, never computed."""

import re
from typing import Any

import pytest

from twinop.errors import RecordError
from twinop.record.call_checks import check_shapes
from twinop.record.op_spec import OpSpec

from ..messages import fail
from ..samples import Sample, call, called, make_sample, torch_dtype


def refused(record: OpSpec, sample: Sample, expected: str) -> None:
    """The op refuses the call with a message that has these words."""
    try:
        call(record, sample)
    except (RecordError, RuntimeError) as error:
        if not re.search(expected, str(error)):
            fail(
                f"{called(record, sample)}: refused with {str(error)!r}; expected a message with {expected!r}"
            )
    else:
        fail(f"{called(record, sample)} {sample.attributes}: not refused; expected {expected!r}")


def good(record: OpSpec, device: str) -> Sample:
    return make_sample(record, record.combinations[0], (3, 4), tame=True).to(device, record.host_inputs)


def test_wrong_dtypes(record: OpSpec, device: str) -> None:
    taken = {combination[record.inputs[0].name] for combination in record.combinations}
    for dtype in {"int64", "bool", "complex64"} - taken:
        sample = good(record, device).map(lambda t: t.to(torch_dtype(dtype)))  # noqa: B023
        refused(record, sample, "no kernel takes these dtypes")


def test_tensors_on_two_devices(record: OpSpec, device: str) -> None:
    sample = good(record, device)
    inputs = [name for name in sample.inputs if name not in record.host_inputs]
    if len(inputs) < 2:
        pytest.skip("takes one tensor")
    sample.inputs[inputs[-1]] = sample.inputs[inputs[-1]].to("meta")
    refused(record, sample, "all tensors must be on one device")


def test_wrong_shapes(record: OpSpec, device: str) -> None:
    """Every size that the record refuses, the op refuses too."""
    attributes = {entry.name: entry.default for entry in record.attributes}
    tried = 0
    for entry in record.inputs[1:]:
        sample = good(record, device)
        given = sample.inputs[entry.name]
        for dim in range(0 if given is None else given.dim()):
            sizes = list(given.shape)
            sizes[dim] += 2
            shapes = {name: list(t.shape) for name, t in sample.tensors().items()} | {entry.name: sizes}
            try:
                check_shapes(record, shapes, attributes | sample.attributes)
            except RecordError as error:
                wrong = sample.inputs | {entry.name: given.new_ones(sizes)}
                refused(record, Sample(wrong, sample.attributes), re.escape(str(error)))
                tried += 1
    if not tried:
        pytest.skip("the record limits no shape (input_shapes)")


def test_wrong_attributes(record: OpSpec, device: str) -> None:
    """Values outside the choices and limits of the record."""
    wrong: list[tuple[str, Any]] = [
        (name, "no such choice" if isinstance(choices[0], str) else -77)
        for name, choices in record.choices.items()
    ]
    beyond = {">=": -1, ">": 0, "<": 0, "<=": 1}
    for name, word, limit in record.limits:
        kind = float if getattr(record.attribute(name), "kind", "") == "float" else int
        if word != "in":
            wrong.append((name, kind(limit) + beyond[word] if word in beyond else 9))
    if not wrong:
        pytest.skip("the record limits no attribute (choices, limits)")
    for name, value in wrong:
        sample = good(record, device)
        refused(record, Sample(sample.inputs, sample.attributes | {name: value}), f"attribute {name} is ")
