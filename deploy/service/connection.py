"""uvicorn's HTTP connection with limits on the size of a request's head and on the time it takes to arrive.

Without these limits a client that sends a byte a minute, or endless headers, holds its connection and memory.
A request that arrives in one piece sets no timer.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from . import metrics
from .errors import HEAD_TOO_LARGE, INVALID, TOO_SLOW, Failure

LINGER_SECONDS = 2.0  # closing at once would reset the connection before the client has read the answer
REST_SECONDS = 0.01  # between reads of discarded data, so that endless senders do not occupy the event loop
MOST_PIPELINED = 8  # requests that wait on one connection; the socket buffers hold the rest


@dataclass(frozen=True)
class Limits:
    """The limits for a request on one connection."""

    header_bytes: int
    header_seconds: float
    body_seconds: float


class _Stage(Enum):
    IDLE = auto()  # between requests
    HEAD = auto()  # a part of the request line or of the headers has arrived
    BODY = auto()
    REFUSED = auto()  # the last answer is sent; further data is discarded


_BODY_HEADERS = {b"content-length", b"transfer-encoding"}


class _Refused(Exception):
    """Raised in a callback of the parser to stop it."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to an oversized head, 408 to a request that arrives too slowly, 400 to malformed HTTP."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._stage = _Stage.IDLE
        self._head = 0  # bytes received while the head is incomplete
        self._timer: asyncio.TimerHandle | None = None
        self._timed = _Stage.IDLE  # the stage that the timer limits
        self._started: RequestResponseCycle | None = None  # self.cycle, the newest, may still be queued

    # ---------------------------------------------------------------------------- asyncio's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(_Stage.HEAD, self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        cycle = self._started
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            _abandon(cycle.scope)

    def data_received(self, data: bytes) -> None:
        if self._stage is _Stage.REFUSED:
            self._rest()
        at = 0
        while at < len(data) and self._stage is not _Stage.REFUSED:
            room = self._limits.header_bytes + 1 - self._head
            is_body = self._stage is _Stage.BODY
            part = data[at:] if is_body or room <= 0 else data[at : at + room]  # enough to exceed the limit
            self._head += 0 if is_body else len(part)
            at += len(part)
            super().data_received(part)
            self._watch_stage()

    def _watch_stage(self) -> None:
        stage = self._stage
        if stage is _Stage.HEAD:
            if self._head > self._limits.header_bytes:
                self._too_long()
            else:
                self._watch(_Stage.HEAD, self._limits.header_seconds)
        elif stage is _Stage.BODY:
            self._watch(_Stage.BODY, self._limits.body_seconds)
        elif stage is _Stage.IDLE:
            if self.cycle is None or (self.cycle.response_complete and self.timeout_keep_alive_task is None):
                self._watch(_Stage.HEAD, self._limits.header_seconds)  # only empty lines have arrived
            else:
                self._unwatch()

    def shutdown(self) -> None:
        """Stop: close an idle connection, or one in mid-request after its answer."""
        if self._stage is _Stage.IDLE:
            super().shutdown()
        elif self._stage is _Stage.BODY:
            self.cycle.keep_alive = False

    # ---------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        self._stage = _Stage.HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._head > self._limits.header_bytes and self._exact_head() > self._limits.header_bytes:
            raise _Refused
        if self.parser.should_upgrade() and (
            self.parser.get_method() == b"CONNECT" or any(name in _BODY_HEADERS for name, _ in self.headers)
        ):
            raise _Refused  # the parser would take the body for another protocol
        self._stage, self._head = _Stage.BODY, 0
        super().on_headers_complete()
        self._read_on()

    def on_message_complete(self) -> None:
        self._stage = _Stage.IDLE
        super().on_message_complete()
        self._read_on()

    def send_400_response(self, msg: str) -> None:
        if self._stage is _Stage.HEAD and self._head > self._limits.header_bytes:
            self._too_long()
        elif self._stage is not _Stage.REFUSED:
            self._refuse(INVALID, "malformed HTTP/1.1 request, or one with a body that asks for an upgrade")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._started = cycle
        super()._start_asgi_task(cycle, app)

    def _read_on(self) -> None:
        """Keep reading while a request waits or runs, to notice when the client disconnects."""
        if len(self.pipeline) < MOST_PIPELINED:
            self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """Do not warn: upgrades are never accepted."""

    # ---------------------------------------------------------------------------- limits

    def _exact_head(self) -> int:
        """Return the size of the head without data that arrived in the same piece."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _rest(self) -> None:
        self.flow.pause_reading()
        self.loop.call_later(REST_SECONDS, self.flow.resume_reading)

    def _too_long(self) -> None:
        limit = self._limits.header_bytes
        self._refuse(
            HEAD_TOO_LARGE,
            f"the request line and the headers are longer than {limit} bytes (max_header_bytes)",
        )

    def _watch(self, what: _Stage, seconds: float) -> None:
        if self._timer is None or self._timed is not what:
            self._unwatch()
            self._timed = what
            self._timer = self.loop.call_later(seconds, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        limits = self._limits
        if self.flow.read_paused:  # the server is not reading, so the client cannot be late
            self._watch(self._timed, limits.body_seconds)
        elif self._stage is _Stage.IDLE:
            self.transport.close()
        elif self._stage is _Stage.HEAD:
            self._refuse(
                TOO_SLOW, f"the headers did not arrive within {limits.header_seconds:g} s (header_seconds)"
            )
        else:
            self._refuse(TOO_SLOW, f"the body did not arrive within {limits.body_seconds:g} s (body_seconds)")

    def _refuse(self, failure: Failure, message: str) -> None:
        """Answer without the app, which has no complete request to answer."""
        metrics.failed_without_model(failure)
        self._unwatch()
        in_body, cycle = self._stage is _Stage.BODY, self.cycle
        self._stage = _Stage.REFUSED
        if cycle is not None and not cycle.response_complete:
            if not in_body:  # an earlier request is still being answered: make that answer the last
                cycle.keep_alive = False
                return
            if self.pipeline:  # answer after the earlier requests
                answer = JSONResponse({"error": message}, failure.status, {"connection": "close"})
                self.pipeline[0] = (cycle, answer)  # type: ignore[assignment]
                return
            cycle.disconnected = True
            cycle.message_event.set()
        if not in_body or not cycle.response_started:
            body = orjson.dumps({"error": message})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[failure.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def wait_in(scope: Scope) -> None:
    """Let a disconnect of the client cancel the current task, which from now on only waits and answers."""
    scope[_WAITING] = asyncio.current_task()


def has_gone(scope: Scope) -> bool:
    """Return whether the client disconnected after `wait_in`."""
    return scope.get(_GONE, False)


def _abandon(scope: Any) -> None:
    if (waiting := scope.get(_WAITING)) is not None:
        scope[_GONE] = True
        waiting.cancel()


_WAITING, _GONE = "twinop.waiting", "twinop.gone"
