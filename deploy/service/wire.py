"""Split large gRPC requests and answers at their raw tensors, which then need no copy through protobuf.

The format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .protocol import pb
from .request import LARGE

MOST_BYTES = (2 << 30) - 1  # in a message
_MOST_FIELDS = 1024  # in a message that is split; protobuf reads more fields faster
_LENGTH_DELIMITED = 2  # a wire type
_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER


@dataclass(slots=True)
class InferRequest:
    """A request: `message` lacks the tensors in `raw`; `size` is in bytes."""

    message: pb.ModelInferRequest
    size: int
    raw: Sequence[bytes | memoryview]

    @property
    def id(self) -> str:
        """The client's id."""
        given: str = self.message.id
        return given


def parse(data: bytes) -> InferRequest:
    """Parse a request, without copying the raw tensors of a large one.

    Raises:
        DecodeError: it is not a message of the protocol.
    """
    rest, raw = _split(memoryview(data)) if len(data) > LARGE else (data, [])
    message = pb.ModelInferRequest.FromString(rest)
    return InferRequest(message, len(data), raw or message.raw_input_contents)


def _split(data: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return the message without its raw tensors, and these. Protobuf reads unusual messages as a whole."""
    rest, raw, at = list[memoryview](), list[memoryview](), 0
    for _ in range(_MOST_FIELDS):
        if at == len(data):
            return b"".join(rest), raw
        key, (size, start) = data[at], _length(data[at + 1 : at + 6])
        end = at + 1 + start + size
        if key >= 0x80 or key & 7 != _LENGTH_DELIMITED or not start or end > len(data):
            break
        if key >> 3 == _RAW:
            raw.append(data[end - size : end])
        else:
            rest.append(data[at:end])
        at = end
    return bytes(data), []


def _length(data: memoryview) -> tuple[int, int]:
    """Return the number at the start of `data` and how many bytes it takes: 0 if it is not complete."""
    number = 0
    for index, byte in enumerate(data):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, index + 1
    return 0, 0


def field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field."""
    return b"".join(prefixed(number, value))


def prefixed(number: int, part: Any) -> list[Any]:
    """Return a length-delimited field in two parts, so that a large value need not be copied."""
    return [bytes([number << 3 | _LENGTH_DELIMITED, *_digits(memoryview(part).nbytes)]), part]


def _digits(number: int) -> Iterator[int]:
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number
