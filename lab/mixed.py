"""The valid and invalid requests of the soak, over HTTP and gRPC, with the check of each answer."""

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinop.deploy.service.protocol import pb

from .load import METHOD
from .servers import GRPC, REST

NAME = "soak"  # the model


class Wrong(Exception):
    """An answer is not the expected one."""


@dataclass(frozen=True)
class Answer:
    """An answer: HTTP's status number, or gRPC's status name with the details of a failure as `body`."""

    status: int | str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Case:
    """One request.

    Args:
        check: returns the version that answered, or None for a refusal. Raises Wrong.
        target: HTTP's path or gRPC's method.
    """

    kind: str
    protocol: str
    target: str
    body: bytes
    check: Callable[[Answer], int | None]
    headers: Mapping[str, str] = field(default_factory=dict)


def some(choose: random.Random) -> Case:
    """Chooses a request: a third over gRPC, a quarter invalid."""
    over_grpc = choose.random() < 1 / 3
    if choose.random() < 0.25:
        return choose.choice(GRPC_BAD if over_grpc else REST_BAD)
    return (grpc_good if over_grpc else rest_good)(choose)


def _input(choose: random.Random) -> np.ndarray:
    rows = choose.randint(1, 4)
    return np.random.default_rng(choose.getrandbits(32)).standard_normal((rows, 8), np.float32)


def _version(y: np.ndarray, x: np.ndarray, version: int) -> int:
    """Returns `version`, the version that answered.

    Raises:
        Wrong: y differs in any bit from the output of that version.
    """
    if not np.array_equal(y.reshape(x.shape), np.maximum(x, 0) + np.float32(version)):
        raise Wrong(f"version {version} gave {y.tolist()} for {x.tolist()}")
    return version


def _require(answer: Answer, status: int | str, words: str = "") -> None:
    """Checks the status and the text of an answer.

    Raises:
        Wrong: the answer has another status, lacks the words, or contains a stack trace.
    """
    if answer.status != status or words not in answer.body.decode(errors="replace"):
        raise Wrong(f"expected {status} and {words!r}, not {answer.status}: {answer.body[:200]!r}")
    if b"Traceback" in answer.body:
        raise Wrong(f"a stack trace: {answer.body[:200]!r}")


def _bad(
    kind: str, protocol: str, status: int | str, words: str, target: str, body: bytes, **headers: str
) -> Case:
    return Case(kind, protocol, target, body, lambda answer: _require(answer, status, words), headers)


# ------------------------------------------------------------------------------------------- HTTP

_INFER = f"/v2/models/{NAME}/infer"
_LENGTH = "Inference-Header-Content-Length"


def rest_good(choose: random.Random) -> Case:
    """Returns a valid request over HTTP, with a JSON or a binary tensor."""
    x = _input(choose)
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    if choose.random() < 0.3:
        body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
        return Case("JSON", REST, _INFER, body, lambda answer: _check_rest(answer, x))
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {_LENGTH: str(len(head))}
    return Case("binary", REST, _INFER, head + x.tobytes(), lambda answer: _check_rest(answer, x), headers)


def _check_rest(answer: Answer, x: np.ndarray) -> int:
    _require(answer, 200)
    length = int(answer.headers.get(_LENGTH, len(answer.body)))
    content = json.loads(answer.body[:length])
    data = content["outputs"][0].get("data")
    y = np.frombuffer(answer.body[length:], np.float32) if data is None else np.array(data, np.float32)
    return _version(y, x, int(content["model_version"]))


def _json_bad(kind: str, words: str, **tensor: Any) -> Case:
    whole = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} | tensor
    return _bad(kind, REST, 400, words, _INFER, json.dumps({"inputs": [whole]}).encode())


