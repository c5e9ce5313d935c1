"""The REST server: routes, ids, a token and limits on uvicorn, and a shutdown that loses no request."""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import ids, logs, metrics, shared_memory_calls, spans
from .addresses import LoggedHandshake, bound, read_pem, tls_error
from .budget import Budget
from .errors import NOT_READY, UNAUTHENTICATED
from .http_endpoints import FAILURES, Endpoints, as_json, telling
from .queries import Queries
from .shared_memory import Regions
from .tokens import Tokens
from .watched import SECONDS, Watched

if TYPE_CHECKING:
    from .repository import Repository

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 65  # longer than proxies, which might otherwise reuse a connection that is just closed
DRAIN_IDLE_SECONDS = 1.0  # a request may still arrive on an open connection of a stopping server
HALF_CLOSE_SECONDS = 0.1  # a client that closes its half sooner after a request waits for its answer
CUT_OFF_SECONDS = 0.5  # to answer those whose grace time is over
_OPEN = {"/v2/health/live", "/v2/health/ready"}  # need no token


class Front:
    """Handles every request: its id, the token, and clients that disconnect."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self.draining = False
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, authorization, closes = "", b"", False
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value
            elif name == b"upgrade":  # the parser takes what follows for another protocol
                closes = True
        ids.take(scope, given)
        logs.begin(**spans.ids(), **({"request_id": ids.of(scope)} if given else {}))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                number = ids.of(scope)
                logs.bind(request_id=number)  # for the access log; the body may have had an id
                spans.note(request_id=number)
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
                if self.draining or closes:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        if scope["path"] not in _OPEN and not self._tokens.allow(scope["path"], authorization):
            metrics.failed_without_model(UNAUTHENTICATED)
            said = "this server wants a token: send the header Authorization: Bearer <token>"
            refusal = as_json({"error": said}, UNAUTHENTICATED.status, {"www-authenticate": "Bearer"})
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


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, which is also closed if nothing ever arrives, and answers noise in JSON."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler
        )

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._complete = self.loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that closes its half with its request. One that does so later has gone."""
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        if last is None or last.more_body or last.response_complete or self.scheme == "https":
            return False
        last.keep_alive = False
        return self.loop.time() - self._complete < HALF_CLOSE_SECONDS

    def send_400_response(self, msg: str) -> None:
        content = orjson.dumps({"error": "this is not an HTTP/1.1 request, or its head is malformed"})
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(content)}\r\n".encode()
        self.transport.write(head + b"content-type: application/json\r\nconnection: close\r\n\r\n" + content)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers, because the service has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def reload_certificates(self) -> None:
        """Reload the TLS certificate and key whenever their files change."""
        config = self.config
        if config.ssl is None or config.ssl_certfile is None:
            return
        pair = Path(config.ssl_certfile), Path(str(config.ssl_keyfile))
        watched = Watched(*pair)
        while True:
            await asyncio.sleep(SECONDS)
            if not watched.changed():
                continue
            try:
                for file in pair:
                    read_pem(file)  # OpenSSL would wait at a FIFO
                config.ssl.load_cert_chain(*pair)
                _log.info("reloaded the TLS certificate")
            except OSError:  # also ssl.SSLError, for example while the files do not match
                _log.exception("the TLS certificate could not be reloaded")

    async def take_waiting(self, listener: socket.socket) -> None:
        """Accept the connections that are pending in the listener's queue."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        make = functools.partial(protocol, self.config, self.server_state, self.lifespan.state, loop)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                await loop.connect_accepted_socket(make, connection, ssl=self.config.ssl)


class RestServer:
    """HTTP on one port, from `start` to `drain`."""

    def __init__(self, repository: "Repository", budget: Budget, tokens: Tokens, regions: Regions) -> None:
        """Bind the port.

        Raises:
            AddressError: the port is in use, the host is not this machine's, or TLS cannot be set up.
        """
        self.settings = settings = repository.settings.server
        self._front = Front(_application(repository, budget, regions), tokens)
        self.config = self._config()
        self._socket = bound(settings.host, settings.http_port, "--http-port", shared=settings.processes > 1)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(self.config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start, and return when connections are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        self._reloading = asyncio.create_task(self._server.reload_certificates())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            await self._serving  # raises the cause

    async def drain(self, grace: float) -> bool:
        """Stop listening, answer the requests on open connections, and close these.

        Requests that are not answered within `grace` seconds are cut off.

        Returns:
            Whether all requests were answered.
        """
        if self._serving is None:
            self._socket.close()
            return True
        loop, server = asyncio.get_running_loop(), self._server
        end = loop.time() + grace
        self._front.draining = True
        listener = self._socket.dup()
        for each in server.servers:
            each.close()
        await server.take_waiting(listener)
        listener.close()
        idle_end = loop.time() + min(DRAIN_IDLE_SECONDS, grace)
        while server.server_state.connections and loop.time() < idle_end:
            await asyncio.sleep(0.02)
        self.config.timeout_graceful_shutdown = max(end - loop.time(), 0)  # type: ignore[assignment]
        server.should_exit = True
        await self._serving
        self._reloading.cancel()
        cut_off = set(server.server_state.tasks)  # uvicorn has cancelled them
        if cut_off:
            await asyncio.wait(cut_off, timeout=CUT_OFF_SECONDS)
        return not cut_off

    def _config(self) -> uvicorn.Config:
        settings = self.settings
        config = uvicorn.Config(
            spans.around(self._front),
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=settings.access_log,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.limit_concurrency and settings.share(settings.limit_concurrency),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca is not None else None,
            ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        try:
            for file in filter(None, (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)):
                read_pem(file)
            config.load()
        except (OSError, ssl.SSLError) as error:  # an SSLError names no file
            raise tls_error(settings, error) from error
        if config.ssl is not None and settings.tls_client_ca is not None:
            config.ssl.sslobject_class = LoggedHandshake
        return config


def _application(repository: "Repository", budget: Budget, regions: Regions) -> Starlette:
    to, about = Endpoints(repository, budget, regions), Queries(repository)
    model, control = "/v2/models/{model}", "/v2/repository/models/{model}"
    posts = {
        "/v2/repository/index": to.index,
        f"{control}/load": to.load,
        f"{control}/unload": to.unload,
    }
    gets = {
        "/metrics": to.metrics,
        "/": telling(lambda: {"status": "alive"}),  # as KServe does
        "/status": telling(about.status),
        "/v2": telling(about.server),
        "/v2/health/live": telling(about.live),
        "/v2/health/ready": telling(about.ready),
        "/v2/models": telling(about.models),
        "/v2/models/stats": telling(about.statistics),
    }
    for path in (model, model + "/versions/{version}"):
        posts[f"{path}/infer"] = to.infer
        gets[path] = telling(about.model)
        gets[f"{path}/ready"] = telling(about.model_ready)
        gets[f"{path}/config"] = telling(about.config_as_json)
        gets[f"{path}/stats"] = telling(about.statistics)
    routes = [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
    routes += shared_memory_calls.routes(regions, to.read_object)
    app = Starlette(routes=routes, exception_handlers=FAILURES)
    app.router.redirect_slashes = False
    return app
