"""Requests good and bad over HTTP, with JSON and binary tensors, for the soak."""

import asyncio
import json
import random
import struct
from typing import Any

import numpy as np

from twinop.bench.serving.mixed import NAME, Answer, Case, compared, refusal, require

_INFER = f"/v2/models/{NAME}/infer"
_LENGTH = "Inference-Header-Content-Length"


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """
    Raises:
        EOFError: the connection was closed instead.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(int(head[0].split()[1]), headers, body)


def good(choose: random.Random) -> Case:
    x = np.random.default_rng(choose.getrandbits(32)).standard_normal((choose.randint(1, 4), 8), np.float32)
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    if choose.random() < 0.3:
        body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
        return Case("JSON", post(_INFER, body), lambda answer: _check_json(answer, x))
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request = post(_INFER, head + x.tobytes(), f"{_LENGTH}: {len(head)}")
    return Case("binary", request, lambda answer: _check_binary(answer, x))


def _check_json(answer: Answer, x: np.ndarray) -> int:
    require(answer, 200)
    content = json.loads(answer.body)
    y = np.array(content["outputs"][0]["data"], np.float32).reshape(x.shape)
    return compared(y, x, int(content["model_version"]))


def _check_binary(answer: Answer, x: np.ndarray) -> int:
    require(answer, 200)
    length = int(answer.headers[_LENGTH.lower()])
    content = json.loads(answer.body[:length])
    y = np.frombuffer(answer.body[length:], np.float32).reshape(x.shape)
    return compared(y, x, int(content["model_version"]))


def _refused(kind: str, status: int, words: str, request: bytes) -> Case:
    return Case(kind, request, refusal(status, words))


def _json_case(kind: str, status: int, words: str, **tensor: Any) -> Case:
    whole = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} | tensor
    return _refused(kind, status, words, post(_INFER, json.dumps({"inputs": [whole]}).encode()))


BAD = (
    _json_case("wrong name", 400, "has no input", name="z"),
    _json_case("wrong dtype", 400, "send it as FP32", datatype="INT32", data=[1] * 8),
    _json_case("wrong rank", 400, "dimensions", shape=[8]),
    _json_case("wrong size", 400, "dimension 1 must be 8", shape=[1, 7], data=[1.0] * 7),
    _json_case("wrong length", 400, "x", data=[1.0]),
    _json_case("negative shape", 400, "shape", shape=[-1, 8]),
    _json_case("empty batch", 400, "is empty", shape=[0, 8], data=[]),
    _json_case("NaN", 400, "", data=[float("nan")] * 8),
    _refused("no model", 404, "there is no model", post("/v2/models/none/infer", b'{"inputs": []}')),
    _refused(
        "no version", 404, "no version", post(f"/v2/models/{NAME}/versions/999999/infer", b'{"inputs":[]}')
    ),
    _refused("no JSON", 400, "JSON", post(_INFER, b'{"inputs": [')),
    _refused("no route", 404, "nothing at", post("/v2/nothing", b"{}")),
    _refused("header length", 400, "", post(_INFER, struct.pack("<4f", 1, 2, 3, 4), f"{_LENGTH}: 9999")),
    _refused("content type", 415, "content type", post(_INFER, b"{}", "Content-Type: text/html")),
)
