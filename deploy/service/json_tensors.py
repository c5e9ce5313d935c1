"""Convert tensors from and to JSON numbers, strings and booleans."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from .datatypes import BYTES, Datatype, count, shown
from .errors import invalid


def from_json(name: str, kind: Datatype, shape: list[Any], data: Any) -> np.ndarray:
    """Return the tensor in `data`, which is flat or nested according to `shape`.

    Raises:
        ServiceError: an element has the wrong type or is out of range, or the number of elements is wrong.
    """
    elements = count(name, shape)
    values = _flat(name, data, shape, elements)
    types = set(map(type, values))
    if kind is BYTES:
        _require(name, kind, values, types, {str}, "strings")
        array = np.empty(elements, object)
        array[:] = values
    elif kind.name == "BOOL":
        _require(name, kind, values, types, {bool}, "true and false")
        array = np.array(values, np.bool_)
    elif kind.dtype.kind in "iu":
        _require(name, kind, values, types, {int}, "whole numbers")
        array = integers(name, kind, values)
    else:
        _require(name, kind, values, types, {int, float}, "numbers")
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64).astype(kind.dtype, copy=False)
        if not (finite := np.isfinite(array)).all():
            at = int(np.argmin(finite))
            raise invalid(
                f"input {name}: element {at} is {shown(values[at])}, beyond the range of {kind.name}"
            )
    return array.reshape(shape)


def _flat(name: str, data: Any, shape: list[int], elements: int) -> list[Any]:
    """Return the elements of `data`, which is flat or nested according to `shape`."""
    if not isinstance(data, list):
        raise invalid(f"input {name}: data must be a list, not {shown(data)}")
    if not data or type(data[0]) is not list:
        if len(data) != elements:
            raise invalid(f"input {name}: {len(data)} elements of data, but shape {shape} has {elements}")
        return data
    level = [data]
    for axis, size in enumerate(shape):
        for each in level:
            if type(each) is not list or len(each) != size:
                found = f"a list of {len(each)}" if type(each) is list else shown(each)
                raise invalid(
                    f"input {name}: data is not nested as shape {shape} says: "
                    f"on axis {axis} there is {found}, not a list of {size}"
                )
        level = list(chain.from_iterable(level))
    return level


def _require(
    name: str, kind: Datatype, values: list[Any], types: set[type], known: set[type], what: str
) -> None:
    if not types <= known:
        at = next(index for index, value in enumerate(values) if type(value) not in known)
        given = orjson.dumps(values[at]).decode()
        raise invalid(f"input {name}: element {at} of data is {given[:100]}; {kind.name} takes {what}")


def integers(name: str, kind: Datatype, values: Sequence[int]) -> np.ndarray:
    """Return whole numbers as a tensor.

    Raises:
        ServiceError: one is out of range.
    """
    limits = np.iinfo(kind.dtype)
    low, high = int(limits.min), int(limits.max)
    if values and (min(values) < low or max(values) > high):
        at = next(index for index, value in enumerate(values) if not low <= value <= high)
        raise invalid(f"input {name}: element {at} is {values[at]}; {kind.name} has {low} to {high}")
    return np.array(values, kind.dtype)


def to_json(name: str, array: np.ndarray) -> Any:
    """Return the elements in row-major order for orjson, which writes floats without loss.

    Raises:
        ServiceError: a number is not finite, which JSON cannot express.
    """
    if array.dtype == BYTES.dtype:
        return array.ravel().tolist()
    if array.dtype.kind not in "iub":
        if array.dtype.itemsize == 2:
            with np.errstate(invalid="ignore"):  # signalling NaNs
                array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise invalid(
                f"output {name} holds NaN or infinity, which JSON cannot express: ask for it with "
                '"parameters": {"binary_data": true}'
            )
    return np.ascontiguousarray(array).reshape(math.prod(array.shape))
