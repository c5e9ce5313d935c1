"""python -m twinop.bench.serving.load: clients that send one request over and over, each as soon as it has
its answer. A process of its own, so that the server's Python has its core to itself."""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop


@dataclass(frozen=True)
class Load:
    """What is sent: an HTTP request's bytes, or a gRPC message; for how long, by how many clients."""

    port: int
    request: str  # a file
    clients: int
    seconds: float
    grpc_method: str = ""  # empty: HTTP
    warm_up: float = 0.5


_CHUNKED = 0  # no length: KServe's binary answers come in chunks, of which the last is empty


class _Http(asyncio.Protocol):
    """One keep-alive connection. The answers' heads are read no further than their length."""

    def __init__(self, request: bytes, times: list[tuple[float, float]], failed: list[str]) -> None:
        self._request, self._times, self._failed = request, times, failed
        self._buffer = bytearray()
        self._missing = -1  # bytes of the answer; -1: its head is not there yet
        self.done = asyncio.get_running_loop().create_future()
        self.stop = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._missing < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            _, found, length = head.partition(b"\r\ncontent-length:")  # not Inference-Header-Content-Length
            self._missing = end + 4 + int(length.split(b"\r\n", 1)[0]) if found else _CHUNKED
            if not head.startswith(b"http/1.1 200"):
                self._failed.append(head[:60].decode("latin-1"))
        if len(self._buffer) < self._missing or (
            self._missing == _CHUNKED and not self._buffer.endswith(b"\r\n0\r\n\r\n")
        ):
            return
        now = time.perf_counter()
        self._times.append((now, now - self._started))
        self._buffer.clear()
        self._missing = -1
        if self.stop:
            self._transport.close()
            self.done.set_result(None)
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._failed.append(f"connection lost: {error}")
            self.done.set_result(None)


async def _http(load: Load, request: bytes, times: list[tuple[float, float]], failed: list[str]) -> None:
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(load.clients):
        _, client = await loop.create_connection(
            lambda: _Http(request, times, failed), "127.0.0.1", load.port
        )
        made.append(client)
    await asyncio.sleep(load.warm_up + load.seconds)
    for client in made:
        client.stop = True
    await asyncio.gather(*(client.done for client in made))


async def _grpc(load: Load, request: bytes, times: list[tuple[float, float]], failed: list[str]) -> None:
    import grpc

    end = time.perf_counter() + load.warm_up + load.seconds

    async def client() -> None:
        # Channels of the same arguments share a connection: an argument of its own keeps them apart.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{load.port}", options) as channel:
            call = channel.unary_unary(load.grpc_method)
            while (started := time.perf_counter()) < end:
                try:
                    await call(request)
                except grpc.aio.AioRpcError as error:
                    failed.append(error.details() or str(error.code()))
                now = time.perf_counter()
                times.append((now, now - started))

    await asyncio.gather(*(client() for _ in range(load.clients)))


def run(load: Load) -> dict[str, Any]:
    """Latencies in milliseconds, throughput in requests per second."""
    times: list[tuple[float, float]] = []
    failed: list[str] = []
    request = Path(load.request).read_bytes()
    started = time.perf_counter()
    uvloop.run((_grpc if load.grpc_method else _http)(load, request, times, failed))
    first, last = started + load.warm_up, started + load.warm_up + load.seconds
    kept = [seconds for at, seconds in times if first <= at <= last]
    p50, p90, p99 = np.percentile(kept, [50, 90, 99]) * 1e3 if kept else (float("nan"),) * 3
    return {
        "p50_ms": round(float(p50), 4),
        "p90_ms": round(float(p90), 4),
        "p99_ms": round(float(p99), 4),
        "per_second": round(len(kept) / load.seconds, 1),
        "requests": len(kept),
        "failed": len(failed),
        "failures": sorted(set(failed))[:3],
    }


def arguments(load: Load) -> list[str]:
    return [
        sys.executable,
        "-m",
        __spec__.name if __spec__ else "twinop.bench.serving.load",
        json.dumps(asdict(load)),
    ]


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.loads(sys.argv[1])))))