_NO_VERSION = f"/v2/models/{NAME}/versions/999999/infer"
_NO_INPUTS = b'{"inputs": []}'
REST_BAD = (
    _json_bad("wrong name", "has no input", name="z"),
    _json_bad("wrong dtype", "convert it to FP32", datatype="INT32", data=[1] * 8),
    _json_bad("wrong rank", "dimensions", shape=[8]),
    _json_bad("wrong size", "dimension 1 must be 8", shape=[1, 7], data=[1.0] * 7),
    _json_bad("wrong length", "x", data=[1.0]),
    _json_bad("negative shape", "shape", shape=[-1, 8]),
    _json_bad("empty batch", "is empty", shape=[0, 8], data=[]),
    _json_bad("NaN", "", data=[float("nan")] * 8),
    _bad("no model", REST, 404, "there is no model", "/v2/models/none/infer", _NO_INPUTS),
    _bad("no version", REST, 404, "no version", _NO_VERSION, _NO_INPUTS),
    _bad("no JSON", REST, 400, "JSON", _INFER, b'{"inputs": ['),
    _bad("no route", REST, 404, "nothing at", "/v2/nothing", b"{}"),
    _bad("header length", REST, 400, "", _INFER, struct.pack("<4f", 1, 2, 3, 4), **{_LENGTH: "9999"}),
    _bad("content type", REST, 415, "content type", _INFER, b"{}", **{"Content-Type": "text/html"}),
)

# ------------------------------------------------------------------------------------------- gRPC

_INVALID = "INVALID_ARGUMENT"
_SERVICE = METHOD.rpartition("/")[0]


def grpc_good(choose: random.Random) -> Case:
    """Returns a valid request over gRPC, with a raw or a typed tensor."""
    x = _input(choose)
    message = pb.ModelInferRequest(model_name=NAME)
    tensor = message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    typed = choose.random() < 0.3
    if typed:
        tensor.contents.fp32_contents.extend(x.ravel().tolist())
    else:
        message.raw_input_contents.append(x.tobytes())

    def check(answer: Answer) -> int:
        _require(answer, "OK")
        found = pb.ModelInferResponse.FromString(answer.body)
        if typed:
            y = np.array(found.outputs[0].contents.fp32_contents, np.float32)
        else:
            y = np.frombuffer(found.raw_output_contents[0], np.float32)
        if list(found.outputs[0].shape) != list(x.shape):
            raise Wrong(f"shape {list(found.outputs[0].shape)} for {list(x.shape)}")
        return _version(y, x, int(found.model_version))

    return Case("typed" if typed else "raw", GRPC, METHOD, message.SerializeToString(), check)


def _grpc_bad(kind: str, code: str, words: str, method: str = METHOD, **fields: Any) -> Case:
    """Returns a row of ones with some `fields` changed: those of the tensor, or else of the message."""
    raw = fields.pop("raw", [np.ones(8, np.float32).tobytes()])
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8]}
    tensor |= {name: fields.pop(name) for name in ("name", "datatype", "shape", "contents") if name in fields}
    message = pb.ModelInferRequest(
        **{"model_name": NAME, "inputs": [tensor], "raw_input_contents": raw} | fields
    )
    return _bad(kind, GRPC, code, words, method, message.SerializeToString())


_LOAD = pb.RepositoryModelLoadRequest(model_name=NAME).SerializeToString()
GRPC_BAD = (
    _grpc_bad("wrong name", _INVALID, "has no input", name="z"),
    _grpc_bad("wrong dtype", _INVALID, "convert it to FP32", datatype="INT32"),
    _grpc_bad("wrong rank", _INVALID, "dimensions", shape=[8]),
    _grpc_bad("wrong size", _INVALID, "dimension 1 must be 8", shape=[1, 7], raw=[bytes(28)]),
    _grpc_bad("wrong length", _INVALID, "5 bytes of data", raw=[bytes(5)]),
    _grpc_bad("negative shape", _INVALID, "shape", shape=[-1, 8]),
    _grpc_bad("empty batch", _INVALID, "is empty", shape=[0, 8], raw=[b""]),
    _grpc_bad("two raw tensors", _INVALID, "every input needs one", raw=[bytes(32), bytes(32)]),
    _grpc_bad("raw and typed", _INVALID, "send one of them", contents={"fp32_contents": [1.0] * 8}),
    _grpc_bad("no model", "NOT_FOUND", "there is no model", model_name="none"),
    _grpc_bad("no version", "NOT_FOUND", "no version", model_version="999999"),
    _grpc_bad("no method", "UNIMPLEMENTED", "", method=f"{_SERVICE}/Nothing"),
    _bad("no message", GRPC, _INVALID, "not a protobuf message", METHOD, b"\xff" * 40),
    _bad("load by request", GRPC, "PERMISSION_DENIED", "--control", f"{_SERVICE}/RepositoryModelLoad", _LOAD),
)
