"""The servers of the report, side by side on free ports."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinop.bench import report
from twinop.bench.serving.models import Model

OURS, UNBATCHED, KSERVE, FASTAPI = "twinop", "twinop, unbatched", "KServe", "FastAPI"
INSTANCES, GRAPHS = "twinop, 2 instances", "twinop, CUDA graphs"  # on a GPU
REST, GRPC = "REST", "gRPC"
_START_SECONDS = 120


@dataclass(frozen=True)
class Server:
    name: str
    ports: dict[str, int]  # by protocol


def free_ports(count: int) -> list[int]:
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
    """Seconds until it answers; its log if it does not.

    Raises:
        BenchError: it ended, or takes too long.
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
    """The servers, over REST alone, that there are only on a GPU: their options by name."""
    if provider != "cuda":
        return {}
    return {INSTANCES: ["--instances", "2"]} | ({GRAPHS: ["--cuda-graph"]} if model.graphs else {})


@contextlib.contextmanager
def servers(model: Model, path: Path, provider: str, folder: Path) -> Iterator[list[tuple[Server, float]]]:
    """All servers of one model, side by side; with the seconds that each took to be ready."""
    further = more(model, provider)
    ports = free_ports(7 + len(further))
    python, peers = [sys.executable, "-m"], "twinop.bench.serving"
    ours = [*python, "twinop", "serve", str(path), "--provider", provider, "--log-level", "warning"]
    plain = [*python, f"{peers}.kserve_plain", model.name, str(path), provider]
    joining = [*ours, "--max-batch-size", str(model.rows)]
    ready = f"/v2/models/{model.name}/ready"
    cases = [
        (
            Server(OURS, {REST: ports[0], GRPC: ports[1]}),
            [*joining, *_ports(ports[0], ports[1], "-")],
            ready,
        ),
        (Server(KSERVE, {REST: ports[4], GRPC: ports[5]}), [*plain, *_ports(ports[4], ports[5], "_")], ready),
        (
            Server(UNBATCHED, {REST: ports[2], GRPC: ports[3]}),
            [*ours, *_ports(ports[2], ports[3], "-")],
            ready,
        ),
        (
            Server(FASTAPI, {REST: ports[6]}),
            [*python, f"{peers}.fastapi_plain", str(path), provider, str(ports[6])],
            "/openapi.json",
        ),
    ]
    for port, (name, options) in zip(ports[7:], further.items(), strict=True):
        command = [*joining, *options, "--no-grpc", "--http-port", str(port)]
        cases.append((Server(name, {REST: port}), command, ready))
    with contextlib.ExitStack() as stack:
        started = []
        for server, command, probe in cases:
            log = folder / f"{model.name}-{server.name}.log"
            running = stack.enter_context(process(command, log))
            started.append((server, wait_ready(server, probe, running, log)))
        yield started


def _ports(http_port: int, grpc_port: int, dash: str) -> list[str]:
    return [f"--http{dash}port", str(http_port), f"--grpc{dash}port", str(grpc_port)]
