"""The body of an HTTP request: of a content type that is known, not too large, decompressed."""

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from twinop.deploy.service.datatypes import shown
from twinop.deploy.service.errors import TOO_LARGE, WRONG_MEDIA, ServiceError, invalid

_MEDIA = {"", "application/json", "application/octet-stream", "application/x-www-form-urlencoded"}
"""The last is what curl -d says unless told otherwise."""
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits


@dataclass(frozen=True)
class Limit:
    """Of a request, or of its JSON; the rest is for the message."""

    bytes: int
    setting: str = "max_request_bytes"
    what: str = "request"
    advice: str = ""

    def exceeded(self, how: str = "") -> ServiceError:
        said = f"the {how}{self.what} is larger than {self.bytes} bytes ({self.setting}){self.advice}"
        return ServiceError(TOO_LARGE, said)


async def read(request: Request, limit: Limit) -> bytes:
    """
    Raises:
        ServiceError: it is too large, of another content type, or damaged.
        ClientDisconnect: it did not come.
    """
    headers, receive = request.headers, request.receive
    _check_media(headers)
    wbits = _compression(headers)
    if int(headers.get("content-length", 0)) > limit.bytes:
        raise limit.exceeded()
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message["body"])
        size += len(chunks[-1])
        if size > limit.bytes:
            raise limit.exceeded()
        more = message["more_body"]
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if wbits is not None and body:
        body = await asyncio.to_thread(decompressed, body, wbits, limit)
    return body


def _check_media(headers: Mapping[str, str]) -> None:
    """
    Raises:
        ServiceError: the body is said to be something else than JSON, or JSON and tensors.
    """
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() not in _MEDIA:
        raise ServiceError(
            WRONG_MEDIA,
            f"content type {shown(given)}: send application/json, or application/octet-stream with the "
            "header Inference-Header-Content-Length",
        )


def _compression(headers: Mapping[str, str]) -> int | None:
    """zlib's word for how the body is compressed; None where it is not.

    Raises:
        ServiceError: in a way not known here.
    """
    given = headers.get("content-encoding", "identity").strip().lower()
    if given in ("identity", ""):
        return None
    if given not in _ENCODINGS:
        message = f"content encoding {shown(given)}: send gzip, deflate, or the body as it is"
        raise ServiceError(WRONG_MEDIA, message, {"Accept-Encoding": "gzip, deflate"})
    return _ENCODINGS[given]


def decompressed(body: bytes, wbits: int, limit: Limit) -> bytes:
    """
    Raises:
        ServiceError: it is damaged, or longer than `limit` (no more than that is decompressed).
    """
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
