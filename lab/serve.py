"""The inference service beside plain KServe and a plain FastAPI server, through loopback.

python lab/serve.py --models small --rounds 1
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.model_zoo import Size, batch, encoder
from lab.servers import GRPC, METHOD, REST, Server, session, started
from twinop.bench.measurements import BenchError, Device, Measurements, Output, choose_device, chosen
from twinop.cli.console import clear_errors
from twinop.deploy.service.protocol import pb
from twinop.export import export
from twinop.system import python_child
from twinop.torch_op import replace_modules

OURS, KSERVE, FASTAPI = "twinop", "KServe", "FastAPI"
PROCESSES = "twinop processes"  # one for each core, or for each GPU
SERVERS = (OURS, PROCESSES, KSERVE, FASTAPI)
OVER_GRPC = (OURS, KSERVE)
CLIENTS = (1, 16, 64)
LOAD, PLAIN = (str(Path(__file__).with_name(name)) for name in ("load.py", "servers.py"))

LONE_ROUNDS = 5
"""With one client there are this many times the rounds.

On two cores, runs switch between two speeds, 1 : 1.5, for seconds at a time, whichever server is measured.
Three rounds are too few to average that out.
"""

# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model: the largest batch that the server may form, how to write it, and the inputs of one request."""

    rows: int
    build: Callable[[Path], None]
    inputs: dict[str, np.ndarray]


def mlp(*widths: int) -> Model:
    """Returns linear layers with CustomRelu between them, float32[batch, width]."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]
    x = torch.randn(2, widths[0])
    return Model(64, partial(exported, model, {"input": x}), {"input": x[:1].numpy()})


def exported(model: nn.Module, inputs: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
    """Writes a model with twinop's ops and an open batch dimension."""
    options |= {"exporter": "torchscript", "verify": False, "optimize": False}
    replace_modules(model)
    export(model, tuple(inputs.values()), path, dynamic={name: {0: "batch"} for name in inputs}, **options)


def _encoder() -> Model:
    size = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=2, tokens=64)
    inputs = dict(zip(("ids", "mask"), batch(size), strict=True))
    build = partial(exported, encoder("bert", size), inputs, replace=("add", "softmax"))
    return Model(16, build, {name: tensor[:1].numpy() for name, tensor in inputs.items()})


MODELS: dict[str, Callable[[], Model]] = {
    "small": partial(mlp, 64, 128, 128, 16),
    "wide": partial(mlp, 1024, 4096, 4096, 1024),
    "encoder": _encoder,
}

# ------------------------------------------------------------------------------------------- servers


def start(stack: ExitStack, server: str, name: str, model: Model, path: Path, provider: str) -> Server:
    ours = python_child.module("twinop", "serve", str(path), "--provider", provider, "--log-level", "warning")
    environments: list[dict[str, str]] = [{}]
    if server in (KSERVE, FASTAPI):
        ours = [sys.executable, PLAIN, server.lower(), str(path), provider]
    else:
        ours += ["--max-batch-size", str(model.rows)]
    if server == PROCESSES:
        on_gpus, cores = provider == "cuda", os.cpu_count() or 1
        count = torch.cuda.device_count() if on_gpus else cores
        environments = [{"CUDA_VISIBLE_DEVICES": str(i)} if on_gpus else {} for i in range(count)]
        share = path.with_name("share.toml")
        share.write_text(f"[model]\nintra_op_threads = {max(cores // count, 1)}\n")
        ours += ["--reuse-port", "--config", str(share)]
    log = path.with_name(f"{name}-{server}.log")
    return stack.enter_context(started(server, ours, name, log, environments))[0]


def requests(name: str, model: Model, folder: Path) -> dict[tuple[str, bool], Path]:
    """Writes the requests as files, and returns them by protocol and whether it is FastAPI's."""
    inputs = model.inputs
    raw = [array.tobytes() for array in inputs.values()]
    datatypes = {"float32": "FP32", "int64": "INT64"}
    tensors = [
        {"name": each, "shape": list(array.shape), "datatype": datatypes[array.dtype.name]}
        for each, array in inputs.items()
    ]
    sized = [
        tensor | {"parameters": {"binary_data_size": len(each)}}
        for tensor, each in zip(tensors, raw, strict=True)
    ]
    header = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    message = pb.ModelInferRequest(model_name=name, inputs=tensors, raw_input_contents=raw)
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    contents = {
        (REST, False): _post(f"/v2/models/{name}/infer", header + b"".join(raw), length),
        (REST, True): _post("/infer", b"".join(raw), ""),
        (GRPC, False): message.SerializeToString(),
    }
    paths = {}
    for number, (key, content) in enumerate(contents.items()):
        paths[key] = folder / f"{name}-request-{number}"
        paths[key].write_bytes(content)
    return paths


