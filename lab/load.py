"""The clients of the serving report: `python -m twinop.bench.serving.load JSON`, in processes of their own.

Each client sends the same request again as soon as it has its answer. This module imports no torch.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

METHOD = "/inference.GRPCInferenceService/ModelInfer"
WARM_UP = 0.5  # seconds before the measurement


@dataclass(frozen=True)
class Load:
    """What to send, by how many clients, and for how long.

    Args:
        request: a file with the bytes of an HTTP request, or with a gRPC message.
        grpc_method: empty for HTTP.
        processes: among how many processes the clients are divided.
    """

    port: int
    request: str
    clients: int
    seconds: float
    grpc_method: str = ""
    processes: int = 1


@dataclass
class Answers:
    """The time of each answer and how long it took, in seconds; and the errors."""

    times: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, started: float, failure: str = "") -> None:
        now = time.perf_counter()
        self.times.append((now, now - started))
        if failure:
            self.failures.append(failure)


class _Http(asyncio.Protocol):
    """One persistent connection. The parser of uvicorn keeps the client cheap beside the server."""

    def __init__(self, request: bytes, answers: Answers) -> None:
        from httptools import HttpResponseParser

        self._request, self._answers = request, answers
        self._parser = HttpResponseParser(self)
        self.done = asyncio.get_running_loop().create_future()
        self.stop = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        self._answers.add(self._started, f"status {status}" if status != 200 else "")
        if self.stop:
            self._transport.close()
            self.done.set_result(None)
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._answers.failures.append(f"connection lost: {error}")
            self.done.set_result(None)


async def _http(load: Load, request: bytes, answers: Answers) -> None:
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: _Http(request, answers), "127.0.0.1", load.port)
        for _ in range(load.clients)
    ]
    await asyncio.sleep(WARM_UP + load.seconds)
    for _, client in made:
        client.stop = True
    await asyncio.gather(*(client.done for _, client in made))


async def _grpc(load: Load, request: bytes, answers: Answers) -> None:
    import grpc

    end = time.perf_counter() + WARM_UP + load.seconds

    async def client() -> None:
        # A pool of its own keeps each channel on its own connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{load.port}", options) as channel:
            call = channel.unary_unary(load.grpc_method)
            while (started := time.perf_counter()) < end:
                try:
                    await call(request)
                    answers.add(started)
                except grpc.aio.AioRpcError as error:
                    answers.add(started, error.details() or str(error.code()))

    await asyncio.gather(*(client() for _ in range(load.clients)))


def percentiles(times: Sequence[float], seconds: float) -> dict[str, float]:
    """Returns latencies in milliseconds, and the throughput in requests per second."""
    values = np.percentile(times, [50, 90, 99]) * 1e3 if times else [float("nan")] * 3
    names = ("p50_ms", "p90_ms", "p99_ms")
    found = {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}
    return found | {"per_second": round(len(times) / seconds, 1)}


def run(load: Load) -> dict[str, Any]:
    """Runs the clients. Returns `percentiles` of their answers, and the failures."""
    shares = [load.clients // load.processes] * load.processes
    shares[0] += load.clients % load.processes
    loads = [replace(load, clients=share) for share in shares]
    if len(loads) == 1:
        parts = [_run(load)]
    else:
        with ProcessPoolExecutor(len(loads)) as pool:
            parts = list(pool.map(_run, loads))
    kept = [took for part in parts for took in part[0]]
    return percentiles(kept, load.seconds) | {"failures": [text for part in parts for text in part[1]]}


def _run(load: Load) -> tuple[list[float], list[str]]:
    """Runs clients in this process. Returns the times of answers after the warm-up, and the failures."""
    import uvloop

    answers, request = Answers(), Path(load.request).read_bytes()
    first = time.perf_counter() + WARM_UP
    uvloop.run((_grpc if load.grpc_method else _http)(load, request, answers))
    return [took for at, took in answers.times if first <= at <= first + load.seconds], answers.failures


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.loads(sys.argv[1])))))
