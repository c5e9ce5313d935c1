"""The models of the serving report, and the servers that run them side by side.

As a program, this module is one of the plain servers, with one session and without batching:

    python -m twinop.bench.serving.servers fastapi MODEL.onnx PROVIDER PORT               # raw tensors
    python -m twinop.bench.serving.servers kserve MODEL.onnx PROVIDER NAME --http_port ...
"""

import contextlib
import http.client
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from twinop.record import DOMAIN, DOMAIN_VERSION

from .. import report

OURS, UNBATCHED, KSERVE, FASTAPI = "twinop", "twinop, unbatched", "KServe", "FastAPI"
INSTANCES, GRAPHS = "twinop, 2 instances", "twinop, CUDA graphs"  # on a GPU
REST, GRPC = "REST", "gRPC"
SOAKED = "soak"  # the model of the soak
_START_SECONDS = 120


# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model of the report.

    Args:
        rows: the largest batch that the server may form.
        inputs: returns the inputs of one request.
        graphs: whether ONNX Runtime runs the whole model on the GPU, as CUDA graphs require.
    """

    name: str
    title: str
    rows: int
    build: Callable[[], onnx.ModelProto]
    inputs: Callable[[], dict[str, np.ndarray]]
    graphs: bool = True


def mlp(*widths: int) -> onnx.ModelProto:
    """Returns linear layers with CustomRelu between them, float32[batch, width]."""
    generator = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weight = generator.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
        bias = generator.standard_normal(columns, np.float32)
        weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        end = layer == len(widths) - 2
        linear = "y" if end else f"h{layer}"
        nodes.append(helper.make_node("Gemm", [last, f"w{layer}", f"b{layer}"], [linear]))
        if not end:
            last = f"r{layer}"
            nodes.append(helper.make_node("CustomRelu", [linear], [last], domain=DOMAIN))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _row(width: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((1, width), np.float32)}


def _encoder() -> onnx.ModelProto:
    import torch

    from ..encoder import exported
    from ..encoder_models import Size

    size = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=2, tokens=64)
    return exported("bert", size, torch.float32, True, "torchscript")


def _sentence() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, 2000, (1, 64))
    return {"ids": ids, "mask": np.ones_like(ids)}


MODELS = (
    Model("small", "MLP 64-128-128-16", 64, lambda: mlp(64, 128, 128, 16), lambda: _row(64)),
    Model("wide", "MLP 1024-4096-4096-1024", 64, lambda: mlp(1024, 4096, 4096, 1024), lambda: _row(1024)),
    Model("encoder", "encoder, 4 layers, 256 wide, 64 tokens", 16, _encoder, _sentence, graphs=False),
)


def write(model: Model, folder: Path) -> Path:
    """Writes NAME/1/model.onnx, the layout of the service and of Triton, and returns its path."""
    path = folder / model.name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model.build(), path)
    return path


def session_options(provider: str) -> tuple[Any, list[str]]:
    """Returns the options and providers of the other servers' sessions, with twinop's library registered."""
    import onnxruntime as ort

    from twinop.library import find_library

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_library("custom_ops")))
    names = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
    return options, names[provider]


# ------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class Server:
    """A server's name and its ports by protocol."""

    name: str
    ports: dict[str, int]


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server until the body is done."""
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_ready(server: Server, path: str, running: subprocess.Popen[bytes], log: Path) -> float:
    """Waits until the server answers GET `path`, and returns the seconds it took.

    Raises:
        BenchError: the server ended or is too slow; with the end of its log.
    """
    started = time.perf_counter()
    while time.perf_counter() - started < _START_SECONDS:
        if running.poll() is not None:
            raise report.BenchError(f"{server.name} ended at its start:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", server.ports[REST], timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter() - started
        time.sleep(0.02)
    raise report.BenchError(f"{server.name} was not ready in {_START_SECONDS} s:\n{log.read_text()[-2000:]}")


def more(model: Model, provider: str) -> dict[str, list[str]]:
    """Returns the options of the servers that run only on a GPU and only over REST, by name."""
    if provider != "cuda":
        return {}
    return {INSTANCES: ["--instances", "2"]} | ({GRAPHS: ["--cuda-graph"]} if model.graphs else {})


@contextlib.contextmanager
def servers(model: Model, path: Path, provider: str, folder: Path) -> Iterator[list[tuple[Server, float]]]:
    """Starts all servers of one model. Yields each of them with the seconds until it was ready."""
    further = more(model, provider)
    ports = free_ports(7 + len(further))
    both = [{REST: ports[i], GRPC: ports[i + 1]} for i in (0, 2, 4)]
    python = [sys.executable, "-m"]
    alone = [*python, "twinop", "serve", str(path), "--provider", provider, "--log-level", "warning"]
    ours = [*alone, "--max-batch-size", str(model.rows)]
    kserve = [*python, __spec__.name, "kserve", str(path), provider, model.name]
    fastapi = [*python, __spec__.name, "fastapi", str(path), provider, str(ports[6])]
    ready = f"/v2/models/{model.name}/ready"
    cases = [
        (Server(OURS, both[0]), [*ours, *_ports(both[0], "-")], ready),
        (Server(KSERVE, both[2]), [*kserve, *_ports(both[2], "_")], ready),
        (Server(UNBATCHED, both[1]), [*alone, *_ports(both[1], "-")], ready),
        (Server(FASTAPI, {REST: ports[6]}), fastapi, "/openapi.json"),
    ]
    for port, (name, options) in zip(ports[7:], further.items(), strict=True):
        command = [*ours, *options, "--no-grpc", "--http-port", str(port)]
        cases.append((Server(name, {REST: port}), command, ready))
    with contextlib.ExitStack() as stack:
        started = []
        for server, command, probe in cases:
            log = folder / f"{model.name}-{server.name}.log"
            running = stack.enter_context(process(command, log))
            started.append((server, wait_ready(server, probe, running, log)))
        yield started


def _ports(ports: dict[str, int], dash: str) -> list[str]:
    return [f"--http{dash}port", str(ports[REST]), f"--grpc{dash}port", str(ports[GRPC])]


@contextlib.contextmanager
def service(models: Path, log: Path, *more: str) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Starts the service on a folder of models. Yields it and its process when the soak's model is ready."""
    server = Server("twinop", dict(zip((REST, GRPC), free_ports(2), strict=True)))
    command = [sys.executable, "-m", "twinop", "serve", str(models), "--http-port", str(server.ports[REST])]
    command += ["--grpc-port", str(server.ports[GRPC]), "--provider", "cpu", "--max-batch-size", "32"]
    command += ["--log-level", "warning", *more]
    with log.open("ab") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_ready(server, f"/v2/models/{SOAKED}/ready", running, log)
        yield server, running
    finally:
        running.kill()
        running.wait()


