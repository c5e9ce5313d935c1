"""The REST server: KServe's, with our routes and codec, ids, a token, limits, an end that loses nothing."""

import asyncio
import contextlib
import functools
import hmac
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinop.deploy.service import ids, logs, metrics
from twinop.deploy.service._kserve import DataPlane, RefreshingServer, RESTServer, metrics_handler
from twinop.deploy.service.addresses import bound, tls_error
from twinop.deploy.service.connection import LimitedHttpProtocol, Limits, has_gone
from twinop.deploy.service.endpoints import Endpoints, answer_failures, as_json
from twinop.deploy.service.errors import NOT_READY, UNAUTHENTICATED
from twinop.deploy.service.settings import ServerSettings

if TYPE_CHECKING:
    from twinop.deploy.service.repository import Repository

KEEP_ALIVE_SECONDS = 65  # longer than proxies keep theirs, or they would use a connection that is just closed
DRAIN_IDLE_SECONDS = 1.0  # a stopping server's open connections may still have a request on its way
CUT_OFF_SECONDS = 0.5  # to say so to those whose time was over
_OPEN = {"/v2/health/live", "/v2/health/ready"}  # without a token


class Front:
    """Around every request: its id, the token, what happens if the client goes."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.draining = False
        self._app = app
        self._token = settings.token.get_secret_value().encode() if settings.token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, authorization = "", b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value
        ids.take(scope, given)
        logs.begin(**({"request_id": ids.of(scope)} if given else {}))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                number = ids.of(scope)
                logs.bind(request_id=number)  # for the access log; a body might have had one
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
                if self.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        if self._token is not None and not self._allowed(scope["path"], authorization):
            metrics.failed_without_model(UNAUTHENTICATED)
            said = "this server wants a token: send the header Authorization: Bearer <token>"
            refusal = as_json({"error": said}, UNAUTHENTICATED.status, {"www-authenticate": "Bearer"})
            await refusal(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if has_gone(scope):
                return
            if not self.draining:
                raise
            refusal = as_json({"error": "the server stopped before it could answer"}, NOT_READY.status)
            with contextlib.suppress(RuntimeError):  # the answer had begun
                await refusal(scope, receive, answer)
        except Exception:  # `_bug` has answered and logged it
            pass

    def _allowed(self, path: str, authorization: bytes) -> bool:
        scheme, _, token = authorization.partition(b" ")
        known = self._token or b""
        return path in _OPEN or (scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), known))


class _Uvicorn(RefreshingServer):
    """Without signal handlers: the service has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def take_waiting(self, listener: socket.socket) -> None:
        """Takes in the clients that the system has let connect, but that nobody has accepted yet."""
        loop = asyncio.get_running_loop()
        make = functools.partial(
            self.config.http_protocol_class, self.config, self.server_state, self.lifespan.state, loop
        )
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                await loop.connect_accepted_socket(make, connection, ssl=self.config.ssl)


class RestServer(RESTServer):
    """HTTP on one port, from `start` to `drain`."""

    def __init__(self, settings: ServerSettings, dataplane: DataPlane, repository: "Repository") -> None:
        """
        Raises:
            AddressError: the port is taken, the host is none of this machine's, or TLS cannot be set up.
        """
        self.settings = settings
        self.dataplane = dataplane
        self._repository = repository
        self._front = Front(self.create_application(), settings)
        self.config = self._config()
        self._socket = bound(settings.host, settings.http_port, "--http-port")
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(self.config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait((self._serving, up), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._serving  # raises what went wrong

    async def drain(self, grace: float) -> bool:
        """Stops listening; answers what has come and what comes on open connections, then closes them.

        What is not answered within `grace` seconds is cut off.

        Returns:
            Whether all was answered.
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
        cut_off = set(server.server_state.tasks)  # uvicorn has cancelled them
        if cut_off:
            await asyncio.wait(cut_off, timeout=CUT_OFF_SECONDS)
        return not cut_off

    def create_application(self) -> FastAPI:
        app = FastAPI(title="twinop", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self._register_endpoints(app)
        self._add_exception_handlers(app)
        return app

    def _register_endpoints(self, app: FastAPI) -> None:
        from twinop.deploy.service.status import status_page

        to = Endpoints(self.settings, self.dataplane, self._repository)
        model, repository = "/v2/models/{model_name}", "/v2/repository/models/{model_name}"
        versioned = model + "/versions/{model_version}"
        for path in (model, versioned):  # Starlette's routes: FastAPI's would add a tenth of a millisecond
            app.add_route(f"{path}/infer", to.infer, methods=["POST"])
        for path, answer in (
            ("/", self.dataplane.live),
            ("/metrics", metrics_handler),
            ("/status", functools.partial(status_page, self._repository)),
            ("/v2", to.metadata),
            ("/v2/health/live", to.live),
            ("/v2/health/ready", to.ready),
            ("/v2/models", to.models),
            (model, to.model_metadata),
            (versioned, to.model_metadata),
            (f"{model}/ready", to.model_ready),
            (f"{versioned}/ready", to.model_ready),
        ):
            app.add_api_route(path, answer, methods=["GET"], response_model=None)
        app.add_route("/v2/repository/index", to.index, methods=["POST"])
        app.add_route(f"{repository}/load", to.load, methods=["POST"])
        app.add_route(f"{repository}/unload", to.unload, methods=["POST"])

    def _add_exception_handlers(self, app: FastAPI) -> None:
        answer_failures(app)

    def _config(self) -> uvicorn.Config:
        settings = self.settings
        limits = Limits(settings.max_header_bytes, settings.header_seconds, settings.body_seconds)
        config = uvicorn.Config(
            self._front,
            http=functools.partial(LimitedHttpProtocol, limits=limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=settings.access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:  # SSLError is an OSError without a file name
            raise tls_error(settings, error) from error
        return config
