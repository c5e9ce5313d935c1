"""How a request can fail: one table maps each failure to an HTTP status and a gRPC code."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from starlette.requests import ClientDisconnect


@dataclass(frozen=True)
class Failure:
    """A kind of failure. `reason` is its label in the metrics."""

    reason: str
    status: int
    code: grpc.StatusCode


INVALID = Failure("invalid", 400, grpc.StatusCode.INVALID_ARGUMENT)
UNAUTHENTICATED = Failure("unauthenticated", 401, grpc.StatusCode.UNAUTHENTICATED)
NOT_FOUND = Failure("not_found", 404, grpc.StatusCode.NOT_FOUND)
NO_METHOD = Failure("no_method", 405, grpc.StatusCode.UNIMPLEMENTED)
TOO_SLOW = Failure("too_slow", 408, grpc.StatusCode.DEADLINE_EXCEEDED)
TOO_LARGE = Failure("too_large", 413, grpc.StatusCode.RESOURCE_EXHAUSTED)
WRONG_MEDIA = Failure("wrong_media", 415, grpc.StatusCode.INVALID_ARGUMENT)
OVERLOADED = Failure("overloaded", 429, grpc.StatusCode.RESOURCE_EXHAUSTED)
CANCELLED = Failure("cancelled", 499, grpc.StatusCode.CANCELLED)
RUN_FAILED = Failure("run_failed", 500, grpc.StatusCode.INTERNAL)
INTERNAL = Failure("internal", 500, grpc.StatusCode.INTERNAL)
NOT_READY = Failure("not_ready", 503, grpc.StatusCode.UNAVAILABLE)
BROKEN = Failure("broken", 503, grpc.StatusCode.UNAVAILABLE)
OUT_OF_MEMORY = Failure("out_of_memory", 503, grpc.StatusCode.RESOURCE_EXHAUSTED)
OVER_BUDGET = Failure("over_budget", 503, grpc.StatusCode.RESOURCE_EXHAUSTED)
DEADLINE = Failure("deadline", 504, grpc.StatusCode.DEADLINE_EXCEEDED)
RUN_TOO_LONG = Failure("run_too_long", 504, grpc.StatusCode.DEADLINE_EXCEEDED)


_MOST_ASCII = 2000
_MOST_OTHER = 500  # gRPC encodes a character in up to 12 bytes, and clients accept 8 KiB of metadata


class ServiceError(Exception):
    """Ends one request. The client receives the message, so it must not contain paths or stack traces.

    The message may quote the client's data. If that makes it too long, its middle is cut out.
    """

    def __init__(self, failure: Failure, message: str, headers: Mapping[str, str] | None = None) -> None:
        most = _MOST_ASCII if message.isascii() else _MOST_OTHER
        if len(message) > most:
            message = f"{message[: most // 2]} ... {message[-most // 2 + 5 :]}"
        super().__init__(message)
        self.failure = failure
        self.headers = dict(headers or {})


def failure_of(error: BaseException) -> Failure:
    """Return how a request failed that raised `error`."""
    if isinstance(error, ServiceError):
        return error.failure
    return CANCELLED if isinstance(error, asyncio.CancelledError | ClientDisconnect) else INTERNAL


def out_of_memory() -> ServiceError:
    """Return the error for a request that takes more memory than there is."""
    said = "not enough memory for this request: send fewer rows or smaller tensors"
    return ServiceError(OUT_OF_MEMORY, said)


def invalid(message: str) -> ServiceError:
    """Return the error for a client's mistake."""
    return ServiceError(INVALID, message)
