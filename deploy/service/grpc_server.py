"""The gRPC server: the protocol's calls with ids, a token, TLS, limits, and failures as gRPC codes."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from . import codec_grpc, ids, logs, metrics, spans
from .addresses import address_error, grpc_credentials
from .budget import Budget, Held
from .errors import INTERNAL, INVALID, NOT_READY, UNAUTHENTICATED, ServiceError, invalid
from .messages import Messages
from .protocol import SERVICE, pb
from .queries import Queries
from .request import off_loop
from .settings import ServerSettings
from .shared_memory import Regions
from .shared_memory_calls import SharedMemoryCalls
from .tokens import Token, Tokens

if TYPE_CHECKING:
    from .repository import Repository

_log = logging.getLogger(__name__)

DRAIN_REFUSE_SECONDS = 0.5
TIMER_SECONDS = 0.01  # uvloop's timers may fire this early
HEALTH_SECONDS = 0.2
_OPEN = ("ServerLive", "ServerReady")  # need no token


@dataclass(slots=True)
class Call:
    """What a call has besides its message: its id, the seconds to its deadline, memory and connection."""

    id: str
    seconds: float | None
    held: Held
    peer: Callable[[], str]


Method = Callable[[Any, Call], Awaitable[Any]]


class Calls(SharedMemoryCalls):
    """The protocol's calls. `_Front` answers their ServiceErrors."""

    def __init__(self, repository: "Repository", regions: Regions) -> None:
        super().__init__(regions)
        self._repository = repository
        self._about = Queries(repository)

    async def ModelInfer(self, request: pb.ModelInferRequest, call: Call) -> bytes:
        """Run a model; the answer is serialized."""
        meant = functools.partial(self._repository.metrics_of, request.model_name, request.model_version)
        with metrics.counting(meant) as counting:
            most = self._repository.most_tensors(request.model_name)
            logs.bind(model=request.model_name)
            size = request.ByteSize()
            asked, form = await off_loop(size, codec_grpc.decode, request, call.seconds, most)
            await self.regions.read(asked, form.shared, call.held)
            asked.id = call.id
            counting.request = asked
            counting.result = await self._repository.answer(asked)
            await self.regions.write(counting.result, form.shared)
            size = sum(array.nbytes for array in counting.result.outputs.values())
            call.held.add(3 * size)  # the arrays, the message, and its serialization
            return await off_loop(size, codec_grpc.encode, counting.result, form)

    async def ServerLive(self, request: Any, call: Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=not self._repository.broken)

    async def ServerReady(self, request: Any, call: Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._repository.why_not_ready())

    async def ServerMetadata(self, request: Any, call: Call) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._about.server())

    async def ModelReady(self, request: Any, call: Call) -> pb.ModelReadyResponse:
        try:
            await self._about.model_ready(request.name, request.version)
        except ServiceError as error:
            if error.failure is not NOT_READY:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: Any, call: Call) -> pb.ModelMetadataResponse:
        described = self._about.model(request.name, request.version)
        del described["parameters"]  # the message has no such field
        return pb.ModelMetadataResponse(**described)

    async def ModelConfig(self, request: Any, call: Call) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=self._about.config(request.name, request.version))

    async def ModelStatistics(self, request: Any, call: Call) -> pb.ModelStatisticsResponse:
        return pb.ModelStatisticsResponse(**await self._about.statistics(request.name, request.version))

    async def RepositoryModelLoad(self, request: Any, call: Call) -> Any:
        if request.parameters:
            raise invalid("a model is loaded from its folder as it is: parameters are not taken")
        await self._repository.load_by_request(_model_name(request))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, call: Call) -> Any:
        await self._repository.unload_by_request(_model_name(request))
        return pb.RepositoryModelUnloadResponse()

    async def RepositoryIndex(self, request: Any, call: Call) -> Any:
        self._repository.require_explicit()
        return pb.RepositoryIndexResponse(models=await self._repository.index(request.ready))


def _model_name(request: Any) -> str:
    name: str = request.model_name or request.repository_name  # KServe's first field
    if not name:
        raise invalid("model_name is missing")
    return name


