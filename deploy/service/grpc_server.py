"""The gRPC server: the protocol's calls with ids, a token, TLS, limits, and failures as gRPC codes."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from . import codec_grpc, ids, logs, metrics, spans, wire
from .addresses import address_error, tls_error
from .datatypes import version_number
from .endpoints import model_metadata, off_loop, server_metadata
from .errors import INTERNAL, INVALID, NOT_READY, UNAUTHENTICATED, ServiceError, invalid
from .protocol import SERVICE, pb
from .settings import ServerSettings
from .tokens import Token

if TYPE_CHECKING:
    from .repository import Repository

_log = logging.getLogger(__name__)

DRAIN_REFUSE_SECONDS = 0.5
TIMER_SECONDS = 0.01  # uvloop's timers may fire this early
_OPEN = ("ServerLive", "ServerReady")  # need no token

_headers: ContextVar[dict[str, str]] = ContextVar("_headers")  # the call's metadata with its id

Method = Callable[[Any, aio.ServicerContext], Awaitable[Any]]


class Calls:
    """The protocol's calls. They raise ServiceError, which `_Front` turns into a gRPC code."""

    def __init__(self, repository: "Repository") -> None:
        self._repository = repository

    def parsers(self) -> dict[str, Callable[[bytes], Any]]:
        """Return the function that parses the request of each call."""
        names = ["ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata"]
        names += ["RepositoryModelLoad", "RepositoryModelUnload"]
        return {
            **{name: getattr(pb, f"{name}Request").FromString for name in names},
            "ModelInfer": wire.parse,
            "RepositoryIndex": pb.ServerReadyRequest.FromString,  # any message: KServe lacks this one
        }

    async def ModelInfer(self, request: wire.InferRequest, context: Any) -> bytes:
        """Run a model; the answer is serialized."""
        headers = _headers.get()
        message = request.message
        meant = functools.partial(self._repository.metrics_of, message.model_name, message.model_version)
        with spans.request_span("infer", headers), metrics.counting(meant) as counting:
            spans.note(request_id=headers[ids.HEADER])
            most = self._repository.most_tensors(message.model_name)
            logs.bind(model=message.model_name)
            seconds = context.time_remaining()
            asked, form = await off_loop(request.size, codec_grpc.decode, message, seconds, most, request.raw)
            asked.id = headers[ids.HEADER]
            counting.result = await self._repository.answer(asked)
            size = sum(array.nbytes for array in counting.result.outputs.values())
            return await off_loop(size, codec_grpc.encode, counting.result, form)

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:
        """Answer whether the server can run models, or must be started anew."""
        return pb.ServerLiveResponse(live=not self._repository.broken)

    async def ServerReady(self, request: Any, context: Any) -> pb.ServerReadyResponse:
        """Answer whether all models are loaded."""
        return pb.ServerReadyResponse(ready=self._repository.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> pb.ServerMetadataResponse:
        """Describe the server."""
        return pb.ServerMetadataResponse(**server_metadata(self._repository))

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        """Answer whether a model is ready."""
        try:
            self._repository.find(request.name, version_number(request.name, request.version))
        except ServiceError as error:
            if error.failure is not NOT_READY:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        """Describe a model's inputs and outputs."""
        described = model_metadata(self._repository, request.name, request.version)
        del described["parameters"]  # the message has no such field
        return pb.ModelMetadataResponse(**described)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> pb.RepositoryModelLoadResponse:
        """Load a model."""
        model = _model_name(request)
        if _triton_field(request, 3) is not None:
            raise invalid("a model is loaded from its folder as it is: parameters are not taken")
        await self._repository.load_by_request(model)
        return pb.RepositoryModelLoadResponse(model_name=model, isLoaded=True)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> pb.RepositoryModelUnloadResponse:
        """Unload a model."""
        model = _model_name(request)
        await self._repository.unload_by_request(model)
        return pb.RepositoryModelUnloadResponse(model_name=model, isUnloaded=True)

    async def RepositoryIndex(self, request: Any, context: Any) -> bytes:
        """Answer Triton's call, whose messages KServe lacks. Each model is a message of four strings."""
        models = await self._repository.index_by_request(bool(_triton_field(request, 2)))
        names = ("name", "version", "state", "reason")
        return b"".join(
            wire.field(1, b"".join(wire.field(at, each[name].encode()) for at, name in enumerate(names, 1)))
            for each in models
        )


def _model_name(request: Any) -> str:
    """Return the name, which KServe sends in field 1, and Triton (hence tritonclient) in field 2."""
    name = request.model_name or _triton_field(request, 2)
    if not name or not isinstance(name, str | bytes):
        raise invalid("model_name is missing")
    return name if isinstance(name, str) else name.decode(errors="replace")


def _triton_field(request: Any, number: int) -> Any:
    """Return a field that only Triton's message has; None if it was not sent."""
    return next((field.data for field in UnknownFieldSet(request) if field.field_number == number), None)


class _Front:
    """Handles every call: its id, the token, and failures as gRPC codes."""

    def __init__(self, settings: ServerSettings) -> None:
        self._token = Token(settings)
        self.draining = False
        self.was_called = False

    def handler(self, calls: Calls) -> grpc.GenericRpcHandler:
        """Return the service for gRPC."""
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._around(getattr(calls, name), parse, is_open=name in _OPEN)
            )
            for name, parse in calls.parsers().items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _around(self, method: Method, parse: Callable[[bytes], Any], is_open: bool) -> Method:
        async def guarded(data: bytes, context: aio.ServicerContext) -> bytes:
            self.was_called = True
            headers = dict(context.invocation_metadata())
            refusal = None if is_open else self._refusal(headers)
            request = await off_loop(len(data), _parsed, parse, data) if refusal is None else None
            given = (headers.get(ids.HEADER, ""), getattr(request, "id", ""))
            number = ids.request_id(*given)
            _headers.set(headers | {ids.HEADER: number})
            trailing = ((ids.HEADER, number),)
            logs.begin(request_id=number)
            _log.debug("accepted")  # `bench soak` compares these lines with the answers
            try:
                if refusal is not None:
                    metrics.failed_without_model(refusal.failure)
                    raise refusal
                if request is None:  # gRPC itself would answer UNKNOWN and log an error
                    raise _unreadable()
                answer = await method(request, context)
            except ServiceError as error:
                extra = tuple((name.lower(), value) for name, value in error.headers.items())
                await context.abort(error.failure.code, str(error), trailing + extra)
            except Exception:
                _log.exception("internal error")
                await context.abort(INTERNAL.code, f"internal error; request id {number}", trailing)
            if number in given:  # a trailer is slow: a generated id is sent with failures only
                context.set_trailing_metadata(trailing)
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return guarded

    def _refusal(self, headers: dict[str, str]) -> ServiceError | None:
        """Return why a call is refused before its request is parsed."""
        if not self._token.allows(headers.get("authorization", "").encode()):
            said = "this server wants a token: send the metadata authorization: Bearer <token>"
            return ServiceError(UNAUTHENTICATED, said)
        if self.draining:
            return ServiceError(NOT_READY, "the server is stopping: send the request to another")
        return None


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Parse a message; return None for malformed data."""
    try:
        return parse(data)
    except DecodeError:
        return None


def _unreadable() -> ServiceError:
    metrics.failed_without_model(INVALID)
    return invalid("the request is not a protobuf message of the protocol")


class GrpcServer:
    """gRPC on one port, from `start` to `drain`."""

    def __init__(self, settings: ServerSettings, repository: "Repository") -> None:
        self.settings = settings
        self.port: int = settings.grpc_port or 0
        self._repository = repository
        self._front = _Front(settings)
        self._server: Any = None

    async def start(self) -> None:
        """Start, and return when calls are accepted.

        Raises:
            AddressError: the port is in use, the host is not this machine's, or TLS cannot be set up.
        """
        settings = self.settings
        self._server = aio.server(
            options=(
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", settings.max_header_bytes),
                ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
                ("grpc.server_handshake_timeout_ms", round(settings.header_seconds * 1000)),
                ("grpc.keepalive_time_ms", 30_000),  # detects clients that vanished
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),  # otherwise two servers could share a port unnoticed
            ),
        )
        self._server.add_generic_rpc_handlers((self._front.handler(Calls(self._repository)),))
        self.port = self._bind()
        await self._server.start()

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
        if settings.tls_certificate is not None and settings.tls_key is not None:
            try:
                key, certificate = settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes()
                credentials = grpc.ssl_server_credentials([(key, certificate)])
            except (OSError, ValueError) as error:
                raise tls_error(settings, error) from error
        else:
            credentials = None
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