def _post(path: str, body: bytes, more: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check(server: Server, request: Path, expected: np.ndarray) -> None:
    """Sends the HTTP request once; raises BenchError if the answer differs from the output of a session."""
    with socket.create_connection(("127.0.0.1", server.ports[REST]), timeout=30) as connection:
        connection.sendall(request.read_bytes())
        answer = HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    tail = np.frombuffer(body[-expected.nbytes :], expected.dtype) if answer.status == 200 else np.empty(0)
    if tail.size != expected.size or not np.allclose(tail, expected.ravel(), rtol=1e-3, atol=1e-4):
        raise BenchError(f"{server.name} gives a wrong answer ({answer.status}): {body[:300]!r}")


# ------------------------------------------------------------------------------------------- load


def measure_once(
    server: Server, protocol: str, request: Path, clients: int, seconds: float
) -> dict[str, float]:
    """Measures one server once, from processes of their own: one is slower than several servers.

    Raises:
        BenchError: an answer was an error.
    """
    count = max(1, min(clients // 8, (os.cpu_count() or 1) // 4))
    method = [METHOD] if protocol == GRPC else []
    running = []
    for number in range(count):
        options = [server.ports[protocol], request, len(range(number, clients, count)), seconds, *method]
        line = [sys.executable, LOAD, *map(str, options)]
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE))
    found = [json.loads(process.communicate()[0]) for process in running]
    if failures := sorted({text for each in found for text in each["failures"]}):
        raise BenchError(f"{server.name}, {protocol}: {'; '.join(failures[:3])}")
    times = [time for each in found for time in each["times"]]
    p50, p90, p99 = (round(float(value) * 1e3, 4) for value in np.percentile(times, [50, 90, 99]))
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "per_second": round(len(times) / seconds, 1)}


def measure(
    name: str, provider: str, seconds: float, rounds: int, folder: Path, servers: Sequence[str]
) -> list[dict[str, Any]]:
    """Measures servers of one model. Returns a line for each number of clients, with medians over the rounds.

    A round takes the servers in turn, and every other round takes them in reverse.
    """
    model, path = MODELS[name](), folder / f"{name}.onnx"
    model.build(path)
    files = requests(name, model, folder)
    expected = session(path, provider).run(None, model.inputs)[0]
    with ExitStack() as stack:
        found = [start(stack, server, name, model, path, provider) for server in servers]
        for server in found:
            check(server, files[REST, server.name == FASTAPI], expected)
        lines = []
        ways = {
            f"{server.name}, {protocol}": (server, protocol, files[protocol, server.name == FASTAPI])
            for protocol in (REST, GRPC)
            for server in found
            if protocol == REST or server.name in OVER_GRPC
        }
        for clients in CLIENTS:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for turn in range(rounds * (LONE_ROUNDS if clients == 1 else 1)):
                for way in ways if turn % 2 else reversed(ways):
                    runs[way].append(measure_once(*ways[way], clients, seconds))
            times: dict[str, dict[str, Any]] = {}
            for way, kept in runs.items():
                each = times[way] = {key: median(run[key] for run in kept) for key in kept[0]}
                said = f"p50 {each['p50_ms']} ms, p99 {each['p99_ms']} ms, {each['per_second']} a second"
                print(f"{name}, {clients} clients, {way}: {said}", flush=True)
                each["ready_seconds"] = round(ways[way][0].ready_seconds, 2)
                each["p50s_ms"] = [run["p50_ms"] for run in kept]
            lines.append({"model": name, "clients": clients, "times": times})
    return lines


def main(
    models: Annotated[str, typer.Option(help="Models to measure.")] = ",".join(MODELS),
    servers: Annotated[str, typer.Option(help="Servers to measure.")] = ",".join(SERVERS),
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="Seconds of load per server and number of clients.")] = 2.0,
    rounds: Annotated[
        int, typer.Option(help=f"Rounds, whose median is kept; {LONE_ROUNDS} times as many with one client.")
    ] = 3,
    output: Output = None,
) -> None:
    """Measure the inference service beside plain KServe and a plain FastAPI server, through loopback.

    The clients run in processes of their own, and each sends its next request when it has its answer. All of
    it takes 25 minutes.
    """
    with clear_errors(), tempfile.TemporaryDirectory() as work:
        where = choose_device(device)
        names, wanted = chosen("--models", models, list(MODELS)), chosen("--servers", servers, SERVERS)
        measured = Measurements("serve", where, output)
        for name in names:
            for line in measure(name, where.type, seconds, rounds, Path(work), wanted):
                measured.add(line)


if __name__ == "__main__":
    typer.run(main)
