"""The gRPC server: KServe's, with our codec, a token, TLS, limits, and failures as gRPC's codes."""

import asyncio
import functools
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from twinop.deploy.service import codec_grpc, grpc_index, ids, logs, metrics, spans, wire
from twinop.deploy.service._kserve import DataPlane, GRPCServer, InferenceServicer, pb, pb_grpc
from twinop.deploy.service.addresses import address_error, tls_error
from twinop.deploy.service.datatypes import version_number
from twinop.deploy.service.endpoints import model_metadata, off_loop, server_metadata
from twinop.deploy.service.errors import INTERNAL, INVALID, NOT_READY, UNAUTHENTICATED, ServiceError, invalid
from twinop.deploy.service.settings import ServerSettings

if TYPE_CHECKING:
    from twinop.deploy.service.repository import Repository

_log = logging.getLogger(__name__)

DRAIN_REFUSE_SECONDS = 0.5
TIMER_SECONDS = 0.01  # uvloop's timers may be that early
_OPEN = ("/ServerLive", "/ServerReady")  # without a token

_headers: ContextVar[dict[str, str]] = ContextVar("_headers")  # the call's metadata, with its id

Method = Callable[[Any, aio.ServicerContext], Awaitable[Any]]


class Servicer(InferenceServicer):
    """The protocol's calls. Each raises ServiceError, which `_Front` turns into a code."""

    def __init__(self, dataplane: DataPlane, repository: "Repository") -> None:
        super().__init__(dataplane, None)
        self._repository = repository

    async def ModelInfer(self, request: wire.InferRequest, context: Any) -> bytes:
        headers = _headers.get()
        message = request.message
        meant = functools.partial(self._repository.metrics_of, message.model_name, message.model_version)
        with spans.request_span("infer", headers), metrics.counting(meant) as counting:
            spans.note(request_id=headers[ids.HEADER])
            most = self._repository.most_tensors(message.model_name)
            logs.bind(model=message.model_name)
            seconds = context.time_remaining()
            asked, form = await off_loop(
                request.size, codec_grpc.decode, message, seconds, most, request.bulk
            )
            asked.id = headers[ids.HEADER]
            counting.result, _ = await self._data_plane.infer(asked.model, asked, headers)
            size = sum(array.nbytes for array in counting.result.outputs.values())
            return await off_loop(size, codec_grpc.encode, counting.result, form)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._repository.ready())

    async def ServerMetadata(self, request: Any, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**server_metadata(self._data_plane, self._repository))

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        try:
            self._repository.find(request.name, version_number(request.name, request.version))
        except ServiceError as error:
            if error.failure is not NOT_READY:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        described = model_metadata(self._repository, request.name, request.version)
        del described["parameters"]  # KServe's message has no field for them
        return pb.ModelMetadataResponse(**described)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> pb.RepositoryModelLoadResponse:
        model = _model_name(request)
        if _triton_field(request, 3) is not None:
            raise invalid("a model is loaded from its folder as it is: parameters are not taken")
        await self._repository.load_by_request(model)
        return pb.RepositoryModelLoadResponse(model_name=model, isLoaded=True)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> pb.RepositoryModelUnloadResponse:
        model = _model_name(request)
        await self._repository.unload_by_request(model)
        return pb.RepositoryModelUnloadResponse(model_name=model, isUnloaded=True)


def _model_name(request: Any) -> str:
    """KServe's message has the name in field 1, Triton's (and so tritonclient's) in field 2."""
    name = request.model_name or _triton_field(request, 2)
    if not name or not isinstance(name, str | bytes):
        raise invalid("model_name is missing")
    return name if isinstance(name, str) else name.decode(errors="replace")


def _triton_field(request: Any, number: int) -> Any:
    """A field that Triton's message has and KServe's has not; None if it was not sent."""
    return next((field.data for field in UnknownFieldSet(request) if field.field_number == number), None)


