"""Decode and encode gRPC messages of the Open Inference Protocol, with typed or raw tensors."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .codec_rest import deadline, refuse_extensions
from .datatypes import (
    BYTES,
    OF_DTYPE,
    Datatype,
    count,
    from_bytes,
    named,
    text_array,
    to_bytes,
    version_number,
)
from .errors import TOO_LARGE, ServiceError, invalid
from .protocol import pb
from .request import MOST_TENSORS, Request, Result, check_count
from .wire import MOST_BYTES, prefixed

_PIECE = 1 << 16  # numbers that are converted at once; other threads run between the pieces


@dataclass(slots=True)
class Form:
    """The form of the answer: the client's id ("" for none), and whether its tensors are raw."""

    id: str
    raw: bool


def decode(
    message: pb.ModelInferRequest,
    seconds: float | None,
    most: int = MOST_TENSORS,
    raw: Sequence[bytes | memoryview] | None = None,
) -> tuple[Request, Form]:
    """Decode a request without checking it against the model.

    Args:
        seconds: the time left until the call's deadline; None for no deadline.
        most: the largest number of inputs, and of outputs.
        raw: the raw tensors, if they are not in `message`.

    Raises:
        ServiceError: the message contradicts itself.
    """
    arrived = time.monotonic()
    check_count("inputs", len(message.inputs), most)
    check_count("outputs", len(message.outputs), most)
    raw = message.raw_input_contents if raw is None else raw
    if raw and len(raw) != len(message.inputs):
        raise invalid(
            f"{len(message.inputs)} inputs, but {len(raw)} raw_input_contents: "
            "every input needs one, in the same order"
        )
    inputs: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        if name in inputs:
            raise invalid(f"input {name} is given twice")
        kind, shape = named(name, tensor.datatype), list(tensor.shape)
        if not raw:
            refuse_extensions(f"input {name}", _parameters(tensor.parameters))
            field, values = _contents(tensor.contents, kind)
            inputs[name] = _typed(name, kind, shape, field, values)
        elif tensor.HasField("contents"):
            raise invalid(f"input {name} has contents besides raw_input_contents: send one of them")
        else:
            inputs[name] = from_bytes(name, kind, shape, raw[index])
    parameters = _parameters(message.parameters) if message.parameters else {}
    until = deadline(parameters.get("timeout"), arrived)
    if seconds is not None:
        until = min(until or math.inf, arrived + seconds)
    return Request(
        model=message.model_name,
        inputs=inputs,
        outputs=_outputs(message),
        version=version_number(message.model_name, message.model_version),
        id=message.id,
        deadline=until,
        arrived=arrived,
    ), Form(message.id, bool(raw))


def encode(result: Result, form: Form) -> bytes:
    """Return a serialized ModelInferResponse.

    It is raw if the request was raw, or if a datatype has no typed field (FP16, BF16).

    Raises:
        ServiceError: the answer exceeds the size of a protobuf message.
    """
    answer = pb.ModelInferResponse(model_name=result.model, model_version=str(result.version), id=form.id)
    kinds = [OF_DTYPE[array.dtype] for array in result.outputs.values()]
    is_raw = form.raw or any(kind.contents is None for kind in kinds)
    if sum(array.nbytes for array in result.outputs.values()) > MOST_BYTES:
        raise _too_large()
    raw: list[Any] = []
    for (name, array), kind in zip(result.outputs.items(), kinds, strict=True):
        tensor = answer.outputs.add(name=name, datatype=kind.name, shape=array.shape)
        if is_raw:
            raw += prefixed(answer.RAW_OUTPUT_CONTENTS_FIELD_NUMBER, to_bytes(array))
        else:
            _add(getattr(tensor.contents, kind.contents or ""), array.ravel())
    parts = [answer.SerializeToString(), *raw]
    if sum(memoryview(part).nbytes for part in parts) > MOST_BYTES:  # a number takes up to ten bytes
        raise _too_large()
    return b"".join(parts)


def _add(field: Any, flat: np.ndarray) -> None:
    for start in range(0, flat.size, _PIECE):
        values = flat[start : start + _PIECE].tolist()
        field.extend([each.encode() if isinstance(each, str) else each for each in values])


def _too_large() -> ServiceError:
    return ServiceError(
        TOO_LARGE,
        "the outputs are larger than the 2 GiB that a gRPC message can have: ask for fewer of them, or over "
        "HTTP as binary data",
    )


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return plain values; None for types that KServe's message lacks."""
    found = {key: (value.WhichOneof("parameter_choice"), value) for key, value in given.items()}
    return {key: getattr(value, kind) if kind else None for key, (kind, value) in found.items()}


def _outputs(message: pb.ModelInferRequest) -> tuple[str, ...] | None:
    names: dict[str, None] = {}
    for output in message.outputs:
        if output.name in names:
            raise invalid(f"output {output.name} is asked for twice")
        if output.parameters:
            refuse_extensions(f"output {output.name}", _parameters(output.parameters))
        names[output.name] = None
    return tuple(names) or None


def _contents(given: pb.InferTensorContents, kind: Datatype) -> tuple[str, Sequence[Any]]:
    """Return the name and values of a field that is set, preferably of a field that `kind` does not use."""
    fields = sorted(given.ListFields(), key=lambda each: each[0].name == kind.contents)
    return (fields[0][0].name, fields[0][1]) if fields else (kind.contents or "", ())


def _typed(name: str, kind: Datatype, shape: list[int], field: str, values: Any) -> np.ndarray:
    elements = count(name, shape)
    if kind.contents is None:
        raise invalid(f"input {name}: {kind.name} has no typed contents: send raw_input_contents")
    if field != kind.contents:
        raise invalid(f"input {name}: {kind.name} is sent in {kind.contents}, not in {field}")
    if len(values) != elements:
        raise invalid(f"input {name}: {len(values)} elements in contents, but shape {shape} has {elements}")
    if kind is BYTES:
        return text_array(name, values).reshape(shape)
    if kind.dtype.itemsize < 4 and kind.dtype.kind in "iu":  # sent in 32-bit fields
        limits, wide = np.iinfo(kind.dtype), _numbers(values, np.dtype(np.int64))
        if elements and (wide.min() < limits.min or wide.max() > limits.max):
            at = int(np.argmax((wide < limits.min) | (wide > limits.max)))
            raise invalid(
                f"input {name}: element {at} is {wide[at]}; {kind.name} has {limits.min} to {limits.max}"
            )
        return wide.astype(kind.dtype).reshape(shape)
    return _numbers(values, kind.dtype).reshape(shape)


def _numbers(values: Sequence[Any], dtype: np.dtype) -> np.ndarray:
    """Return the values as an array, converted in pieces so that other threads can run."""
    array = np.empty(len(values), dtype)
    for start in range(0, len(values), _PIECE):
        array[start : start + _PIECE] = values[start : start + _PIECE]
    return array
