"""The gRPC server: the protocol's calls with ids, a token, limits, and failures as gRPC codes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from . import codec_grpc, logs, metrics
from .datatypes import version_number
from .errors import BROKEN, INTERNAL, INVALID, NOT_READY, TOO_SLOW, UNAUTHENTICATED, ServiceError, invalid
from .newer_python import timeout
from .operations import OPEN, Operation, Token, operations
from .repository import Repository
from .request import Budget, RequestMemory, in_thread_if_large
from .rest import address_error

_log = logging.getLogger(__name__)

DRAIN_REFUSE_SECONDS = 0.5
TIMER_SECONDS = 0.01  # uvloop's timers may fire this early


Method = Callable[[Any, float | None, RequestMemory], Awaitable[Any]]
"""Answers a message, with the seconds to its deadline, and its memory."""


def method_of(operation: Operation) -> Method:
    """Return the handler of calls of an operation, whose answer becomes a message."""
    answer = operation.answer
    assert answer is not None
    response = getattr(pb, f"{operation.rpc}Response")
    fields = response.DESCRIPTOR.fields_by_name

    has_model = "{model}" in operation.path

    async def method(request: Any, seconds: float | None, memory: RequestMemory) -> Any:
        given = {"model": request.name, "version": request.version} if has_model else {}
        try:
            found = answer(**given)
        except ServiceError as error:
            if not operation.is_question or error.failure not in (BROKEN, NOT_READY):
                raise
            return response()  # false
        return response(**{name: value for name, value in found.items() if name in fields})

    return method


class _CallHandler:
    """Handles every call, as a stream of requests: it can be refused before its message is read."""

    def __init__(self, repository: Repository, budget: Budget, token: Token) -> None:
        self._repository = repository
        self._settings = repository.settings.server
        self._budget = budget
        self._token = token
        self.draining = False
        self.was_called = False

    def service(self) -> grpc.GenericRpcHandler:
        types = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
        methods = {}
        for each in operations(self._repository):
            if each.rpc:
                method: Method = self._infer
                parse = codec_grpc.parse
                if each.answer is not None:
                    method, parse = method_of(each), getattr(pb, types[each.rpc].input_type.name).FromString
                around = self._around(method, parse, each.path)
                methods[each.rpc] = grpc.stream_unary_rpc_method_handler(around)
        return grpc.method_handlers_generic_handler(codec_grpc.SERVICE, methods)

    async def _infer(
        self, request: pb.ModelInferRequest, seconds: float | None, memory: RequestMemory
    ) -> bytes:
        """Run a model; the answer is serialized."""
        repository, model = self._repository, request.model_name
        with metrics.counting() as counting:
            meant = repository.find(model, version_number(model, request.model_version))
            counting.model = meant.metrics
            logs.bind(model=model)
            asked = await in_thread_if_large(
                request.ByteSize(), codec_grpc.decode, request, seconds, meant.most_tensors
            )
            asked.id = logs.request_id()
            served = repository.find(asked.model, asked.version)
            counting.accept(served.metrics, asked.arrived)
            counting.result = await served.batcher.submit(asked, served.check(asked))
            size = counting.result.nbytes
            memory.record(3 * size)  # the arrays, the message, and its serialization
            return await in_thread_if_large(size, codec_grpc.encode, counting.result, request)

    def _around(self, method: Method, parse: Callable[[bytes], Any], path: str) -> Any:
        async def read(context: Any, headers: dict[str, str], memory: RequestMemory) -> Any:
            """Check whether the call is allowed, read its message, and parse it."""
            try:
                if not self._token.allow(path, headers.get("authorization", "").encode()):
                    said = "this server wants a token: send the metadata authorization: Bearer <token>"
                    raise ServiceError(UNAUTHENTICATED, said)
                _log.debug("accepted")  # test_service_versions.py compares these lines with the answers
                if self.draining and path not in OPEN:
                    raise ServiceError(NOT_READY, "the server is stopping: send the request to another")
                data = await self._message(context)
                memory.reserve(2 * len(data))  # protobuf copies it
                return await in_thread_if_large(len(data), parse, data)
            except DecodeError:  # gRPC itself would answer UNKNOWN and log an error
                metrics.failed_without_model(INVALID)
                raise invalid("the request is not a protobuf message of the protocol") from None
            except ServiceError as error:
                metrics.failed_without_model(error.failure)
                raise

        async def guarded(_: Any, context: aio.ServicerContext) -> bytes:
            self.was_called = True
            headers = dict(context.invocation_metadata())
            number = logs.begin(given := headers.get(logs.HEADER, ""))
            refusal: tuple[Any, str, Any] | None = None
            with RequestMemory(self._budget) as memory:
                try:
                    request = await read(context, headers, memory)
                    answer = await method(request, context.time_remaining(), memory)
                except ServiceError as error:
                    extra = tuple((name.lower(), value) for name, value in error.headers.items())
                    refusal = error.failure.code, str(error), extra
                except Exception:
                    _log.exception("internal error")
                    refusal = INTERNAL.code, f"internal error; request id {number}", ()
                request = None  # gRPC keeps the exception of `abort` in a cycle, and so what this frame holds
            if refusal is not None:
                await context.abort(*refusal[:2], ((logs.HEADER, number), *refusal[2]))
            if number == given:  # a trailer is slow: a generated id is sent with failures only
                context.set_trailing_metadata(((logs.HEADER, number),))
            return answer if isinstance(answer, bytes) else answer.SerializeToString()

        return guarded

    async def _message(self, context: Any) -> bytes:
        """Read a message, also for a cancelled call: gRPC never frees one that arrives for such a call."""
        reading, seconds = asyncio.ensure_future(context.read()), self._settings.body_seconds
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it
        try:
            async with timeout(seconds):
                data = await asyncio.shield(reading)
        except TimeoutError:
            said = f"the message did not arrive within {seconds:g} s (body_seconds)"
            raise ServiceError(TOO_SLOW, said) from None
        if not isinstance(data, bytes):
            raise invalid("the call has no message")
        return data


class _Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1, without a token. Clients that `Watch`, which is not implemented, assume health."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def Check(self, request: Any, context: aio.ServicerContext) -> Any:
        if request.service not in ("", codec_grpc.SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the server has no service {request.service!r}")
        is_ready = not (self._repository.why_not_ready() or self._repository.broken)
        return health_pb2.HealthCheckResponse(status="SERVING" if is_ready else "NOT_SERVING")


class GrpcServer:
    """gRPC on one port, from `start` to `drain`."""

    def __init__(self, repository: Repository, budget: Budget, token: Token) -> None:
        self.settings = settings = repository.settings.server
        self.ports = {"grpc_port": settings.grpc_port or 0}
        self._repository = repository
        self._handler = _CallHandler(repository, budget, token)
        self._server: Any = None

    async def start(self) -> None:
        """Start, and return when calls are accepted; AddressError: host or port cannot be used."""
        settings = self.settings
        server = aio.server(
            maximum_concurrent_rpcs=settings.maximum_concurrent_rpcs,
            options=(
                ("grpc.max_receive_message_length", min(settings.max_request_bytes, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.bdp_probe", 0),  # otherwise megabytes of each message arrive before it is read
                ("grpc.server_handshake_timeout_ms", round(settings.body_seconds * 1000)),
                ("grpc.keepalive_time_ms", 30_000),  # detects clients that vanished
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),  # or two servers share one unnoticed
            ),
        )
        server.add_generic_rpc_handlers((self._handler.service(),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self._repository), server)
        given, host = self.ports["grpc_port"], f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.ports["grpc_port"] = server.add_insecure_port(f"{host}:{given}")
        except RuntimeError as error:
            why = "it is in use, or not this machine's"
            raise address_error(settings.host, given, "--grpc-port", why) from error
        await server.start()
        self._server = server

    async def drain(self, grace: float) -> bool:
        """Answer the accepted calls for up to `grace` seconds, and return whether all were answered.

        New calls are first told that the server is stopping. gRPC itself would cancel calls that arrive at
        that moment, and the client could not tell whether they ran. A call that arrives just as `stop` begins
        is still cancelled, before any code here sees it.
        """
        if self._server is None:
            return True
        self._handler.draining = True
        refusing = min(DRAIN_REFUSE_SECONDS, grace) if self._handler.was_called else 0.0
        await asyncio.sleep(refusing)
        rest, started = grace - refusing, time.monotonic()
        await self._server.stop(rest)  # returns early if no call is left
        return not rest or time.monotonic() - started < rest - TIMER_SECONDS
