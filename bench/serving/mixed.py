"""The valid and invalid requests of the soak, over HTTP and gRPC, with the check of each answer."""

import asyncio
import json
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from twinop.deploy.service.protocol import pb
from twinop.record import DOMAIN, DOMAIN_VERSION

from .load import METHOD
from .servers import GRPC, REST
from .servers import SOAKED as NAME


class Wrong(Exception):
    """An answer is not the expected one."""


@dataclass(frozen=True)
class Answer:
    """An answer: HTTP's status number, or gRPC's status name with the details of a failure as `body`."""

    status: int | str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Case:
    """One request.

    Args:
        check: returns the version that answered, or None for a refusal. Raises Wrong.
        method: gRPC's method.
    """

    kind: str
    request: bytes
    check: Callable[[Answer], int | None]
    protocol: str = REST
    method: str = ""


def model(version: int) -> onnx.ModelProto:
    """Returns y = CustomRelu(x) + version, so that an answer shows which version made it."""
    nodes = [
        helper.make_node("CustomRelu", ["x"], ["r"], domain=DOMAIN),
        helper.make_node("Add", ["r", "version"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    weight = numpy_helper.from_array(np.array([version], np.float32), "version")
    graph = helper.make_graph(nodes, "soak", ends[:1], ends[1:], [weight])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def write_version(folder: Path, version: int, broken: bool = False) -> None:
    """Adds a version as a copy over the network does: first the folder, then the file in pieces."""
    target = folder / NAME / str(version)
    target.mkdir(parents=True)
    data = model(version).SerializeToString()
    if broken:
        data = data[: len(data) // 2]
    with (target / "model.onnx").open("wb") as file:
        file.write(data[:20])
        file.flush()
        time.sleep(0.05)
        file.write(data[20:])


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


def _refusal(status: int | str, words: str) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        _require(answer, status, words)

    return check


# ------------------------------------------------------------------------------------------- HTTP

_INFER = f"/v2/models/{NAME}/infer"
_LENGTH = "Inference-Header-Content-Length"


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Reads one HTTP answer.

    Raises:
        EOFError: the connection was closed instead.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(int(head[0].split()[1]), headers, body)


def rest_good(choose: random.Random) -> Case:
    """Returns a valid request over HTTP, with a JSON or a binary tensor."""
    x = _input(choose)
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    if choose.random() < 0.3:
        body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
        return Case("JSON", _post(_INFER, body), lambda answer: _check_json(answer, x))
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request = _post(_INFER, head + x.tobytes(), f"{_LENGTH}: {len(head)}")
    return Case("binary", request, lambda answer: _check_binary(answer, x))


def _check_json(answer: Answer, x: np.ndarray) -> int:
    _require(answer, 200)
    content = json.loads(answer.body)
    return _version(np.array(content["outputs"][0]["data"], np.float32), x, int(content["model_version"]))


def _check_binary(answer: Answer, x: np.ndarray) -> int:
    _require(answer, 200)
    length = int(answer.headers[_LENGTH.lower()])
    content = json.loads(answer.body[:length])
    return _version(np.frombuffer(answer.body[length:], np.float32), x, int(content["model_version"]))


def _rest_bad(kind: str, status: int, words: str, request: bytes) -> Case:
    return Case(kind, request, _refusal(status, words))


def _json_bad(kind: str, status: int, words: str, **tensor: Any) -> Case:
    whole = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} | tensor
    return _rest_bad(kind, status, words, _post(_INFER, json.dumps({"inputs": [whole]}).encode()))


REST_BAD = (
    _json_bad("wrong name", 400, "has no input", name="z"),
    _json_bad("wrong dtype", 400, "send it as FP32", datatype="INT32", data=[1] * 8),
    _json_bad("wrong rank", 400, "dimensions", shape=[8]),
    _json_bad("wrong size", 400, "dimension 1 must be 8", shape=[1, 7], data=[1.0] * 7),
    _json_bad("wrong length", 400, "x", data=[1.0]),
    _json_bad("negative shape", 400, "shape", shape=[-1, 8]),
    _json_bad("empty batch", 400, "is empty", shape=[0, 8], data=[]),
    _json_bad("NaN", 400, "", data=[float("nan")] * 8),
    _rest_bad("no model", 404, "there is no model", _post("/v2/models/none/infer", b'{"inputs": []}')),
    _rest_bad(
        "no version", 404, "no version", _post(f"/v2/models/{NAME}/versions/999999/infer", b'{"inputs":[]}')
    ),
    _rest_bad("no JSON", 400, "JSON", _post(_INFER, b'{"inputs": [')),
    _rest_bad("no route", 404, "nothing at", _post("/v2/nothing", b"{}")),
    _rest_bad("header length", 400, "", _post(_INFER, struct.pack("<4f", 1, 2, 3, 4), f"{_LENGTH}: 9999")),
    _rest_bad("content type", 415, "content type", _post(_INFER, b"{}", "Content-Type: text/html")),
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

    return _grpc_case("typed" if typed else "raw", message, check)


def _grpc_case(kind: str, message: Any, check: Any, method: str = METHOD) -> Case:
    request = message if isinstance(message, bytes) else message.SerializeToString()
    return Case(kind, request, check, GRPC, method)


def _grpc_bad(kind: str, code: str, words: str, method: str = METHOD, **fields: Any) -> Case:
    """Returns a row of ones with some `fields` changed: those of the tensor, or else of the message."""
    raw = fields.pop("raw", [np.ones(8, np.float32).tobytes()])
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8]}
    tensor |= {name: fields.pop(name) for name in ("name", "datatype", "shape", "contents") if name in fields}
    message = pb.ModelInferRequest(
        **{"model_name": NAME, "inputs": [tensor], "raw_input_contents": raw} | fields
    )
    return _grpc_case(kind, message, _refusal(code, words), method)


GRPC_BAD = (
    _grpc_bad("wrong name", _INVALID, "has no input", name="z"),
    _grpc_bad("wrong dtype", _INVALID, "send it as FP32", datatype="INT32"),
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
    _grpc_case("no message", b"\xff" * 40, _refusal(_INVALID, "not a protobuf message")),
    _grpc_case(
        "load by request",
        pb.RepositoryModelLoadRequest(model_name=NAME),
        _refusal("PERMISSION_DENIED", "--control explicit"),
        f"{_SERVICE}/RepositoryModelLoad",
    ),
)
