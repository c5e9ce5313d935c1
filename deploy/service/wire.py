"""Tensors between protobuf's bytes and numpy, without a Python object for each number.

Protobuf's classes read and write a message in one go, in which no other thread runs: for 30 million INT8 as
typed contents that took up to 0.7 s, and no other client was answered. What is small, rare or damaged is
still left to them. The format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from twinop.deploy.service._kserve import pb
from twinop.deploy.service.request import LARGE

_LARGE_INPUT = 64 << 10
_MOST_FIELDS = 1024  # that are looked at one by one: each takes some 10 us
PIECE = 1 << 16  # numbers, or bytes of them, that are converted without a break for other threads
_LENGTH = 2  # the wire type of strings, messages and packed numbers
_SIZES = {1: 8, 5: 4}  # of the wire types of fixed size
_LONGEST = 10  # bytes of a number
_LONGEST_KEY = 5  # bytes of a field's key
MOST_BYTES = (2 << 30) - 1  # of a message

_CONTENTS = pb.InferTensorContents.DESCRIPTOR
_DTYPES = {
    FieldDescriptor.CPPTYPE_BOOL: np.bool_,
    FieldDescriptor.CPPTYPE_INT32: np.int32,
    FieldDescriptor.CPPTYPE_INT64: np.int64,
    FieldDescriptor.CPPTYPE_UINT32: np.uint32,
    FieldDescriptor.CPPTYPE_UINT64: np.uint64,
    FieldDescriptor.CPPTYPE_FLOAT: np.float32,
    FieldDescriptor.CPPTYPE_DOUBLE: np.float64,
}


@dataclass(slots=True)
class Bulk:
    """What a request holds beside its message.

    Attributes:
        typed: by the input's index: the field of its contents, and the numbers.
        raw: the tensors' bytes.
    """

    typed: dict[int, tuple[str, np.ndarray]] = field(default_factory=dict)
    raw: list[memoryview] = field(default_factory=list)


@dataclass(slots=True)
class InferRequest:
    message: pb.ModelInferRequest
    size: int  # bytes
    bulk: Bulk | None = None

    @property
    def id(self) -> str:
        given: str = self.message.id
        return given


# -------------------------------------------------------------------------------- requests


class _LeftToProtobuf(Exception):
    """It reads what is unusual, and says what is wrong."""


@dataclass(slots=True)
class _Field:
    number: int
    whole: memoryview
    value: memoryview | None  # None unless its wire type has a length


def parse(data: bytes) -> InferRequest:
    """
    Raises:
        DecodeError: it is no message of the protocol.
    """
    if len(data) > LARGE:
        try:
            return _split(memoryview(data))
        except _LeftToProtobuf:
            pass
    return InferRequest(pb.ModelInferRequest.FromString(data), len(data))


def _split(data: memoryview) -> InferRequest:
    rest: list[Any] = []
    bulk, inputs, left = Bulk(), 0, iter(range(_MOST_FIELDS))
    for each in _fields(data, left):
        if each.number == pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER and each.value is not None:
            bulk.raw.append(each.value)
        elif each.number == pb.ModelInferRequest.INPUTS_FIELD_NUMBER and each.value is not None:
            tensor = each.value
            if len(tensor) > _LARGE_INPUT and (found := _typed(tensor, left)) is not None:
                tensor, bulk.typed[inputs] = found
            rest += prefixed(each.number, tensor)
            inputs += 1
        else:
            rest.append(each.whole)
    return InferRequest(pb.ModelInferRequest.FromString(b"".join(rest)), len(data), bulk)


def _typed(tensor: memoryview, left: Iterator[int]) -> tuple[memoryview, tuple[str, np.ndarray]] | None:
    """The tensor without its contents, and these; None where they are not packed numbers of one field."""
    rest: list[memoryview] = []
    packed: list[_Field] = []
    for each in _fields(tensor, left):
        is_contents = each.number == pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
        if is_contents and each.value is not None:
            packed += _fields(each.value, left)
        else:
            rest.append(each.whole)
    fields = {each.number for each in packed}
    kind = _CONTENTS.fields_by_number.get(fields.pop()) if len(fields) == 1 else None
    if kind is None or kind.cpp_type not in _DTYPES:
        return None
    parts = [_numbers(each.value, np.dtype(_DTYPES[kind.cpp_type])) for each in packed]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return (memoryview(b"".join(rest)), (kind.name, numbers)) if numbers.size else None


def _fields(data: memoryview, left: Iterator[int]) -> Iterator[_Field]:
    """`left` has an item for each field that may still be looked at, of the whole message."""
    at = 0
    while at < len(data):
        start, value = at, None
        key, at = _varint(data, at)
        if next(left, None) is None or at - start > _LONGEST_KEY:
            raise _LeftToProtobuf
        if key & 7 == _LENGTH:
            size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
        elif key & 7 == 0:
            _, at = _varint(data, at)
        else:
            at += _SIZES.get(key & 7, len(data))  # groups are of another time
        if at > len(data):
            raise _LeftToProtobuf
        yield _Field(key >> 3, data[start:at], value)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    number = 0
    for index, byte in enumerate(data[at : at + _LONGEST]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise _LeftToProtobuf


def _numbers(data: memoryview | None, dtype: np.dtype) -> np.ndarray:
    if data is None or (dtype.kind == "f" and len(data) % dtype.itemsize):
        raise _LeftToProtobuf
    return np.frombuffer(data, dtype) if dtype.kind == "f" else _varints(np.frombuffer(data, np.uint8), dtype)


def _varints(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    is_last = data < 0x80
    array = np.empty(np.count_nonzero(is_last), dtype)
    start = done = 0
    while start < data.size:
        ends = np.flatnonzero(is_last[start : start + PIECE]) + start
        if not ends.size:
            raise _LeftToProtobuf
        starts = np.concatenate(([start], ends[:-1] + 1))
        lengths = ends - starts + 1
        if (longest := int(lengths.max())) > _LONGEST:
            raise _LeftToProtobuf
        values = data[starts].astype(np.uint64) & 0x7F
        for digit in range(1, longest):
            has = np.flatnonzero(lengths > digit)
            values[has] |= (data[starts[has] + digit].astype(np.uint64) & 0x7F) << np.uint64(7 * digit)
        array[done : done + ends.size] = values.astype(dtype)  # bits beyond it are dropped, as by protobuf
        start, done = int(ends[-1]) + 1, done + ends.size
    return array


# -------------------------------------------------------------------------------- answers


def prefixed(number: int, *parts: Any) -> list[Any]:
    """A field of some length: what stands before its value, and the value's parts."""
    return [bytes([*_digits(number << 3 | _LENGTH), *_digits(size_of(parts))]), *parts]


