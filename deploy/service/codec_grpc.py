"""gRPC of the Open Inference Protocol: KServe's messages, with typed or raw tensors."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinop.deploy.service import wire
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
from twinop.deploy.service.errors import TOO_LARGE, ServiceError, invalid
from twinop.deploy.service.request import MOST_TENSORS, Request, Result, check_count

_FEW = 128  # numbers of an answer: fewer are faster by protobuf (an answer of 4 INT64: 7 us, by numpy 17)


@dataclass(slots=True)
class Form:
    """What the answer has to look like: the client's id ("" for none), tensors raw or typed."""

    id: str
    raw: bool


def decode(
    message: pb.ModelInferRequest,
    seconds: float | None,
    most: int = MOST_TENSORS,
    bulk: wire.Bulk | None = None,
) -> tuple[Request, Form]:
    """`seconds` is what the call's deadline leaves, None for no deadline; `most` are the inputs, or outputs.

    `bulk` holds what was taken out of `message` before protobuf read it.

    Raises:
        ServiceError: the message contradicts itself; what it holds is held against the model later.
    """
    arrived = time.monotonic()
    check_count("inputs", len(message.inputs), most)
    check_count("outputs", len(message.outputs), most)
    typed = bulk.typed if bulk is not None else {}
    raw = bulk.raw if bulk is not None else message.raw_input_contents
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
            field, values = typed.get(index) or _contents(tensor.contents, kind)
            inputs[name] = _typed(name, kind, shape, field, values)
        elif index in typed or tensor.HasField("contents"):
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
    """A ModelInferResponse; raw where the request was raw, or where a type has no typed field (FP16, BF16).

    Raises:
        ServiceError: it is larger than protobuf's messages can be.
    """
    answer = pb.ModelInferResponse(model_name=result.model, model_version=str(result.version), id=form.id)
    kinds = [OF_DTYPE[array.dtype] for array in result.outputs.values()]
    is_raw = form.raw or any(kind.contents is None for kind in kinds)
    if sum(array.nbytes for array in result.outputs.values()) > wire.MOST_BYTES:
        raise _too_large()
    parts, raw = [answer.SerializeToString()], list[Any]()
    for (name, array), kind in zip(result.outputs.items(), kinds, strict=True):
        tensor = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=kind.name, shape=array.shape)
        contents: list[Any] = []
        if is_raw:
            raw += wire.prefixed(answer.RAW_OUTPUT_CONTENTS_FIELD_NUMBER, to_bytes(array))
        elif kind is BYTES or array.size < _FEW:
            _add(getattr(tensor.contents, kind.contents or ""), array.ravel())
        else:
            numbers = wire.contents(kind.contents or "", array)
            contents = wire.prefixed(tensor.CONTENTS_FIELD_NUMBER, *numbers)
        parts += wire.prefixed(answer.OUTPUTS_FIELD_NUMBER, tensor.SerializeToString(), *contents)
        if wire.size_of(parts) + wire.size_of(raw) > wire.MOST_BYTES:  # up to ten bytes a number
            raise _too_large()
    return b"".join(parts + raw)


def _add(field: Any, flat: np.ndarray) -> None:
    for start in range(0, flat.size, wire.PIECE):
        values = flat[start : start + wire.PIECE].tolist()
        field.extend([each.encode() if isinstance(each, str) else each for each in values])


def _too_large() -> ServiceError:
    return ServiceError(
        TOO_LARGE,
        "the outputs are larger than the 2 GiB that a gRPC message can have: ask for fewer of them, or over "
        "HTTP as binary data",
    )


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


def _contents(given: pb.InferTensorContents, kind: Datatype) -> tuple[str, Sequence[Any]]:
    """A field that is set, and its values: first of all one that `kind` is not sent in."""
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
    if kind.dtype.itemsize < 4 and kind.dtype.kind in "iu":  # sent in fields of 32 bits
        limits, wide = np.iinfo(kind.dtype), _numbers(values, np.dtype(np.int64))
        if elements and (wide.min() < limits.min or wide.max() > limits.max):
            at = int(np.argmax((wide < limits.min) | (wide > limits.max)))
            raise invalid(
                f"input {name}: element {at} is {wide[at]}; {kind.name} has {limits.min} to {limits.max}"
            )
        return wide.astype(kind.dtype).reshape(shape)
    return _numbers(values, kind.dtype).reshape(shape)


def _numbers(values: Sequence[Any] | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As one array; while a large one is made of a list at once, no other thread runs."""
    if isinstance(values, np.ndarray):
        return np.require(values, dtype, "A")  # vector code may fault on odd addresses
    array = np.empty(len(values), dtype)
    for start in range(0, len(values), wire.PIECE):
        array[start : start + wire.PIECE] = values[start : start + wire.PIECE]
    return array
