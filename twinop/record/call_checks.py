"""Checks a call as `kernels/record/check.cpp` does, where no kernel runs: fakes, export, models."""

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ..errors import RecordError
from .op_spec import OpSpec
from .shapes import Shapes, broadcast, evaluate, output_shapes, too_few_dimensions

_BOUNDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def describe(record: OpSpec, dtypes: Mapping[str, str], shapes: Shapes) -> str:
    """Returns the call as error messages show it: `custom_domain::relu(x: float32[2, 3])`."""

    def tensor(name: str) -> str:
        shape = shapes.get(name)
        return "absent" if shape is None else f"{dtypes[name]}{_sizes(shape)}"

    arguments = ", ".join(f"{entry.name}: {tensor(entry.name)}" for entry in record.inputs)
    return f"{record.qualified_name}({arguments})"


def check_attributes(record: OpSpec, attributes: Mapping[str, Any]) -> None:
    """Checks attributes against their choices and the limits that need no shape.

    RecordError: one does not fit: "attribute eps is -1.0, expected a finite number >= 0". The caller adds the
    op.
    """
    for entry in record.attributes:
        name, value = entry.name, attributes.get(entry.name)
        if not isinstance(value, str if entry.kind == "str" else int | float):  # omitted or symbolic
            continue
        if value not in record.choices.get(name, (value,)):
            choices = " | ".join(map(str, record.choices[name]))
            raise RecordError(f"attribute {name} is {value!r}, expected one of {choices}")
        whole = entry.kind == "int"
        limits = [(word, limit) for each, word, limit in record.limits if each == name and word in _BOUNDS]
        if not all(_is_within(word, value, limit, whole) for word, limit in limits):
            texts = (f"{word} {limit}" if whole else f"{word} {limit:g}" for word, limit in limits)
            bounds = sorted(texts, reverse=True)
            shown, kind = (str(value), "") if whole else (f"{value:g}", "finite ")
            raise RecordError(  # ">" comes before "<"
                f"attribute {name} is {shown}, expected a {kind}number {' and '.join(bounds)}"
            )


def _is_within(word: str, value: Any, bound: int | float, whole: bool) -> bool:
    """Whether a number is finite and within a bound. Bounds of floats are fp32, as attributes are."""
    if whole:
        return bool(_BOUNDS[word](value, bound))
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return bool(np.isfinite(narrow) and _BOUNDS[word](narrow, np.float32(bound)))


def check_shapes(record: OpSpec, shapes: Shapes, attributes: Mapping[str, Any]) -> None:
    """Checks the shapes that the record requires, and attributes that are dimensions of an input.

    `shapes` has the shape of every input, None where it is absent; one left out is not known. Sizes that are
    not numbers are not compared: the kernel compares them when it is called. RecordError: a shape or an
    attribute does not fit: "weight has shape [5], expected x[axis:] = [8]". The caller adds the op.
    """
    _check_elementwise(record, shapes)
    for name, word, source in record.limits:
        if word != "of" or (shape := shapes.get(source)) is None:
            continue
        if not isinstance(value := attributes[name], int):
            continue
        rank = max(len(shape), 1)  # as in torch, a scalar has the dimensions 0 and -1
        if not -rank <= value < rank:
            raise RecordError(
                f"attribute {name} is {value}, expected a dimension of {source}: {-rank} to {rank - 1}"
            )
    for name, required in record.input_shapes.items():
        if (shape := shapes.get(name)) is None:
            continue
        try:
            expected = evaluate(record, required, shapes, attributes)
        except RecordError:
            if set(shapes) != {entry.name for entry in record.inputs}:
                continue  # it depends on a shape that is not known
            if too_few := too_few_dimensions(record, shapes):
                raise RecordError(too_few) from None
            raise
        if not _may_be_equal(shape, expected):
            raise RecordError(
                too_few_dimensions(record, shapes)
                or f"{name} has shape {_sizes(shape)}, expected {required.text} = {_sizes(expected)}"
            )


def infer_shapes(record: OpSpec, shapes: Shapes, attributes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Returns what `output_shapes` does; RecordError: also for an input with too few dimensions."""
    try:
        return output_shapes(record, shapes, attributes)
    except RecordError as error:
        raise RecordError(too_few_dimensions(record, shapes) or str(error)) from error


def _check_elementwise(record: OpSpec, shapes: Shapes) -> None:
    given = {name: shape for name, shape in shapes.items() if shape is not None}
    if not record.is_elementwise or not given:
        return
    described = ", ".join(f"{name} has {_sizes(shape)}" for name, shape in given.items())
    if record.broadcasts:
        try:
            reduce(broadcast, given.values())
        except ValueError as error:
            raise RecordError(
                f"the inputs' shapes do not broadcast: {described}; from the last dimension on, sizes must "
                "be equal or 1"
            ) from error
        return
    first, *others = given.values()
    if not all(_may_be_equal(first, other) for other in others):
        raise RecordError(f"the inputs must have one shape: {described}")


def _may_be_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether shapes have one rank and are equal where both sizes are numbers."""
    return len(a) == len(b) and not any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True)
    )


def _sizes(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"
