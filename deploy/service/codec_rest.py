"""Decode and encode REST messages: JSON, and JSON followed by raw tensors (the binary extension)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from .datatypes import OF_DTYPE, from_bytes, named, shown, to_bytes, version_number
from .errors import TOO_LARGE, ServiceError, invalid
from .json_tensors import from_json, to_json
from .limits import Limit
from .request import MOST_TENSORS, Request, Result, check_names

HEADER_LENGTH = "inference-header-content-length"


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
    """Decode a request without checking it against the model.

    Args:
        most: the largest number of inputs, and of outputs.
        json: the limit for the JSON part.

    Raises:
        ServiceError: the body is not a request of the protocol.
    """
    arrived = time.monotonic()
    length = _header_length(headers, len(body))
    if json is not None and length > json.bytes:
        raise json.exceeded()
    view = memoryview(body)
    content = _parsed(view[:length])
    if not isinstance(content, dict):
        raise invalid('the request must be a JSON object with "inputs"')
    parameters = _object(content, "parameters", "the request")
    form = AnswerFormat(_id(content), _flag(parameters, "binary_data_output", "the request"))
    inputs, rest = _inputs(content, most, view[length:], HEADER_LENGTH in headers)
    if len(rest):
        raise invalid(
            f"{len(rest)} bytes follow the last binary input: binary_data_size must add up to the body"
        )
    return Request(
        model=model,
        inputs=inputs,
        outputs=_outputs(content, most, form),
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


def _parsed(text: memoryview) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        said = f"invalid JSON: {error}"
    content = bytes(text)
    if b"NaN" in content or b"Infinity" in content:
        said += ". JSON has no NaN or Infinity: send the tensor as binary data"
    elif content.find(b"\0") >= 0:
        said += ". Binary tensors after the JSON need the header Inference-Header-Content-Length"
    raise invalid(said)


def _object(holder: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{where}: {key} must be a JSON object, not {shown(value)}")
    return value


def _list(holder: dict[str, Any], key: str, most: int) -> list[dict[str, Any]]:
    value = holder.get(key)
    if not isinstance(value, list):
        said = f"not {shown(value)}" if key in holder else "it is missing"
        raise invalid(f'"{key}" must be a list of tensors: {said}')
    for each in value:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise invalid(f'"{key}" must hold objects with a "name", not {shown(each)}')
    check_names(key.removesuffix("s"), [each["name"] for each in value], most)
    return value


def _id(content: dict[str, Any]) -> str | None:
    given = content.get("id")
    if given is None or isinstance(given, str):
        return given
    raise invalid(f'"id" must be a string, not {shown(given)}')


def _flag(parameters: dict[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise invalid(f"{where}: parameter {key} must be true or false, not {shown(value)}")
    return value


def _outputs(content: dict[str, Any], most: int, form: AnswerFormat) -> tuple[str, ...] | None:
    if content.get("outputs") in (None, []):
        return None
    for each in _list(content, "outputs", most):
        name = each["name"]
        parameters = _object(each, "parameters", f"output {name}")
        refuse_extensions(f"output {name}", parameters)
        form.outputs[name] = _flag(parameters, "binary_data", f"output {name}", form.binary)
    return tuple(form.outputs)


def _inputs(
    content: dict[str, Any], most: int, binary: memoryview, has_length: bool
) -> tuple[dict[str, np.ndarray], memoryview]:
    """Return the tensors, and the binary data that no tensor used."""
    inputs: dict[str, np.ndarray] = {}
    for each in _list(content, "inputs", most):
        name = each["name"]
        kind, shape = named(name, each.get("datatype")), each.get("shape")
        if not isinstance(shape, list):
            raise invalid(f"input {name}: shape must be a list of whole numbers, not {shown(shape)}")
        parameters = _object(each, "parameters", f"input {name}")
        refuse_extensions(f"input {name}", parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in each:
                raise invalid(f"input {name} has neither data nor binary_data_size")
            inputs[name] = from_json(name, kind, shape, each["data"])
            continue
        if "data" in each:
            raise invalid(f"input {name} has both data and binary_data_size: send one of them")
        if type(size) is not int or size < 0:
            raise invalid(f"input {name}: binary_data_size must be a number of bytes, not {shown(size)}")
        if not has_length:
            raise invalid(
                f"input {name} has a binary_data_size, but Inference-Header-Content-Length is missing"
            )
        if size > len(binary):
            raise invalid(
                f"input {name}: binary_data_size is {size}, but only {len(binary)} bytes are left of the body"
            )
        inputs[name] = from_bytes(name, kind, shape, binary[:size])
        binary = binary[size:]
    return inputs, binary


# -------------------------------------------------------------------------------- answers


def encode(result: Result, form: AnswerFormat, json: Limit | None = None) -> tuple[bytes, dict[str, str]]:
    """Return the body and its headers. `json` is the limit for the JSON part.

    Raises:
        ServiceError: a number is not finite, which JSON cannot express, or the JSON is too large.
    """
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
    return ServiceError(
        TOO_LARGE,
        f"the JSON of the answer is larger than {limit.bytes} bytes ({limit.setting}): ask for binary data "
        'with "parameters": {"binary_data_output": true}',
    )
