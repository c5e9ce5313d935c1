"""Reads and writes a model of one file without its weights in memory.

Protobuf's fields stand one after another, each with its length: a field is written, or skipped, alone.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from google.protobuf.message import DecodeError

from .weights import LARGE

# The numbers of fields in onnx.proto. A dict holds those of a message in which tensors lie.
_TENSOR: dict[int, Any] = dict.fromkeys((4, 9, 10))  # float_data, raw_data, double_data: as in memory
_GRAPH: dict[int, Any] = {5: _TENSOR}  # initializer
_GRAPH[1] = {5: {5: _TENSOR, 6: _GRAPH}}  # node, its attributes, and what they hold: a tensor, a graph
_MODEL = {7: _GRAPH}
_OF_BYTES, _SIZES = 2, {1: 8, 5: 4}  # wire types: with a length; of a fixed size


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _header(field: int, size: int) -> bytes:
    return _varint(field << 3 | _OF_BYTES) + _varint(size)


def write(
    file: BinaryIO, model: onnx.ModelProto, weights: Mapping[str, tuple[int, Callable[[], Iterable[Any]]]]
) -> None:
    """Writes a model and, as the data of initializers that have none, weights: their bytes, piece by piece.

    Args:
        model: changed: it has no graph afterwards.
        weights: the number of bytes and what yields them, by the name of the initializer.
    """
    parts = list[tuple[bytes, Iterable[Any]]]()
    for tensor in model.graph.initializer:
        size, pieces = weights.get(tensor.name, (0, tuple))
        head = tensor.SerializeToString() + (_header(9, size) if size else b"")
        parts.append((_header(5, len(head) + size) + head, pieces()))
    total = sum(len(head) for head, _ in parts) + sum(weights[name][0] for name in weights)
    del model.graph.initializer[:]
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    file.write(model.SerializeToString() + _header(7, len(graph) + total) + graph)
    for head, data in parts:
        file.write(head)
        for piece in data:
            file.write(piece)


def read(path: Path) -> onnx.ModelProto:
    """Reads a model without its large tensors: these become external data, which lies in this same file.

    Raises:
        DecodeError: the file is not a whole model.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return onnx.ModelProto.FromString(_without_large(data, 0, len(data), _MODEL, path.name))
        except (IndexError, KeyError) as error:
            raise DecodeError("the file ends within a field, or is no protobuf") from error


def view(path: Path) -> Path:
    """Returns a file with the same model that is read without copies: its large weights are external data.

    They lie in the file itself. A model without any is returned as it is.
    """
    model = read(path)
    if model.ByteSize() == path.stat().st_size:
        return path
    other = path.with_name(f"{path.stem}.view{path.suffix}")
    other.write_bytes(model.SerializeToString())
    return other


def _without_large(data: mmap.mmap, at: int, stop: int, fields: Mapping[int, Any], name: str) -> bytes:
    parts = []
    while at < stop:
        start, (key, at) = at, _number(data, at)
        size, begin = _number(data, at) if key & 7 in (0, _OF_BYTES) else (_SIZES[key & 7], at)
        at = begin + (size if key & 7 else 0)
        if at > stop:
            raise IndexError
        if key & 7 != _OF_BYTES or size < LARGE or key >> 3 not in fields:
            parts.append(data[start:at])
        elif (inner := fields[key >> 3]) is not None:
            found = _without_large(data, begin, at, inner, name)
            parts.append(_header(key >> 3, len(found)) + found)
        else:
            external = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
            for entry in (("location", name), ("offset", str(begin)), ("length", str(size))):
                external.external_data.add(key=entry[0], value=entry[1])
            parts.append(external.SerializeToString())
    return b"".join(parts)


def _number(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Reads an integer, of 7 bits in each byte; returns it and where it ends."""
    found, shift = data[at] & 127, 7
    while data[at] > 127:
        at += 1
        found, shift = found | (data[at] & 127) << shift, shift + 7
    return found, at + 1
