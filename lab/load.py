"""Clients of the service, each of which sends the same request again as soon as it has its answer.

    python lab/load.py PORT REQUEST CLIENTS SECONDS [GRPC_METHOD]

REQUEST is a file with the bytes of an HTTP request, or with a gRPC message. It prints JSON: the seconds that
each answer took, and the failures. It imports no torch, because it runs beside the servers.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvloop
from httptools import HttpResponseParser

WARM_UP = 0.5  # seconds before the measurement


class Http(asyncio.Protocol):
    """One persistent connection. The parser of uvicorn keeps the client cheap beside the server."""

    def __init__(self, request: bytes, answered: Callable[[float, str], None]) -> None:
        self._request, self._answered = request, answered
        self._parser = HttpResponseParser(self)

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
        self._answered(self._started, f"status {status}" if status != 200 else "")
        self._send()

    def eof_received(self) -> None:
        self._answered(self._started, "the server closed the connection")


Answered = Callable[[float, str], None]
"""Takes when a request was sent, and what was wrong."""


async def over_http(port: int, request: bytes, clients: int, seconds: float, answered: Answered) -> None:
    loop = asyncio.get_running_loop()
    client, address = partial(Http, request, answered), ("127.0.0.1", port)
    made = [await loop.create_connection(client, *address) for _ in range(clients)]
    await asyncio.sleep(WARM_UP + seconds)
    for transport, _ in made:
        transport.abort()


async def over_grpc(
    port: int, request: bytes, clients: int, seconds: float, answered: Answered, method: str
) -> None:
    end = time.perf_counter() + WARM_UP + seconds

    async def client() -> None:
        # A pool of its own keeps each channel on its own connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(method)
            while (started := time.perf_counter()) < end:
                try:
                    await call(request)
                    answered(started, "")
                except grpc.aio.AioRpcError as error:
                    answered(started, error.details() or str(error.code()))

    await asyncio.gather(*(client() for _ in range(clients)))


def main(port: str, request: str, clients: str, seconds: str, *method: str) -> None:
    times: list[float] = []
    failures: list[str] = []
    first = time.perf_counter() + WARM_UP

    def answered(started: float, failure: str) -> None:
        now = time.perf_counter()
        if failure:
            failures.append(failure)
        elif first <= now <= first + float(seconds):
            times.append(now - started)

    run = over_grpc if method else over_http
    content = Path(request).read_bytes()
    uvloop.run(run(int(port), content, int(clients), float(seconds), answered, *method))
    print(json.dumps({"times": times, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
