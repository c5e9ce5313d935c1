"""Convert tensors from and to JSON numbers, strings and booleans."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from .datatypes import BYTES, Datatype, count, shown
from .errors import invalid

_TAKEN: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true and false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "O": ({str}, "strings"),
}
"""What JSON has for a kind of dtype; floats take the rest."""


def from_json(name: str, kind: Datatype, shape: list[Any], data: Any) -> np.ndarray:
    """Return the tensor in `data`, which is flat or nested according to `shape`.

    Raises:
        ServiceError: an element has the wrong type or is out of range, or the number of elements is wrong.
    """
    elements = count(name, shape)
    if not isinstance(data, list):
        raise invalid(f"input {name}: data must be a list, not {shown(data)}")
    if data and isinstance(data[0], list):
        nested = np.array(data, object)  # of lists, if they differ in length
        if nested.shape != tuple(shape):
            raise invalid(f"input {name}: data is nested as {list(nested.shape)}, but its shape is {shape}")
        data = nested.ravel().tolist()
    if len(data) != elements:
        raise invalid(f"input {name}: {len(data)} elements of data, but shape {shape} has {elements}")
    known, what = _TAKEN.get(kind.dtype.kind, ({int, float}, "numbers"))
    if not known.issuperset(map(type, data)):
        at = next(index for index, value in enumerate(data) if type(value) not in known)
        given = orjson.dumps(data[at]).decode()
        raise invalid(f"input {name}: element {at} of data is {given[:100]}; {kind.name} takes {what}")
    if kind.dtype.kind in "iu":
        return integers(name, kind, data).reshape(shape)
    if kind.dtype.kind in "bO":
        return np.array(data, kind.dtype).reshape(shape)
    with np.errstate(over="ignore"):
        array = np.array(data, np.float64).astype(kind.dtype, copy=False)
    if not (finite := np.isfinite(array)).all():
        at = int(np.argmin(finite))
        raise invalid(f"input {name}: element {at} is {shown(data[at])}, beyond the range of {kind.name}")
    return array.reshape(shape)


def integers(name: str, kind: Datatype, values: Sequence[int]) -> np.ndarray:
    """Return whole numbers as a tensor; raise ServiceError if one is out of range."""
    limits = np.iinfo(kind.dtype)
    low, high = int(limits.min), int(limits.max)
    if values and (min(values) < low or max(values) > high):
        at = next(index for index, value in enumerate(values) if not low <= value <= high)
        raise invalid(f"input {name}: element {at} is {values[at]}; {kind.name} has {low} to {high}")
    return np.array(values, kind.dtype)


def to_json(name: str, array: np.ndarray) -> Any:
    """Return the elements in row-major order for orjson, without loss; ServiceError: one is not finite."""
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
