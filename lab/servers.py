"""The models of the serving report, and the servers that run them side by side.

As a program, this module is one of the plain servers, with one session and without batching:

    python -m twinop.bench.serving.servers fastapi|kserve MODEL.onnx PROVIDER --http-port N --grpc-port N
"""

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from twinop import child
from twinop.record import DOMAIN, DOMAIN_VERSION

from twinop.bench import report

OURS, UNBATCHED, KSERVE, FASTAPI = "twinop", "twinop unbatched", "KServe", "FastAPI"
INSTANCES = "twinop 2 instances"  # on a GPU
PROCESSES = "twinop processes"  # one for each core, or for each GPU
SERVERS = (OURS, UNBATCHED, INSTANCES, PROCESSES, KSERVE, FASTAPI)
REST, GRPC = "REST", "gRPC"
_START_SECONDS = 120


# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model of the report.

    Args:
        rows: the largest batch that the server may form.
        inputs: returns the inputs of one request.
    """

    name: str
    title: str
    rows: int
    build: Callable[[], onnx.ModelProto]
    inputs: Callable[[], dict[str, np.ndarray]]


def mlp(*widths: int) -> onnx.ModelProto:
    """Returns linear layers with CustomRelu between them, float32[batch, width]."""
    generator = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weight = generator.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
        bias = generator.standard_normal(columns, np.float32)
        weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        if layer:
            nodes.append(f"r{layer} = {DOMAIN}.CustomRelu({last})")
            last = f"r{layer}"
        linear = "y" if layer == len(widths) - 2 else f"h{layer}"
        nodes.append(f"{linear} = Gemm({last}, w{layer}, b{layer})")
        last = linear
    return parsed(f"(float[batch, {widths[0]}] x) => (float[batch, {widths[-1]}] y)", nodes, weights)


def parsed(ends: str, nodes: Sequence[str], weights: Sequence[onnx.TensorProto]) -> onnx.ModelProto:
    """Returns a model from ONNX's text format: its inputs and outputs, and its nodes."""
    head = f'<ir_version: 10, opset_import: ["" : 20, "{DOMAIN}" : {DOMAIN_VERSION}]> model'
    model = onnx.parser.parse_model(f"{head} {ends} {{ {' '.join(nodes)} }}")
    model.graph.initializer.extend(weights)
    return model


def _row(width: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((1, width), np.float32)}


def _encoder() -> onnx.ModelProto:
    from twinop.export import export
    from twinop.torch_op import replace_modules

    from .encoder_models import Size, batch, encoder

    size = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=2, tokens=64)
    model, dynamic = encoder("bert", size), {name: {0: "batch"} for name in ("ids", "mask")}
    replace_modules(model)
    options: dict[str, Any] = {"exporter": "torchscript", "replace": ("add", "softmax"), "verify": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        export(model, batch(size), path, dynamic=dynamic, **options)
        return onnx.load(path)


def _sentence() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, 2000, (1, 64))
    return {"ids": ids, "mask": np.ones_like(ids)}


MODELS = (
    Model("small", "MLP 64-128-128-16", 64, lambda: mlp(64, 128, 128, 16), lambda: _row(64)),
    Model("wide", "MLP 1024-4096-4096-1024", 64, lambda: mlp(1024, 4096, 4096, 1024), lambda: _row(1024)),
    Model("encoder", "encoder, 4 layers, 256 wide, 64 tokens", 16, _encoder, _sentence),
)


# ------------------------------------------------------------------------------------------- servers


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
    name: str, command: Sequence[str], model: str, log: Path
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Runs `python -m COMMAND --http-port N --grpc-port N`, and yields it when the model is ready.

    Raises:
        BenchError: the server ended or is too slow; with the end of its log.
    """
    http_port, grpc_port = free_ports(2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    start = time.perf_counter()
    with log.open("ab") as file:
        running = subprocess.Popen(child.module(*command, *ports), stdout=file, stderr=file)
    try:
        while not _is_ready(http_port, f"/v2/models/{model}/ready"):
            late = time.perf_counter() - start > _START_SECONDS
            if late or running.poll() is not None:
                what = f"was not ready in {_START_SECONDS} s" if late else "ended at its start"
                raise report.BenchError(f"{name} {what}:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Server(name, {REST: http_port, GRPC: grpc_port}, time.perf_counter() - start), running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _is_ready(port: int, path: str) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def gpus() -> int:
    """Returns the number of GPUs."""
    import torch

    return torch.cuda.device_count()


def server_names(provider: str) -> list[str]:
    """Returns the servers that are measured with a provider."""
    names = [OURS, UNBATCHED, KSERVE, FASTAPI]
    if _processes(provider) > 1:
        names.append(PROCESSES)
    if provider == "cuda":
        names.append(INSTANCES)
    return names


def _processes(provider: str) -> int:
    return gpus() if provider == "cuda" else os.cpu_count() or 1


def commands(model: Model, path: Path, provider: str) -> dict[str, list[str]]:
    """Returns the command of each server by its name. A file for one of them is written beside the model."""
    alone = ["twinop", "serve", str(path), "--provider", provider, "--log-level", "warning"]
    ours = [*alone, "--max-batch-size", str(model.rows)]
    count = _processes(provider)
    several = [*ours, "--processes", str(count)]
    if provider == "cuda" and count > 1:
        config = path.with_name("devices.toml")
        config.write_text(f"[server]\ndevices = {list(range(count))}\n")
        several += ["--config", str(config)]
    plain = ["twinop.bench.serving.servers"]
    found = {
        OURS: ours,
        UNBATCHED: alone,
        KSERVE: [*plain, KSERVE.lower(), str(path), provider],
        FASTAPI: [*plain, FASTAPI.lower(), str(path), provider],
        PROCESSES: several,
        INSTANCES: [*ours, "--instances", "2"],
    }
    return {name: found[name] for name in server_names(provider)}


def protocols(server: str) -> tuple[str, ...]:
    """Returns the protocols over which a server is measured."""
    return (REST, GRPC) if server in (OURS, UNBATCHED, KSERVE) else (REST,)


# ------------------------------------------------------------------------------------------- plain servers

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def session(path: str | Path, provider: str) -> Any:
    """Opens a session of ONNX Runtime's own, with twinop's library registered."""
    import onnxruntime as ort

    from twinop.library import find_library

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
