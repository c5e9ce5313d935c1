"""The protocol's datatypes: their names, NumPy dtypes and wire formats."""

import math
import reprlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from ..errors import ModelError
from ..tensor_specs import WITHOUT_MAPS, Spec
from .errors import NOT_FOUND, ServiceError, invalid


@dataclass(frozen=True, slots=True)
class Datatype:
    """One row of the table."""

    name: str  # in the Open Inference Protocol, such as "FP32"
    dtype: np.dtype  # BYTES is an object array of str, as ONNX strings are
    contents: str | None  # the field of gRPC's InferTensorContents; None: only raw bytes can carry it


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(dtype), contents)
    for name, dtype, contents in (
        ("BOOL", np.bool_, "bool_contents"),
        ("UINT8", np.uint8, "uint_contents"),
        ("UINT16", np.uint16, "uint_contents"),
        ("UINT32", np.uint32, "uint_contents"),
        ("UINT64", np.uint64, "uint64_contents"),
        ("INT8", np.int8, "int_contents"),
        ("INT16", np.int16, "int_contents"),
        ("INT32", np.int32, "int_contents"),
        ("INT64", np.int64, "int64_contents"),
        ("FP16", np.float16, None),
        ("FP32", np.float32, "fp32_contents"),
        ("FP64", np.float64, "fp64_contents"),
        ("BF16", ml_dtypes.bfloat16, None),
        ("BYTES", np.object_, "bytes_contents"),
    )
}
OF_DTYPE: dict[np.dtype, Datatype] = {each.dtype: each for each in DATATYPES.values()}
NAMES = {each.dtype.name: each.name for each in DATATYPES.values()} | {"str": "BYTES"}
"""The protocol's names of datatypes by numpy's."""
BYTES, BF16 = DATATYPES["BYTES"], DATATYPES["BF16"]

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlist, _short.maxlevel = 8, 3
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 1 << 48  # NumPy cannot index larger tensors, even if another axis makes them empty


def datatype_of(dtype: np.dtype | None) -> str | None:
    """Return "FP32" for float32; None for dtypes that the protocol lacks (complex numbers, 8-bit floats)."""
    found = OF_DTYPE.get(dtype) if dtype is not None else None
    return found.name if found is not None else None


def require_servable(model: str, inputs: Iterable[Spec], outputs: Iterable[Spec], batched: bool) -> None:
    """Raise ModelError if the protocol lacks a type, or a batched model has an input without rows."""
    for kind, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if datatype_of(spec.numpy_dtype) is None:
                cure = "Put a Cast or an operator that makes one tensor of it into the model"
                raise ModelError(
                    f"{model}: {kind} {spec.name} is {spec.type}, which the Open Inference Protocol cannot "
                    f"carry: it has tensors of {', '.join(DATATYPES)}. "
                    f"{WITHOUT_MAPS if 'map(' in spec.type else cure}"
                )
            if batched and not has_rows(spec):
                raise ModelError(
                    f"{model}: {kind} {spec.name} is {spec}, and max_batch_size needs a dynamic first "
                    "dimension: set it to 0, or export the model with a dynamic batch (--dynamic)"
                )


def has_rows(spec: Spec) -> bool:
    """Return whether the first dimension may have any size."""
    return spec.shape is None or (len(spec.shape) > 0 and not isinstance(spec.shape[0], int))


def named(tensor: str, name: Any) -> Datatype:
    """Return the datatype of that name; raise ServiceError if there is none."""
    found = DATATYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise invalid(f"input {tensor}: datatype {shown(name)} is not one of {', '.join(DATATYPES)}")
    return found


def count(tensor: str, shape: Sequence[int]) -> int:
    """Return the number of elements; raise ServiceError if no tensor can have this shape."""
    if len(shape) > _MOST_DIMENSIONS:
        raise invalid(f"input {tensor}: {len(shape)} dimensions; a tensor has up to {_MOST_DIMENSIONS}")
    for size in shape:
        if type(size) is not int or size < 0:
            raise invalid(f"input {tensor}: shape {shown(list(shape))} must be a list of whole numbers >= 0")
    elements = math.prod(shape)
    if elements > _MOST_ELEMENTS or (not elements and math.prod(filter(None, shape)) > _MOST_ELEMENTS):
        raise invalid(f"input {tensor}: shape {shown(list(shape))} is larger than any tensor can be")
    return elements


def from_bytes(tensor: str, kind: Datatype, shape: Sequence[int], data: bytes | memoryview) -> np.ndarray:
    """Return a read-only tensor over `data`, copied only if `data` is not aligned."""
    elements = count(tensor, shape)
    if kind is BYTES:
        return _strings(tensor, elements, data).reshape(shape)
    if len(data) != elements * kind.dtype.itemsize:
        raise invalid(
            f"input {tensor}: {len(data)} bytes of data, but {kind.name} of shape {list(shape)} "
            f"has {elements * kind.dtype.itemsize}"
        )
    if kind.name == "BOOL" and elements and np.frombuffer(data, np.uint8).max() > 1:
        raise invalid(f"input {tensor}: BOOL bytes must be 0 or 1")
    array = np.frombuffer(data, kind.dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()  # vector instructions may fault on unaligned data


def to_bytes(array: np.ndarray) -> Any:
    """Return the inverse of `from_bytes`: a bytes-like object, or the array itself if it is contiguous."""
    if array.dtype != BYTES.dtype:
        array = np.ascontiguousarray(array)
        return array.view(np.uint16) if array.dtype == BF16.dtype else array  # BF16 has no buffer interface
    return serialize_byte_tensor(array).item() if array.size else b""


def text_array(tensor: str, values: Sequence[bytes]) -> np.ndarray:
    """Decode UTF-8 elements; raise ServiceError if one is not UTF-8."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        try:
            array[index] = str(value, "utf-8")
        except UnicodeDecodeError:
            raise invalid(f"input {tensor}: element {index} is not UTF-8, which ONNX's strings are") from None
    return array


def _strings(tensor: str, elements: int, data: bytes | memoryview) -> np.ndarray:
    """Decode BYTES: each element is a 4-byte little-endian length and its bytes."""
    try:
        values = deserialize_bytes_tensor(data)
    except struct.error:
        raise invalid(f"input {tensor}: an element of BYTES goes beyond the {len(data)} bytes") from None
    if len(values) != elements:
        raise invalid(f"input {tensor}: {len(values)} elements of BYTES, but its shape has {elements}")
    return text_array(tensor, values)


def shown(value: Any) -> str:
    """Return a short text for a client's value, however large the value is."""
    return _short.repr(value)


def version_number(model: str, text: str) -> int | None:
    """Return the version that a request names, or None; raise ServiceError if none can have this number."""
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0:
        return int(text)
    raise ServiceError(NOT_FOUND, f"model {model} has no version {shown(text)}: versions are 1, 2, ...")


# -------------------------------------------------------------------------------- JSON


_TAKEN: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true and false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "O": ({str}, "strings"),
}
"""What JSON has for a kind of dtype; floats take the rest."""


def from_json(name: str, kind: Datatype, shape: list[Any], data: Any) -> np.ndarray:
    """Return the tensor in `data`, which is flat or nested according to `shape`."""
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
