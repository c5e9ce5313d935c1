"""Many clients at once that send large messages over HTTP: raw connections with one buffer."""

import asyncio
import contextlib
import json

from service_fixtures import Served

CHUNK = 16 << 10

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ANSWER_SECONDS = 120


async def _send(writer: asyncio.StreamWriter, data: memoryview) -> None:
    with contextlib.suppress(ConnectionError):  # the answer says why
        for at in range(0, len(data), CHUNK):
            writer.write(data[at : at + CHUNK])
            await writer.drain()


async def over_http(streams: Streams, message: memoryview) -> str:
    """Send a request, and return "ok", or the error."""
    reader, writer = streams
    sending = asyncio.create_task(_send(writer, message))
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return "ok" if b" 200 " in head else (await reader.readuntil(b"}")).decode()
    finally:
        sending.cancel()


def http_message(model: str, size: int) -> bytes:
    """Return a whole request with zeros in binary."""
    given = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    lines = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(head) + size}\r\n"
    return f"{lines}Inference-Header-Content-Length: {len(head)}\r\n\r\n".encode() + head + bytes(size)


async def _all(port: int, message: memoryview, clients: int) -> list[str]:
    gate = asyncio.Event()

    async def one() -> str:
        try:
            streams = await asyncio.open_connection("127.0.0.1", port)
        finally:
            connected.release()
        with contextlib.closing(streams[1]):
            await gate.wait()
            try:
                sending = over_http(streams, message)
                return await asyncio.wait_for(sending, ANSWER_SECONDS)
            except asyncio.TimeoutError:
                return f"no answer within {ANSWER_SECONDS} s"
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                return repr(error)

    connected = asyncio.Semaphore(0)
    running = [asyncio.create_task(one()) for _ in range(clients)]
    for _ in range(clients):
        await connected.acquire()
    gate.set()
    return await asyncio.gather(*running)


def outcomes(served: Served, model: str, size: int, clients: int) -> list[str]:
    """Connect all clients, then let all send a message. Return "ok" or the error for each."""
    message = memoryview(http_message(model, size))
    return asyncio.run(_all(served.http_port, message, clients))