class _Front:
    """Handles every call: its id, the token, the budget, and failures as gRPC codes.

    gRPC hands calls over as streams of requests. So a call can be refused before its message is read.
    """

    def __init__(self, settings: ServerSettings, budget: Budget, tokens: Tokens) -> None:
        self._settings = settings
        self._budget = budget
        self._tokens = tokens
        self._messages = Messages(settings, budget)
        self.draining = False
        self.was_called = False

    def handler(self, calls: Calls) -> grpc.GenericRpcHandler:
        """Return the service for gRPC."""
        methods = {}
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if (answer := getattr(calls, method.name, None)) is not None:
                parse = getattr(pb, method.input_type.name).FromString
                parse = codec_grpc.parse if method.name == "ModelInfer" else parse
                is_control = method.name.startswith("Repository")
                token = self._tokens.control if is_control else self._tokens.inference
                around = self._around(answer, parse, None if method.name in _OPEN else token)
                methods[method.name] = grpc.stream_unary_rpc_method_handler(around)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _around(self, method: Method, parse: Callable[[bytes], Any], token: Token | None) -> Any:
        async def guarded(_: Any, context: aio.ServicerContext) -> bytes:
            self.was_called = True
            headers = dict(context.invocation_metadata())
            given = [headers.get(ids.HEADER, "")]
            number = ids.request_id(*given)
            logs.begin(**spans.ids(), request_id=number)
            spans.note(request_id=number)
            refusal: tuple[Any, str, Any] | None = None
            with self._budget.request() as held:
                try:
                    request = await self._request(context, headers, parse, held, token)
                    given.append(getattr(request, "id", ""))
                    number = ids.request_id(*given, number)
                    logs.bind(request_id=number)
                    answer = await method(request, Call(number, context.time_remaining(), held, context.peer))
                except ServiceError as error:
                    spans.note(failure=error.failure.reason)
                    extra = tuple((name.lower(), value) for name, value in error.headers.items())
                    refusal = error.failure.code, str(error), extra
                except Exception:
                    _log.exception("internal error")
                    refusal = INTERNAL.code, f"internal error; request id {number}", ()
                request = None  # gRPC keeps the exception of `abort` in a cycle, and so what this frame holds
            if refusal is not None:
                await context.abort(*refusal[:2], ((ids.HEADER, number), *refusal[2]))
            if number in given:  # a trailer is slow: a generated id is sent with failures only
                context.set_trailing_metadata(((ids.HEADER, number),))
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return guarded

    async def _request(
        self,
        context: Any,
        headers: dict[str, str],
        parse: Callable[[bytes], Any],
        held: Held,
        token: Token | None,
    ) -> Any:
        """Check whether the call is allowed, read its message, and parse it."""
        try:
            if token is not None and not token.allows(headers.get("authorization", "").encode()):
                said = "this server wants a token: send the metadata authorization: Bearer <token>"
                raise ServiceError(UNAUTHENTICATED, said)
            _log.debug("accepted")  # lab/soak.py compares these lines with the answers
            if self.draining and token is not None:
                raise ServiceError(NOT_READY, "the server is stopping: send the request to another")
            data = await self._messages.read(context, held)
            return await off_loop(len(data), parse, data)
        except DecodeError:  # gRPC itself would answer UNKNOWN and log an error
            metrics.failed_without_model(INVALID)
            raise invalid("the request is not a protobuf message of the protocol") from None
        except ServiceError as error:
            metrics.failed_without_model(error.failure)
            raise


class GrpcServer:
    """gRPC on one port, from `start` to `drain`."""

    def __init__(self, repository: "Repository", budget: Budget, tokens: Tokens, regions: Regions) -> None:
        self.settings = settings = repository.settings.server
        self.port: int = settings.grpc_port or 0
        self._repository = repository
        self._calls = Calls(repository, regions)
        self._front = _Front(settings, budget, tokens)
        self._server: Any = None
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Start, and return when calls are accepted.

        Raises:
            AddressError: the port is in use, the host is not this machine's, or TLS cannot be set up.
        """
        settings = self.settings
        calls = settings.maximum_concurrent_rpcs
        self._server = aio.server(
            interceptors=spans.interceptors(),
            maximum_concurrent_rpcs=calls and settings.share(calls),
            options=(
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.bdp_probe", 0),  # otherwise megabytes of each message arrive before it is read
                ("grpc.server_handshake_timeout_ms", round(settings.body_seconds * 1000)),
                ("grpc.keepalive_time_ms", 30_000),  # detects clients that vanished
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", int(settings.processes > 1)),  # or two servers share one unnoticed
            ),
        )
        self._server.add_generic_rpc_handlers((self._front.handler(self._calls),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._bind()
        await self._server.start()
        self._following = asyncio.create_task(self._follow_readiness())

    async def _follow_readiness(self) -> None:
        """Keep the answers of grpc.health.v1 up to date, which need no token."""
        while True:
            status = health_pb2.HealthCheckResponse.SERVING
            if self._repository.why_not_ready() or self._repository.broken:
                status = health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)
            await asyncio.sleep(HEALTH_SECONDS)

    async def drain(self, grace: float) -> bool:
        """Accept no more calls, and answer the accepted ones for up to `grace` seconds.

        New calls are first told that the server is stopping. gRPC itself would cancel calls that arrive at
        that moment, and the client could not tell whether they ran. A call that arrives just as `stop` begins
        is still cancelled, before any code here sees it.

        Returns:
            Whether all calls were answered.
        """
        if self._server is None:
            return True
        self._following.cancel()
        await self._health.enter_graceful_shutdown()
        self._front.draining = True
        refusing = min(DRAIN_REFUSE_SECONDS, grace) if self._front.was_called else 0.0
        await asyncio.sleep(refusing)
        rest, started = grace - refusing, time.monotonic()
        await self._server.stop(rest)  # returns early if no call is left
        return not rest or time.monotonic() - started < rest - TIMER_SECONDS

    def _bind(self) -> int:
        settings = self.settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address, port = f"{host}:{self.port}", 0
        credentials = grpc_credentials(settings)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            pass
        if not port:
            raise address_error(
                settings.host, self.port, "--grpc-port", "it is in use, or not this machine's"
            )
        return port
