"""The REST server: ids, tokens and limits on uvicorn, and a shutdown that loses no request."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinop.errors import TwinopError

from . import logs, metrics
from .errors import NOT_READY, UNAUTHENTICATED
from .http_endpoints import FAILURES, Endpoints, as_json
from .operations import Token
from .repository import Repository
from .request import Budget

KEEP_ALIVE_SECONDS = 65  # longer than proxies, which might otherwise reuse a connection that is just closed
DRAIN_IDLE_SECONDS = 1.0  # a request may still arrive on an open connection of a stopping server
CUT_OFF_SECONDS = 0.5  # to answer those whose grace time is over


class AddressError(TwinopError):
    """A port cannot be bound."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; AddressError: it cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # until then, another server could bind it, too
        found.setblocking(False)
    except (OSError, ValueError) as error:  # ValueError: no host can have this name
        raise address_error(
            host, port, "--http-port", getattr(error, "strerror", "") or str(error)
        ) from error
    return found


def address_error(host: str, port: int, option: str, why: str) -> AddressError:
    """Return the error for an address that cannot be bound, with the reason `why`."""
    return AddressError(
        f"cannot listen on port {port} of {host}: {why}. Stop what uses it, or choose another with {option} "
        "(0: any that is free) or --host"
    )


class RequestMiddleware:
    """Handles every request: its id, the token, and clients that disconnect."""

    def __init__(self, app: ASGIApp, token: Token) -> None:
        self.draining = False
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, authorization, closes = "", b"", False
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value
            elif name == b"upgrade":  # the parser takes what follows for another protocol
                closes = True
        number = logs.begin(given).encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", number)]
                if self.draining or closes:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        if not self._token.allow(scope["path"], authorization):
            metrics.failed_without_model(UNAUTHENTICATED)
            said = {"error": "this server wants a token: send the header Authorization: Bearer <token>"}
            refusal = as_json(said, UNAUTHENTICATED.status, {"www-authenticate": "Bearer"})
            await refusal(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            refusal = as_json({"error": "the server stopped before it could answer"}, NOT_READY.status)
            with contextlib.suppress(RuntimeError):  # the answer has begun
                await refusal(scope, receive, answer)
        except Exception:  # answered and logged by `_bug` in http_endpoints.py
            pass


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers, because the service has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def take_waiting(self, listener: socket.socket) -> None:
        """Accept the connections that are pending in the listener's queue."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        make = functools.partial(protocol, self.config, self.server_state, self.lifespan.state, loop)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                await loop.connect_accepted_socket(make, connection)


class RestServer:
    """HTTP on one port, from `start` to `drain`."""

    def __init__(self, repository: Repository, budget: Budget, token: Token) -> None:
        """Bind the port; AddressError: it is in use, or the host is not this machine's."""
        self.settings = settings = repository.settings.server
        app = Starlette(routes=Endpoints(repository, budget).routes(), exception_handlers=FAILURES)
        app.router.redirect_slashes = False
        self._middleware = RequestMiddleware(app, token)
        self.config = uvicorn.Config(
            self._middleware,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self.config.load()
        self._socket = bound(settings.host, settings.http_port)
        self.ports = {"http_port": self._socket.getsockname()[1]}
        self._server = _Uvicorn(self.config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start, and return when connections are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            await self._serving  # raises the cause

    async def drain(self, grace: float) -> bool:
        """Stop listening, answer requests for `grace` seconds, close; return whether all were answered."""
        if self._serving is None:
            self._socket.close()
            return True
        loop, server = asyncio.get_running_loop(), self._server
        end = loop.time() + grace
        self._middleware.draining = True
        listener = self._socket.dup()
        for listening in server.servers:
            listening.close()
        await server.take_waiting(listener)
        listener.close()
        idle_end = loop.time() + min(DRAIN_IDLE_SECONDS, grace)
        while server.server_state.connections and loop.time() < idle_end:
            await asyncio.sleep(0.02)
        self.config.timeout_graceful_shutdown = max(end - loop.time(), 0)  # type: ignore[assignment]
        server.should_exit = True
        await self._serving
        cut_off = set(server.server_state.tasks)  # uvicorn has cancelled them
        if cut_off:
            await asyncio.wait(cut_off, timeout=CUT_OFF_SECONDS)
        return not cut_off
