"""The clients of the serving report, and the requests that they send.

`python -m twinop.bench.serving.load JSON` runs the clients in a process of their own. Each client sends the
same request again as soon as it has its answer.
"""

import asyncio
import http.client
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from .. import report
from .servers import FASTAPI, GRPC, OURS, REST, Model, Server

METHOD = "/inference.GRPCInferenceService/ModelInfer"

# ------------------------------------------------------------------------------------------- requests


def requests(model: Model, folder: Path) -> dict[tuple[str, str], Path]:
    """Writes the requests as files, and returns them by protocol and server: FastAPI or another."""
    from twinop.deploy.service.protocol import pb

    inputs = model.inputs()
    raw = [array.tobytes() for array in inputs.values()]
    tensors = [
        {"name": name, "shape": list(array.shape), "datatype": _datatype(array)}
        for name, array in inputs.items()
    ]
    sizes = [{"parameters": {"binary_data_size": len(each)}} for each in raw]
    described = [tensor | size for tensor, size in zip(tensors, sizes, strict=True)]
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    message = pb.ModelInferRequest(model_name=model.name, inputs=tensors, raw_input_contents=raw)
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    found = {
        (REST, OURS): _post(f"/v2/models/{model.name}/infer", header + b"".join(raw), length),
        (REST, FASTAPI): _post("/infer", b"".join(raw), ""),
        (GRPC, OURS): message.SerializeToString(),
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


def check(server: Server, request: Path, expected: np.ndarray) -> None:
    """Sends the HTTP request once and compares the answer.

    Raises:
        BenchError: the answer differs from the output of a session.
    """
    with socket.create_connection(("127.0.0.1", server.ports[REST]), timeout=30) as connection:
        connection.sendall(request.read_bytes())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    tail = np.frombuffer(body[-expected.nbytes :], expected.dtype) if answer.status == 200 else np.empty(0)
    if tail.size != expected.size or not np.allclose(tail, expected.ravel(), rtol=1e-3, atol=1e-4):
        raise report.BenchError(f"{server.name} gives a wrong answer ({answer.status}): {body[:300]!r}")


# ------------------------------------------------------------------------------------------- clients


@dataclass(frozen=True)
class Load:
    """What to send, by how many clients, and for how long.

    Args:
        request: a file with the bytes of an HTTP request, or with a gRPC message.
        grpc_method: empty for HTTP.
        warm_up: seconds before the measurement.
    """

    port: int
    request: str
    clients: int
    seconds: float
    grpc_method: str = ""
    warm_up: float = 0.5


_CHUNKED = 0  # no content length: KServe sends binary answers in chunks, with an empty one at the end


class _Http(asyncio.Protocol):
    """One persistent connection. Of an answer's head it reads only the status and the length."""

    def __init__(self, request: bytes, times: list[tuple[float, float]], failed: list[str]) -> None:
        self._request, self._times, self._failed = request, times, failed
        self._buffer = bytearray()
        self._missing = -1  # length of the answer in bytes; -1 until its head has arrived
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
        # A pool of its own keeps each channel on its own connection.
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
    """Runs the clients. Returns latencies in milliseconds, and the throughput in requests per second."""
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


def command(load: Load) -> list[str]:
    """Returns the command line that runs the clients."""
    return [sys.executable, "-m", "twinop.bench.serving.load", json.dumps(asdict(load))]


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.loads(sys.argv[1])))))
