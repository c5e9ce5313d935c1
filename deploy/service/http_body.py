"""Read the body of an HTTP request: limit its size and time, decompress it."""

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from .datatypes import shown
from .errors import TOO_LARGE, TOO_SLOW, WRONG_MEDIA, ServiceError, invalid
from .limits import RequestMemory
from .newer_python import timeout

_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits
_MOST_RATIO = 1032  # deflate's largest compression


@dataclass(frozen=True)
class Limit:
    """The largest request, or the largest JSON in one. The other fields are for the message."""

    bytes: int
    setting: str = "max_request_bytes"
    what: str = "request"
    advice: str = ""

    def exceeded(self, how: str = "") -> ServiceError:
        """Return the error for more than `bytes`; `how` qualifies what is too large."""
        said = f"the {how}{self.what} is larger than {self.bytes} bytes ({self.setting}){self.advice}"
        return ServiceError(TOO_LARGE, said)


async def read(request: Request, limit: Limit, seconds: float, memory: RequestMemory) -> bytes:
    """Read and decompress the whole body, and count it twice in `memory` as it arrives, because it is copied.

    Raises:
        ServiceError: the body is too large, damaged, of an unsupported encoding, does not arrive within
            `seconds`, or exceeds the budget of all requests.
        ClientDisconnect: the client closed the connection before the end of the body.
    """
    if "upgrade" in request.headers:
        raise invalid("a request with a body cannot ask for an upgrade: send it without the header Upgrade")
    wbits = _compression(request.headers)
    if int(request.headers.get("content-length", 0)) > limit.bytes:
        raise limit.exceeded()
    try:
        async with timeout(seconds):
            body = await _received(request, limit, memory)
    except TimeoutError:
        said = f"the body did not arrive within {seconds:g} s (body_seconds)"
        raise ServiceError(TOO_SLOW, said, {"Connection": "close"}) from None
    if wbits is None or not body:
        return body
    most = min(limit.bytes, _MOST_RATIO * len(body))
    memory.reserve(most)
    content = await asyncio.to_thread(decompressed, body, wbits, limit)
    memory.reserve(2 * len(content) - 2 * len(body) - most)
    return content


async def _received(request: Request, limit: Limit, memory: RequestMemory) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message["body"])
        size += len(chunks[-1])
        if size > limit.bytes:
            raise limit.exceeded()
        memory.reserve(2 * len(chunks[-1]))
        more = message["more_body"]
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _compression(headers: Mapping[str, str]) -> int | None:
    """Return zlib's `wbits`, or None for an uncompressed body; raise ServiceError for an unknown encoding."""
    given = headers.get("content-encoding", "identity").strip().lower()
    if given in ("identity", ""):
        return None
    if given not in _ENCODINGS:
        message = f"content encoding {shown(given)}: send gzip, deflate, or the body as it is"
        raise ServiceError(WRONG_MEDIA, message, {"Accept-Encoding": "gzip, deflate"})
    return _ENCODINGS[given]


def decompressed(body: bytes, wbits: int, limit: Limit) -> bytes:
    """Decompress at most `limit` bytes; raise ServiceError for more, and for a damaged body."""
    inflate = zlib.decompressobj(wbits)
    try:
        content = inflate.decompress(body, limit.bytes + 1)
    except zlib.error:
        raise invalid("the compressed body is damaged, or not what Content-Encoding says") from None
    if len(content) > limit.bytes:
        raise limit.exceeded("decompressed ")
    if not inflate.eof or inflate.unused_data:
        raise invalid("the compressed body is cut off, or something follows it")
    return content
