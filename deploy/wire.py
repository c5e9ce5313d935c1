"""Reads and writes a model of one file without its weights in memory.

Protobuf's fields stand one after another, each with its length: a field is written, or skipped, alone.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from twinop.system.regular_file import open_regular

LARGE = 1 << 20
"""The bytes from which a tensor stays in its file."""

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

    `weights` has the number of bytes and what yields them, by initializer. The model has no graph afterwards.
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

    OSError: the file cannot be read. DecodeError: it is not a whole model.
    """
    return onnx.ModelProto.FromString(without_weights(path, path.name))


def without_weights(path: Path, location: str = "", most: int = 1 << 62) -> bytes:
    """Returns the bytes of a model without those of its large tensors; of what is no model, all of them.

    The tensors become external data in the file `location`; without one they have no data. OSError: the file
    has more than `most` bytes.
    """
    with open_regular(path, most) as file:
        try:
            return _without_large(file, os.fstat(file.fileno()).st_size, _MODEL, location)
        except (IndexError, KeyError):  # it ends within a field, or is no protobuf
            file.seek(0)
            return file.read()


def view(path: Path) -> Path:
    """Returns a file with the same model, whose large weights are external data in the file itself."""
    model = without_weights(path, path.name)
    if len(model) == path.stat().st_size:
        return path
    other = path.with_name(f"{path.stem}.view{path.suffix}")
    other.write_bytes(model)
    return other


def _without_large(file: BinaryIO, stop: int, fields: Mapping[int, Any], location: str) -> bytes:
    parts = []
    while file.tell() < stop:
        kind, field = (key := _number(file)) & 7, key >> 3
        if kind == 0:
            parts.append(_varint(key) + _varint(_number(file)))
            continue
        size = _number(file) if kind == _OF_BYTES else _SIZES[kind]
        if (end := file.tell() + size) > stop:
            raise IndexError
        if kind != _OF_BYTES or size < LARGE or field not in fields:
            parts.append((_header(field, size) if kind == _OF_BYTES else _varint(key)) + file.read(size))
        elif (inner := fields[field]) is not None:
            found = _without_large(file, end, inner, location)
            parts.append(_header(field, len(found)) + found)
        else:
            external = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
            for entry in (("location", location), ("offset", str(file.tell())), ("length", str(size))):
                external.external_data.add(key=entry[0], value=entry[1])
            parts.append(external.SerializeToString() if location else b"")
            file.seek(end)
    return b"".join(parts)


def _number(file: BinaryIO) -> int:
    """Reads an integer, of 7 bits in each byte."""
    found = shift = 0
    while (byte := file.read(1)[0]) > 127:
        found, shift = found | (byte & 127) << shift, shift + 7
    return found | byte << shift
