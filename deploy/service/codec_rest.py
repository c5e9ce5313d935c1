"""Decode and encode REST messages: JSON, and JSON followed by raw tensors (the binary extension)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from .datatypes import OF_DTYPE, from_bytes, from_json, named, shown, to_bytes, to_json, version_number
from .errors import ServiceError, invalid
from .request import MOST_TENSORS, Limit, Request, Result, check_names

HEADER_LENGTH = "inference-header-content-length"


class _Parameters(TypedDict, total=False):
    """Those of a request or a tensor. Others are ignored."""

    binary_data_output: bool
    binary_data: bool
    binary_data_size: NonNegativeInt
    timeout: Any
    shared_memory_region: Any
    classification: Any


class _Output(TypedDict):
    name: str
    parameters: NotRequired[_Parameters | None]


class _Input(_Output):
    datatype: str
    shape: list[Any]
    data: NotRequired[Any]


class _Body(TypedDict):
    inputs: list[_Input]
    outputs: NotRequired[list[_Output] | None]
    id: NotRequired[str | None]
    parameters: NotRequired[_Parameters | None]


_BODY = TypeAdapter(_Body)


@dataclass(slots=True)
class AnswerFormat:
    """The form of the answer: the client's id, if it sent one, and which outputs are binary."""

    id: str | None = None
    binary: bool = False
    outputs: dict[str, bool] = field(default_factory=dict)


# -------------------------------------------------------------------------------- requests


def decode(
    body: bytes,
    headers: Mapping[str, str],
    model: str,
    version: str = "",
    most: int = MOST_TENSORS,
    json: Limit | None = None,
) -> tuple[Request, AnswerFormat]:
    """Decode a request without checking it against the model. `most` tensors and the JSON have limits."""
    arrived = time.monotonic()
    length = _header_length(headers, len(body))
    if json is not None and length > json.bytes:
        raise json.exceeded()
    view = memoryview(body)
    content = _parsed(view[:length])
    parameters = content.get("parameters") or {}
    form = AnswerFormat(content.get("id"), parameters.get("binary_data_output", False))
    outputs = content.get("outputs") or []
    check_names("output", [each["name"] for each in outputs], most)
    for each in outputs:
        asked = each.get("parameters") or {}
        refuse_extensions(f"output {each['name']}", asked)
        form.outputs[each["name"]] = asked.get("binary_data", form.binary)
    check_names("input", [each["name"] for each in content["inputs"]], most)
    inputs, rest = {}, view[length:]
    for tensor in content["inputs"]:
        inputs[tensor["name"]], rest = _input(tensor, rest, HEADER_LENGTH in headers)
    if len(rest):
        raise invalid(
            f"{len(rest)} bytes follow the last binary input: binary_data_size must add up to the body"
        )
    return Request(
        model=model,
        inputs=inputs,
        outputs=tuple(form.outputs) or None,
        version=version_number(model, version),
        id=form.id or "",
        deadline=deadline(parameters.get("timeout"), arrived),
        arrived=arrived,
    ), form


def deadline(timeout: Any, now: float) -> float | None:
    """Return when the request expires: `timeout` is whole microseconds, 0 for never, as in Triton."""
    if timeout is None or (timeout == 0 and type(timeout) is int):
        return None
    if type(timeout) is not int or timeout < 0:
        raise invalid(f"parameter timeout is {shown(timeout)}: it takes a whole number of microseconds")
    return now + timeout / 1e6


def refuse_extensions(where: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that change the meaning of a tensor. Other parameters are ignored."""
    if "shared_memory_region" in parameters:
        said = "shared memory is not served: send tensors, and ask for them, in the messages"
        raise invalid(f"{where}: {said}")
    if parameters.get("classification", 0) != 0:
        raise invalid(f"{where}: the extension for classification is not served here")


def _header_length(headers: Mapping[str, str], whole: int) -> int:
    given = headers.get(HEADER_LENGTH)
    if given is None:
        return whole
    if not (given.isascii() and given.isdigit() and len(given) <= 18):
        raise invalid(
            f"Inference-Header-Content-Length is {shown(given)}: it takes the JSON's length in bytes"
        )
    if int(given) > whole:
        raise invalid(f"Inference-Header-Content-Length is {given}, but the body has {whole} bytes")
    return int(given)


def _parsed(text: memoryview) -> _Body:
    try:
        return _BODY.validate_python(orjson.loads(text), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        given = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
        raise invalid(f"{where}: {first['msg']}{given}") from None
    except orjson.JSONDecodeError as error:
        said = f"invalid JSON: {error}"
    content = bytes(text)
    if b"NaN" in content or b"Infinity" in content:
        said += ". JSON has no NaN or Infinity: send the tensor as binary data"
    elif content.find(b"\0") >= 0:
        said += ". Binary tensors after the JSON need the header Inference-Header-Content-Length"
    raise invalid(said)


def _input(tensor: _Input, binary: memoryview, has_length: bool) -> tuple[np.ndarray, memoryview]:
    """Return a tensor, and the binary data that is left for the next ones."""
    name, shape, parameters = tensor["name"], tensor["shape"], tensor.get("parameters") or {}
    kind, size = named(name, tensor["datatype"]), parameters.get("binary_data_size")
    refuse_extensions(f"input {name}", parameters)
    if (size is None) == ("data" not in tensor):
        raise invalid(f"input {name} needs either data or binary_data_size")
    if size is None:
        return from_json(name, kind, shape, tensor["data"]), binary
    if not has_length:
        raise invalid(f"input {name} has a binary_data_size, but Inference-Header-Content-Length is missing")
    if size > len(binary):
        raise invalid(
            f"input {name}: binary_data_size is {size}, but only {len(binary)} bytes are left of the body"
        )
    return from_bytes(name, kind, shape, binary[:size]), binary[size:]


# -------------------------------------------------------------------------------- answers


def encode(result: Result, form: AnswerFormat, json: Limit | None = None) -> tuple[bytes, dict[str, str]]:
    """Return the body and its headers. `json` is the limit for the JSON part."""
    in_json = sum(
        array.size for name, array in result.outputs.items() if not form.outputs.get(name, form.binary)
    )
    if json is not None and 2 * in_json > json.bytes:  # a number and a comma
        raise _too_large(json)
    outputs: list[dict[str, Any]] = []
    tensors: list[Any] = []
    for name, array in result.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": OF_DTYPE[array.dtype].name, "shape": array.shape}
        if form.outputs.get(name, form.binary):
            data = to_bytes(array)
            tensors.append(data)
            size = data.nbytes if isinstance(data, np.ndarray) else len(data)
            output["parameters"] = {"binary_data_size": size}
        else:
            output["data"] = to_json(name, array)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": result.model, "model_version": str(result.version)}
    if form.id is not None:
        answer["id"] = form.id
    answer["outputs"] = outputs
    header = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if json is not None and len(header) > json.bytes:
        raise _too_large(json)
    if not tensors:
        return header, {"content-type": "application/json"}
    return b"".join((header, *tensors)), {
        "content-type": "application/octet-stream",
        HEADER_LENGTH: str(len(header)),
    }


def _too_large(limit: Limit) -> ServiceError:
    advice = ': ask for binary data with "parameters": {"binary_data_output": true}'
    return replace(limit, what="JSON of the answer", advice=advice).exceeded()
