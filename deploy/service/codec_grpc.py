"""gRPC of the Open Inference Protocol: KServe's messages, with typed or raw tensors."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinop.deploy.service._kserve import pb
from twinop.deploy.service.codec_rest import deadline, refuse_extensions
from twinop.deploy.service.datatypes import (
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
from twinop.deploy.service.errors import invalid
from twinop.deploy.service.request import MOST_TENSORS, Request, Result, check_count

_PIECE = 1 << 16  # elements that are converted without a break for other threads


@dataclass(slots=True)
class Form:
    """What the answer has to look like: the client's id ("" for none), tensors raw or typed."""

    id: str
    raw: bool


def decode(
    message: pb.ModelInferRequest, seconds: float | None, most: int = MOST_TENSORS
) -> tuple[Request, Form]:
    """`seconds` is what the call's deadline leaves, None for no deadline; `most` are the inputs, or outputs.

    Raises:
        ServiceError: the message contradicts itself; what it holds is held against the model later.
    """
    arrived = time.monotonic()
    check_count("inputs", len(message.inputs), most)
    check_count("outputs", len(message.outputs), most)
    raw = len(message.raw_input_contents) > 0
    if raw and len(message.raw_input_contents) != len(message.inputs):
        raise invalid(
            f"{len(message.inputs)} inputs, but {len(message.raw_input_contents)} raw_input_contents: "
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
            inputs[name] = _typed(name, kind, shape, tensor.contents)
        elif tensor.HasField("contents"):
            raise invalid(f"input {name} has contents besides raw_input_contents: send one of them")
        else:
            inputs[name] = from_bytes(name, kind, shape, message.raw_input_contents[index])
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
    ), Form(message.id, raw)


def encode(result: Result, form: Form) -> pb.ModelInferResponse:
    """Raw where the request was raw, or where a type has no typed field (FP16, BF16)."""
    answer = pb.ModelInferResponse(model_name=result.model, model_version=str(result.version), id=form.id)
    kinds = [OF_DTYPE[array.dtype] for array in result.outputs.values()]
    raw = form.raw or any(kind.contents is None for kind in kinds)
    for (name, array), kind in zip(result.outputs.items(), kinds, strict=True):
        tensor = answer.outputs.add(name=name, datatype=kind.name, shape=array.shape)
        if raw:
            data = to_bytes(array)
            answer.raw_output_contents.append(data if isinstance(data, bytes) else data.tobytes())
        else:
            contents, flat = getattr(tensor.contents, kind.contents or ""), array.ravel()
            for start in range(0, flat.size, _PIECE):
                values: list[Any] = flat[start : start + _PIECE].tolist()
                if kind is BYTES:
                    values = [each.encode() if isinstance(each, str) else each for each in values]
                contents.extend(values)
    return answer


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Plain values; None for a kind that KServe's message does not know."""
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


def _typed(name: str, kind: Datatype, shape: list[int], contents: pb.InferTensorContents) -> np.ndarray:
    elements = count(name, shape)
    if kind.contents is None:
        raise invalid(f"input {name}: {kind.name} has no typed contents: send raw_input_contents")
    for field, _ in contents.ListFields():
        if field.name != kind.contents:
            raise invalid(f"input {name}: {kind.name} is sent in {kind.contents}, not in {field.name}")
    values = getattr(contents, kind.contents)
    if len(values) != elements:
        raise invalid(f"input {name}: {len(values)} elements in contents, but shape {shape} has {elements}")
    if kind is BYTES:
        return text_array(name, values).reshape(shape)
    if kind.dtype.itemsize < 4 and kind.dtype.kind in "iu":  # sent in fields of 32 bits
        limits, wide = np.iinfo(kind.dtype), _numbers(values, np.dtype(np.int64))
        if elements and (wide.min() < limits.min or wide.max() > limits.max):
            at = int(np.argmax((wide < limits.min) | (wide > limits.max)))
            raise invalid(
                f"input {name}: element {at} is {wide[at]}; {kind.name} has {limits.min} to {limits.max}"
            )
        return wide.astype(kind.dtype).reshape(shape)
    return _numbers(values, kind.dtype).reshape(shape)


def _numbers(values: Sequence[Any], dtype: np.dtype) -> np.ndarray:
    """As one array; while a large one is made at once, no other thread runs, and no client has an answer."""
    array = np.empty(len(values), dtype)
    for start in range(0, len(values), _PIECE):
        array[start : start + _PIECE] = values[start : start + _PIECE]
    return array
