"""Many clients at once that send large messages over HTTP or gRPC: raw connections with one buffer."""

import asyncio
import contextlib
import json
import struct
from collections.abc import Awaitable, Callable

from service_fixtures import Served

from twinop.deploy.service.protocol import SERVICE, pb

CHUNK = 16 << 10  # the largest frame that every HTTP/2 server takes
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END = 1  # also: acknowledged

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Exchange = Callable[[Streams, memoryview, int], Awaitable[str]]
ANSWER_SECONDS = 120


async def _send(writer: asyncio.StreamWriter, data: memoryview) -> None:
    with contextlib.suppress(ConnectionError):  # the answer says why
        for at in range(0, len(data), CHUNK):
            writer.write(data[at : at + CHUNK])
            await writer.drain()


async def over_http(streams: Streams, message: memoryview, size: int) -> str:
    """Send `size` bytes of a request, and return "ok", or the error."""
    reader, writer = streams
    sending = asyncio.create_task(_send(writer, message[:size]))
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return "ok" if b" 200 " in head else (await reader.readuntil(b"}")).decode()
    finally:
        sending.cancel()


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def _field(name: str, value: str) -> bytes:
    """Return a header in HPACK, as it is."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HEAD = b"".join(
    _field(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/ModelInfer"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)


async def over_grpc(streams: Streams, message: memoryview, size: int) -> str:
    """Send `size` bytes of a call as the server's windows permit, and return "ok", or the trailers."""
    reader, writer = streams
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0) + _frame(HEADERS, 4, 1, HEAD))
    windows, initial, at, has_data = [0xFFFF, 0xFFFF], 0xFFFF, 0, False
    while True:
        while at < size and (count := min(CHUNK, size - at, *windows)) > 0:
            is_last = at + count == len(message)
            writer.write(_frame(DATA, END if is_last else 0, 1, bytes(message[at : at + count])))
            await writer.drain()
            at += count
            windows = [window - count for window in windows]
        length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + await reader.readexactly(9))
        content = await reader.readexactly(length)
        if kind == WINDOW:
            windows[stream] += int.from_bytes(content, "big")
        elif kind == SETTINGS and not flags & END:
            for number, value in struct.iter_unpack(">HI", content):
                if number == 4:  # the initial window of streams
                    windows[1] += value - initial
                    initial = value
            writer.write(_frame(SETTINGS, END, 0))
        elif kind == PING and not flags & END:
            writer.write(_frame(PING, END, 0, content))
        elif kind == DATA:
            has_data = True
        elif kind == HEADERS and flags & END:
            return "ok" if has_data else content.decode("latin-1")
        elif kind in (RESET, GOAWAY):
            return f"frame {kind}: {content!r}"


def http_message(model: str, size: int) -> bytes:
    """Return a whole request with zeros in binary."""
    given = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    lines = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(head) + size}\r\n"
    return f"{lines}Inference-Header-Content-Length: {len(head)}\r\n\r\n".encode() + head + bytes(size)


def grpc_message(model: str, size: int) -> bytes:
    """Return a call's message with zeros, and gRPC's prefix."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="FP32", shape=[size // 4])
    return struct.pack(">BI", 0, request.ByteSize()) + request.SerializeToString()


async def _all(port: int, exchange: Exchange, message: memoryview, clients: int, part: float) -> list[str]:
    gate = asyncio.Event()

    async def one() -> str:
        try:
            streams = await asyncio.open_connection("127.0.0.1", port)
        finally:
            connected.release()
        with contextlib.closing(streams[1]):
            await gate.wait()
            try:
                sending = exchange(streams, message, int(part * len(message)))
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


def outcomes(
    served: Served, protocol: str, model: str, size: int, clients: int, part: float = 1
) -> list[str]:
    """Connect all clients, then let all send a part of a message. Return "ok" or the error for each."""
    if protocol == "http":
        message, exchange, port = http_message(model, size), over_http, served.http_port
    else:
        message, exchange, port = grpc_message(model, size), over_grpc, served.grpc_port or 0
    return asyncio.run(_all(port, exchange, memoryview(message), clients, part))
