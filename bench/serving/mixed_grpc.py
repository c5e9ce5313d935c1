"""Requests good and bad over gRPC, with raw and typed tensors, for the soak."""

import random
from typing import Any

import numpy as np

from twinop.bench.serving.mixed import NAME, Answer, Case, compared, refusal, require
from twinop.bench.serving.requests import METHOD
from twinop.bench.serving.servers import GRPC
from twinop.deploy.service._kserve import pb

_INVALID = "INVALID_ARGUMENT"
_SERVICE = METHOD.rpartition("/")[0]


def good(choose: random.Random) -> Case:
    x = np.random.default_rng(choose.getrandbits(32)).standard_normal((choose.randint(1, 4), 8), np.float32)
    message = pb.ModelInferRequest(model_name=NAME)
    tensor = message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    if choose.random() < 0.3:
        tensor.contents.fp32_contents.extend(x.ravel().tolist())
        return _case("typed", message, lambda answer: _check_typed(answer, x))
    message.raw_input_contents.append(x.tobytes())
    return _case("raw", message, lambda answer: _check_raw(answer, x))


def _case(kind: str, message: Any, check: Any, method: str = METHOD) -> Case:
    request = message if isinstance(message, bytes) else message.SerializeToString()
    return Case(kind, request, check, GRPC, method)


def _check_typed(answer: Answer, x: np.ndarray) -> int:
    require(answer, "OK")
    message = pb.ModelInferResponse.FromString(answer.body)
    y = np.array(message.outputs[0].contents.fp32_contents, np.float32).reshape(message.outputs[0].shape)
    return compared(y, x, int(message.model_version))


def _check_raw(answer: Answer, x: np.ndarray) -> int:
    require(answer, "OK")
    message = pb.ModelInferResponse.FromString(answer.body)
    y = np.frombuffer(message.raw_output_contents[0], np.float32).reshape(message.outputs[0].shape)
    return compared(y, x, int(message.model_version))


def _refused(kind: str, code: str, words: str, method: str = METHOD, **fields: Any) -> Case:
    """One row of ones, but for `fields`: of the tensor where it has them, else of the message."""
    raw = fields.pop("raw", [np.ones(8, np.float32).tobytes()])
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8]}
    tensor |= {name: fields.pop(name) for name in ("name", "datatype", "shape", "contents") if name in fields}
    message = pb.ModelInferRequest(
        **{"model_name": NAME, "inputs": [tensor], "raw_input_contents": raw} | fields
    )
    return _case(kind, message, refusal(code, words), method)


BAD = (
    _refused("wrong name", _INVALID, "has no input", name="z"),
    _refused("wrong dtype", _INVALID, "send it as FP32", datatype="INT32"),
    _refused("wrong rank", _INVALID, "dimensions", shape=[8]),
    _refused("wrong size", _INVALID, "dimension 1 must be 8", shape=[1, 7], raw=[bytes(28)]),
    _refused("wrong length", _INVALID, "5 bytes of data", raw=[bytes(5)]),
    _refused("negative shape", _INVALID, "shape", shape=[-1, 8]),
    _refused("empty batch", _INVALID, "is empty", shape=[0, 8], raw=[b""]),
    _refused("two raw tensors", _INVALID, "every input needs one", raw=[bytes(32), bytes(32)]),
    _refused("raw and typed", _INVALID, "send one of them", contents={"fp32_contents": [1.0] * 8}),
    _refused("no model", "NOT_FOUND", "there is no model", model_name="none"),
    _refused("no version", "NOT_FOUND", "no version", model_version="999999"),
    _refused("no method", "UNIMPLEMENTED", "", method=f"{_SERVICE}/Nothing"),
    _case("no message", b"\xff" * 40, refusal(_INVALID, "not a protobuf message")),
    _case(
        "load by request",
        pb.RepositoryModelLoadRequest(model_name=NAME),
        refusal("PERMISSION_DENIED", "--control explicit"),
        f"{_SERVICE}/RepositoryModelLoad",
    ),
)