def size_of(parts: Sequence[Any]) -> int:
    """In bytes, of arrays and bytes."""
    return sum(memoryview(part).nbytes for part in parts)


def contents(name: str, array: np.ndarray) -> list[Any]:
    """The numbers of `array` in that field of InferTensorContents."""
    kind = _CONTENTS.fields_by_name[name]
    flat: np.ndarray = array.ravel().astype(_DTYPES[kind.cpp_type], copy=False)
    parts = [flat] if flat.dtype.kind in "fb" else _packed(flat)
    return prefixed(kind.number, *parts)


def _packed(flat: np.ndarray) -> list[bytes]:
    """Whole numbers, seven bits a byte, the lowest first; negative ones as their 64 bits."""
    parts, size, shifts = [], 0, np.arange(0, 7 * _LONGEST, 7, dtype=np.uint64)
    for start in range(0, flat.size, PIECE):
        if size > MOST_BYTES:
            break  # it will be refused
        values = flat[start : start + PIECE].astype(np.uint64)[:, None]
        width = int(np.count_nonzero(values.max() >> shifts)) or 1
        digits = values >> shifts[:width]
        is_used = digits != 0
        is_used[:, 0] = True
        more = np.zeros_like(is_used)
        more[:, :-1] = is_used[:, 1:]
        parts.append((digits & 0x7F | more * np.uint64(0x80)).astype(np.uint8)[is_used].tobytes())
        size += len(parts[-1])
    return parts


def _digits(number: int) -> Iterator[int]:
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number
