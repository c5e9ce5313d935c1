"""Decode and encode gRPC messages of the Open Inference Protocol, with typed or raw tensors."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb  # a superset of KServe's

from .codec_rest import deadline, refuse_extensions
from .datatypes import (
    BYTES,
    OF_DTYPE,
    Datatype,
    count,
    from_bytes,
    integers,
    named,
    text_array,
    to_bytes,
    version_number,
)
from .errors import TOO_LARGE, ServiceError, invalid
from .request import MOST_TENSORS, Request, Result, check_names

SERVICE = "inference.GRPCInferenceService"
MOST_TYPED_BYTES = 1 << 20  # of a message without its raw tensors: protobuf reads the rest number by number
MOST_BYTES = (2 << 30) - (1 << 20)  # a message has less than 2 GiB; the margin is for names and shapes
_RAW_KEY = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2  # a field with a length


def parse(data: bytes) -> pb.ModelInferRequest:
    """Parse a request. Large tensors must be raw: typed ones take many times their size, and long."""
    raw = at = 0
    while len(data) > MOST_TYPED_BYTES and at < len(data) and at - raw <= MOST_TYPED_BYTES:
        key, start = _varint(data, at)
        size, start = _varint(data, start)
        if key & 7 != 2:  # a number, which no top-level field of the protocol is
            break
        raw += size if key == _RAW_KEY else 0
        at = start + size
    if len(data) - raw > MOST_TYPED_BYTES:
        raise ServiceError(
            TOO_LARGE,
            f"the message has {len(data)} bytes, more than {MOST_TYPED_BYTES} of them outside of "
            "raw_input_contents: send raw_input_contents",
        )
    return pb.ModelInferRequest.FromString(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the key or length that protobuf encodes at `at`, and where it ends."""
    size = shift = 0
    for at in range(at, min(at + 5, len(data))):  # noqa: B020 (the last one is the result)
        size |= (data[at] & 0x7F) << shift
        shift += 7
        if data[at] < 0x80:
            break
    return size, at + 1


def decode(message: pb.ModelInferRequest, seconds: float | None, most: int = MOST_TENSORS) -> Request:
    """Decode a request without checking it against the model. It has `seconds` left and `most` tensors."""
    arrived = time.monotonic()
    outputs = tuple(output.name for output in message.outputs)
    check_names("input", [tensor.name for tensor in message.inputs], most)
    check_names("output", outputs, most)
    for output in message.outputs:
        if output.parameters:
            refuse_extensions(f"output {output.name}", _parameters(output.parameters))
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise invalid(
            f"{len(message.inputs)} inputs, but {len(raw)} raw_input_contents: every input needs one, in the "
            "same order"
        )
    rest = iter(raw)
    inputs: dict[str, np.ndarray] = {}
    for tensor in message.inputs:
        name = tensor.name
        kind, shape = named(name, tensor.datatype), list(tensor.shape)
        if tensor.parameters:
            refuse_extensions(f"input {name}", _parameters(tensor.parameters))
        if not raw:
            inputs[name] = _typed(name, kind, shape, tensor.contents)
        elif tensor.HasField("contents"):
            raise invalid(f"input {name} has contents besides raw_input_contents: send one of them")
        else:
            inputs[name] = from_bytes(name, kind, shape, next(rest))
    parameters = _parameters(message.parameters) if message.parameters else {}
    until = deadline(parameters.get("timeout"), arrived)
    if seconds is not None:
        until = min(until or math.inf, arrived + seconds)
    return Request(
        model=message.model_name,
        inputs=inputs,
        outputs=outputs or None,
        version=version_number(message.model_name, message.model_version),
        id=message.id,
        deadline=until,
        arrived=arrived,
    )


def encode(result: Result, request: pb.ModelInferRequest) -> bytes:
    """Return a serialized ModelInferResponse: raw as the request was, or if a datatype has no typed field."""
    answer = pb.ModelInferResponse(model_name=result.model, model_version=str(result.version), id=request.id)
    kinds = [OF_DTYPE[array.dtype] for array in result.outputs.values()]
    is_raw = bool(request.raw_input_contents) or any(kind.contents is None for kind in kinds)
    size = sum(array.nbytes for array in result.outputs.values())
    if size > MOST_BYTES:
        raise ServiceError(
            TOO_LARGE,
            "the outputs are larger than the 2 GiB that a gRPC message can have: ask for fewer of them, or "
            "over HTTP as binary data",
        )
    if size > MOST_TYPED_BYTES and not is_raw:
        raise ServiceError(
            TOO_LARGE,
            f"the outputs have more than {MOST_TYPED_BYTES} bytes, the limit for typed contents: send "
            "raw_input_contents, and the answer has raw_output_contents",
        )
    for (name, array), kind in zip(result.outputs.items(), kinds, strict=True):
        tensor = answer.outputs.add(name=name, datatype=kind.name, shape=array.shape)
        if is_raw:
            answer.raw_output_contents.append(memoryview(to_bytes(array)).tobytes())
        else:
            values = array.ravel().tolist()
            if kind is BYTES:
                values = [text.encode() if isinstance(text, str) else text for text in values]
            getattr(tensor.contents, kind.contents or "").extend(values)
    data: bytes = answer.SerializeToString()
    return data


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return plain values; None for a parameter without a value."""
    found = {key: (value.WhichOneof("parameter_choice"), value) for key, value in given.items()}
    return {key: getattr(value, kind) if kind else None for key, (kind, value) in found.items()}


def _typed(name: str, kind: Datatype, shape: list[int], contents: pb.InferTensorContents) -> np.ndarray:
    elements = count(name, shape)
    if kind.contents is None:
        raise invalid(f"input {name}: {kind.name} has no typed contents: send raw_input_contents")
    if others := [field.name for field, _ in contents.ListFields() if field.name != kind.contents]:
        raise invalid(f"input {name}: {', '.join(others)} are set; {kind.name} has {kind.contents} alone")
    values = getattr(contents, kind.contents)
    if len(values) != elements:
        raise invalid(
            f"input {name}: {len(values)} elements in {kind.contents}, but shape {shape} has {elements}"
        )
    if kind is BYTES:
        return text_array(name, values).reshape(shape)
    if kind.dtype.itemsize < 4 and kind.dtype.kind in "iu":  # sent in 32-bit fields
        return integers(name, kind, values).reshape(shape)
    return np.array(values, kind.dtype).reshape(shape)
