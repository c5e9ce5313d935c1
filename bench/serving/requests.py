"""What the clients send: one request a model, as bytes, and what must come back."""

import http.client
import json
import socket
from pathlib import Path

import numpy as np

from twinop.bench import report
from twinop.bench.serving.models import Model
from twinop.bench.serving.servers import FASTAPI, GRPC, OURS, REST, Server

METHOD = "/inference.GRPCInferenceService/ModelInfer"


def requests(model: Model, folder: Path) -> dict[tuple[str, str], Path]:
    """The bytes that clients send, by (protocol, FastAPI or not), as files."""
    inputs = model.inputs()
    raw = b"".join(array.tobytes() for array in inputs.values())
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": _datatype(array),
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, array in inputs.items()
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    infer = f"/v2/models/{model.name}/infer"
    oip = _post(infer, header + raw, f"Inference-Header-Content-Length: {len(header)}\r\n")
    found = {
        (REST, OURS): oip,
        (REST, FASTAPI): _post("/infer", raw, ""),
        (GRPC, OURS): _message(model, inputs),
    }
    paths = {}
    for number, (key, content) in enumerate(found.items()):
        paths[key] = folder / f"{model.name}-request-{number}"
        paths[key].write_bytes(content)
    return paths


def _post(path: str, body: bytes, more: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _datatype(array: np.ndarray) -> str:
    return {"float32": "FP32", "int64": "INT64"}[array.dtype.name]


def _message(model: Model, inputs: dict[str, np.ndarray]) -> bytes:
    from twinop.deploy.service._kserve import pb

    tensors = [
        pb.ModelInferRequest.InferInputTensor(name=name, shape=array.shape, datatype=_datatype(array))
        for name, array in inputs.items()
    ]
    raw = [array.tobytes() for array in inputs.values()]
    return pb.ModelInferRequest(
        model_name=model.name, inputs=tensors, raw_input_contents=raw
    ).SerializeToString()


def check(server: Server, request: Path, expected: np.ndarray) -> None:
    """Sends the HTTP request once and compares the answer.

    Raises:
        BenchError: it differs from what the session alone gives.
    """
    with socket.create_connection(("127.0.0.1", server.ports[REST]), timeout=30) as connection:
        connection.sendall(request.read_bytes())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    tail = np.frombuffer(body[-expected.nbytes :], expected.dtype) if answer.status == 200 else np.empty(0)
    if tail.size != expected.size or not np.allclose(tail, expected.ravel(), rtol=1e-3, atol=1e-4):
        raise report.BenchError(f"{server.name} answers wrong ({answer.status}): {body[:300]!r}")
