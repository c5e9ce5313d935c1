"""Tensors of every datatype, and requests and answers for tests of the codecs, without a server."""

import json
import math
from typing import Any

import numpy as np
from service_models import NUMPY
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service import codec_rest
from twinop.deploy.service.datatypes import BYTES, Datatype
from twinop.deploy.service.request import Request, Result

FLOATS = {"FP16", "FP32", "FP64", "BF16"}


def values(datatype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Return random bit patterns, including NaN payloads, infinities, -0, subnormals; or strings."""
    random, dtype = np.random.default_rng(seed), NUMPY[datatype]
    if datatype == "BYTES":
        texts = ["", "a", "zwei\n", "\0", "\N{SNOWMAN}", "\N{PILE OF POO}", '"quoted\\"']
        array = np.empty(shape, object)
        array[...] = random.choice(np.array(texts, object), shape)
        return array
    if datatype == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    array = np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).copy()
    if array.dtype.kind not in "iu":
        array[:4] = [np.nan, np.inf, -np.inf, -0.0][: array.size]
    return array.reshape(shape)


def finite(array: np.ndarray) -> np.ndarray:
    """Return the array with -0.0 for what is not finite."""
    if array.dtype == object:
        return array
    with np.errstate(invalid="ignore"):  # signalling NaNs of bfloat16
        return np.where(np.isfinite(array), array, array.dtype.type(-0.0))


def raw(array: np.ndarray) -> bytes:
    """Return the tensor's bytes in the protocol's binary format."""
    if array.dtype == object:
        texts = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return array.tobytes()


def rest_request(inputs: dict[str, Any], tail: bytes = b"", **rest: Any) -> tuple[bytes, dict[str, str]]:
    """Return a body and its headers. `inputs` has each tensor's JSON by name."""
    tensors = [{"name": name, **tensor} for name, tensor in inputs.items()]
    header = json.dumps({"inputs": tensors, **rest}).encode()
    headers = {"inference-header-content-length": str(len(header))} if tail else {}
    return header + tail, headers


def tensor_of(array: np.ndarray, kind: Datatype, **rest: Any) -> dict[str, Any]:
    return {"datatype": kind.name, "shape": list(array.shape), **rest}


def decode(body: bytes, headers: dict[str, str] | None = None) -> Request:
    return codec_rest.decode(body, headers or {}, "m")[0]


def result(array: np.ndarray) -> Result:
    return Result("m", 3, {"y": array})


def typed(array: np.ndarray, kind: Datatype, name: str = "x") -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=kind.name, shape=array.shape)
    values = array.ravel().tolist()
    if kind is BYTES:
        values = [text.encode() for text in values]
    getattr(tensor.contents, kind.contents or "").extend(values)
    return tensor