class _Front(aio.ServerInterceptor):
    """Around every call: its id, the token, failures as codes. A method is wrapped once, not once a call."""

    def __init__(self, settings: ServerSettings) -> None:
        token = settings.token
        self._token = b"" if token is None else token.get_secret_value().encode()
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}
        self.draining = False

    @property
    def was_called(self) -> bool:
        return bool(self._wrapped)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        is_infer = method.endswith("/ModelInfer")  # whose answer is bytes already
        parse = wire.parse if is_infer else handler.request_deserializer
        self._wrapped[method] = grpc.unary_unary_rpc_method_handler(
            self._around(handler.unary_unary, parse, is_open=method.endswith(_OPEN)),
            response_serializer=None if is_infer else handler.response_serializer,
        )
        return self._wrapped[method]

    def _around(self, method: Method, parse: Callable[[bytes], Any], is_open: bool) -> Method:
        async def guarded(data: bytes, context: aio.ServicerContext) -> Any:
            headers = dict(context.invocation_metadata())
            refusal = None if is_open else self._refusal(headers)
            request = await off_loop(len(data), _parsed, parse, data) if refusal is None else None
            given = (headers.get(ids.HEADER, ""), getattr(request, "id", ""))
            number = ids.request_id(*given)
            _headers.set(headers | {ids.HEADER: number})
            trailing = ((ids.HEADER, number),)
            logs.begin(request_id=number)
            _log.debug("accepted")  # the soak holds this against the answers that came
            try:
                if refusal is not None:
                    metrics.failed_without_model(refusal.failure)
                    raise refusal
                if request is None:  # gRPC itself would say UNKNOWN, and log a bug
                    raise _unreadable()
                answer = await method(request, context)
            except ServiceError as error:
                extra = tuple((name.lower(), value) for name, value in error.headers.items())
                await context.abort(error.failure.code, str(error), trailing + extra)
            except Exception:
                _log.exception("internal error")
                await context.abort(INTERNAL.code, f"internal error; request id {number}", trailing)
            if number in given:  # one made here is for failures: a trailer takes longer than a small run
                context.set_trailing_metadata(trailing)
            return answer

        return guarded

    def _refusal(self, headers: dict[str, str]) -> ServiceError | None:
        """Before anything is read of what a client sent who may not."""
        if self._token and not self._allowed(headers.get("authorization", "")):
            said = "this server wants a token: send the metadata authorization: Bearer <token>"
            return ServiceError(UNAUTHENTICATED, said)
        if self.draining:
            return ServiceError(NOT_READY, "the server is stopping: send the request to another")
        return None

    def _allowed(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """None for what is no message."""
    try:
        return parse(data)
    except DecodeError:
        return None


def _unreadable() -> ServiceError:
    metrics.failed_without_model(INVALID)
    return invalid("the request is not a protobuf message of the protocol")


class GrpcServer(GRPCServer):
    """gRPC on one port, from `start` to `drain`."""

    def __init__(self, settings: ServerSettings, dataplane: DataPlane, repository: "Repository") -> None:
        super().__init__(settings.grpc_port or 0, dataplane, None, {})
        self.settings = settings
        self.port: int = settings.grpc_port or 0
        self._repository = repository
        self._front = _Front(settings)

    async def start(self) -> None:
        """Returns when calls are accepted.

        Raises:
            AddressError: the port is taken, the host is none of this machine's, or TLS cannot be set up.
        """
        settings = self.settings
        self._server = aio.server(
            interceptors=(self._front,),
            options=(
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", settings.max_header_bytes),
                ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
                ("grpc.server_handshake_timeout_ms", round(settings.header_seconds * 1000)),
                ("grpc.keepalive_time_ms", 30_000),  # clients that vanished without a word are found
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),  # else two servers could share a port unnoticed
            ),
        )
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(
            Servicer(self._data_plane, self._repository), self._server
        )
        self._server.add_generic_rpc_handlers((grpc_index.handler(self._repository),))
        self.port = self._bind()
        await self._server.start()

    async def drain(self, grace: float) -> bool:
        """Takes no more calls; answers those that have come. After `grace` seconds they are cut off.

        New calls are told first that the server is stopping: gRPC itself would cancel those that arrive just
        then, and a client could not tell whether they were run. It still does with one that arrives in the
        very moment of `stop`, before any of our code sees it.

        Returns:
            Whether all were answered.
        """
        if self._server is None:
            return True
        self._front.draining = True
        refusing = min(DRAIN_REFUSE_SECONDS, grace) if self._front.was_called else 0.0
        await asyncio.sleep(refusing)
        rest, started = grace - refusing, time.monotonic()
        await self._server.stop(rest)  # returns before the time is over if no call is left
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