# ------------------------------------------------------------------------------------------- plain servers

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def _session(path: str, provider: str) -> Any:
    import onnxruntime as ort

    options, providers = session_options(provider)
    return ort.InferenceSession(path, options, providers=providers)


def fastapi(path: str, provider: str, port: str) -> None:
    """Serves POST /infer with FastAPI."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    session = _session(path, provider)
    app = FastAPI()

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        body = await request.body()
        feeds, at = {}, 0
        for value in session.get_inputs():
            shape = [1, *value.shape[1:]]
            size = int(np.prod(shape)) * np.dtype(_DTYPES[value.type]).itemsize
            feeds[value.name] = np.frombuffer(body[at : at + size], _DTYPES[value.type]).reshape(shape)
            at += size
        return Response(b"".join(array.tobytes() for array in session.run(None, feeds)))

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


def kserve(path: str, provider: str, name: str) -> None:
    """Serves the Open Inference Protocol with KServe, which reads its own options from the command line."""
    from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

    class Plain(Model):
        def __init__(self) -> None:
            super().__init__(name)
            self.session = _session(path, provider)
            self.ready = True

        async def predict(
            self, payload: Any, headers: Any = None, response_headers: Any = None
        ) -> InferResponse:
            assert isinstance(payload, InferRequest)
            feeds = {each.name: each.as_numpy() for each in payload.inputs}
            outputs = []
            for found, array in zip(self.session.get_outputs(), self.session.run(None, feeds), strict=True):
                output = InferOutput(found.name, list(array.shape), "FP32")
                output.set_data_from_numpy(array, binary_data=True)
                outputs.append(output)
            return InferResponse(
                payload.id or "", self.name, outputs, use_binary_outputs=payload.use_binary_outputs
            )

    ModelServer().start([Plain()])


if __name__ == "__main__":
    {"fastapi": fastapi, "kserve": kserve}[sys.argv[1]](*sys.argv[2:5])
