"""Servers for lab/serve.py and lab/soak.py: starting them, and plain ones to compare with.

    python lab/servers.py fastapi|kserve MODEL.onnx PROVIDER --http-port N --grpc-port N

runs one of the plain servers, with one session and without batching.
"""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
REST, GRPC = "REST", "gRPC"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
_START_SECONDS = 120


@dataclass(frozen=True)
class Server:
    """A server that is ready: its name, its ports by protocol, and the seconds that its start took."""

    name: str
    ports: dict[str, int]
    ready_seconds: float = 0.0


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], model: str, log: Path, environments: Sequence[dict[str, str]] = ({},)
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Runs `COMMAND --http-port N --grpc-port N` and yields it when the model is ready.

    Args:
        environments: one for each process that shares the ports.

    Raises:
        RuntimeError: the server ended or is too slow; with the end of its log.
    """
    http_port, grpc_port = free_ports(2)
    whole = [*command, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("ab"))
        running = [
            stack.enter_context(subprocess.Popen(whole, stdout=file, stderr=file, env=os.environ | each))
            for each in environments
        ]
        for process in running:
            stack.callback(process.terminate)  # before its end is waited for
        tries = 1 if len(running) == 1 else 64  # the kernel chooses which of several is asked
        while not all(_is_ready(http_port, model) for _ in range(tries)):
            late = time.perf_counter() - start > _START_SECONDS
            if late or any(process.poll() is not None for process in running):
                what = f"was not ready in {_START_SECONDS} s" if late else "ended at its start"
                raise RuntimeError(f"{name} {what}:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Server(name, {REST: http_port, GRPC: grpc_port}, time.perf_counter() - start), running[0]


def _is_ready(port: int, model: str) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", f"/v2/models/{model}/ready")
        return connection.getresponse().status == 200
    return False


# ------------------------------------------------------------------------------------------- plain servers

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def session(path: str | Path, provider: str) -> Any:
    """Opens a session of ONNX Runtime's own, with twinop's library registered."""
    import onnxruntime as ort

    from twinop.libraries.library import find_library

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_library("custom_ops")))
    names = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
    return ort.InferenceSession(str(path), options, providers=names[provider])


def fastapi(opened: Any, name: str, http_port: int, grpc_port: int) -> None:
    """Serves POST /infer with FastAPI."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app = FastAPI()

    @app.get(f"/v2/models/{name}/ready")
    def ready() -> None:
        pass

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        body = await request.body()
        feeds, at = {}, 0
        for value in opened.get_inputs():
            shape = [1, *value.shape[1:]]
            size = int(np.prod(shape)) * np.dtype(_DTYPES[value.type]).itemsize
            feeds[value.name] = np.frombuffer(body[at : at + size], _DTYPES[value.type]).reshape(shape)
            at += size
        return Response(b"".join(array.tobytes() for array in opened.run(None, feeds)))

    uvicorn.run(app, host="127.0.0.1", port=http_port, log_level="warning")


def kserve(opened: Any, name: str, http_port: int, grpc_port: int) -> None:
    """Serves the Open Inference Protocol with KServe."""
    from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

    class Plain(Model):
        def __init__(self) -> None:
            super().__init__(name)
            self.ready = True

        async def predict(
            self, payload: Any, headers: Any = None, response_headers: Any = None
        ) -> InferResponse:
            assert isinstance(payload, InferRequest)
            feeds = {each.name: each.as_numpy() for each in payload.inputs}
            outputs = []
            for found, array in zip(opened.get_outputs(), opened.run(None, feeds), strict=True):
                output = InferOutput(found.name, list(array.shape), "FP32")
                output.set_data_from_numpy(array, binary_data=True)
                outputs.append(output)
            return InferResponse(
                payload.id or "", self.name, outputs, use_binary_outputs=payload.use_binary_outputs
            )

    ModelServer(http_port=http_port, grpc_port=grpc_port).start([Plain()])


if __name__ == "__main__":
    kind, path, provider, _, http_port, _, grpc_port = sys.argv[1:]
    serve = {"fastapi": fastapi, "kserve": kserve}[kind]
    serve(session(path, provider), Path(path).stem, int(http_port), int(grpc_port))
