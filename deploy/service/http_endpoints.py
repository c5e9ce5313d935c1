"""The handlers of the HTTP routes, and the answers to their failures."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import orjson
from prometheus_client import REGISTRY, exposition
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import codec_rest, logs, metrics
from .datatypes import shown, version_number
from .errors import CANCELLED, INTERNAL, NO_METHOD, NOT_FOUND, TOO_SLOW, WRONG_MEDIA, ServiceError, invalid
from .newer_python import timeout
from .operations import MODEL, Operation, operations
from .repository import Repository
from .request import Budget, Limit, RequestMemory, in_thread_if_large

_log = logging.getLogger(__name__)

WATCH_SECONDS = 0.02  # requests that take longer notice that their client disconnects
_JSON_GROWTH = 4  # "0," becomes a number of up to 8 bytes


@contextlib.contextmanager
def cancelled_with(request: Request) -> Iterator[None]:
    """Cancel the block, whose request has been read, with ClientDisconnect if the client disconnects."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    # Most requests are answered before: a timer costs less than a task.
    timer = loop.call_later(WATCH_SECONDS, lambda: watching.append(loop.create_task(watch())))
    try:
        yield
    except asyncio.CancelledError:
        if not watching or not watching[0].done():
            raise
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        if watching:
            watching[0].cancel()


class Endpoints:
    """The handlers of the routes. They raise ServiceError, which `FAILURES` turns into an answer."""

    def __init__(self, repository: Repository, budget: Budget) -> None:
        settings = repository.settings.server
        self._limit = self._json_limit = Limit(settings.max_request_bytes)
        if settings.max_json_bytes < settings.max_request_bytes:
            advice = ": send large tensors as binary data, with Inference-Header-Content-Length"
            self._json_limit = Limit(settings.max_json_bytes, "max_json_bytes", "JSON", advice)
        self._seconds = settings.body_seconds
        self._repository = repository
        self._budget = budget

    def routes(self) -> list[Route]:
        """Return a route for each operation, and for each of a model's versions."""
        own = {f"{MODEL}/infer": self.infer, "/metrics": self.metrics}
        found = []
        for each in operations(self._repository):
            handler = own.get(each.path) or self.json_endpoint(each)
            paths = [each.path]
            if each.path.startswith(MODEL):
                paths.append(each.path.replace(MODEL, MODEL + "/versions/{version}"))
            found += [Route(path, handler, methods=[each.method]) for path in paths]
        return found

    def json_endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of an operation whose answer is JSON."""
        answer = operation.answer
        assert answer is not None

        async def handler(request: Request) -> Response:
            return as_json(operation.as_rest(answer(**request.path_params)))

        return handler

    async def infer(self, request: Request) -> Response:
        """Run a model: POST /v2/models/<model>[/versions/<version>]/infer."""
        repository, headers = self._repository, request.headers
        model, version = request.path_params["model"], request.path_params.get("version", "")
        announced = int(headers.get("content-length", self._limit.bytes))
        with RequestMemory(self._budget, announced) as memory, metrics.counting() as counting:
            meant = repository.find(model, version_number(model, version))
            counting.model = meant.metrics
            logs.bind(model=model)
            has_binary = codec_rest.HEADER_LENGTH in headers
            limit = self._limit if has_binary else self._json_limit
            body = await self._read(request, limit, memory)
            size = len(body)
            if not has_binary:
                memory.reserve(_JSON_GROWTH * size)
            asked, form = await in_thread_if_large(
                size, codec_rest.decode, body, headers, model, version, meant.most_tensors, self._json_limit
            )
            memory.reserve(-size)  # the inputs are copies, or lie in it
            del body
            asked.id = logs.request_id()
            served = repository.find(model, asked.version)
            counting.accept(served.metrics, asked.arrived)
            with cancelled_with(request):
                counting.result = await served.batcher.submit(asked, served.check(asked))
            size = counting.result.nbytes
            memory.record(2 * size)  # the arrays, and the body made of them
            content, answer_headers = await in_thread_if_large(
                size, codec_rest.encode, counting.result, form, self._json_limit
            )
            return Response(content, headers=answer_headers)

    async def _read(self, request: Request, limit: Limit, memory: RequestMemory) -> bytes:
        """Read the whole body, and count it twice in `memory` as it arrives, because it is copied."""
        headers = request.headers
        if "upgrade" in headers:
            raise invalid("a request with a body cannot ask for an upgrade: leave the header Upgrade out")
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise ServiceError(WRONG_MEDIA, f"content encoding {shown(encoding)}: send the body as it is")
        if int(headers.get("content-length", 0)) > limit.bytes:
            raise limit.exceeded()
        chunks, size, more = [], 0, True
        try:
            async with timeout(self._seconds):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message["body"])
                    size += len(chunks[-1])
                    if size > limit.bytes:
                        raise limit.exceeded()
                    memory.reserve(2 * len(chunks[-1]))
                    more = message["more_body"]
        except TimeoutError:
            said = f"the body did not arrive within {self._seconds:g} s (body_seconds)"
            raise ServiceError(TOO_SLOW, said, {"Connection": "close"}) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def metrics(self, request: Request) -> Response:
        encode, content_type = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), headers={"content-type": content_type})


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content, default=str), status, headers, "application/json")


# -------------------------------------------------------------------------------- failures


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return as_json({"error": str(error)}, error.failure.status, error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, said = shown(request.url.path), error.detail
    if error.status_code == NOT_FOUND.status:
        said = f"there is nothing at {path}; the protocol is below /v2"
    elif error.status_code == NO_METHOD.status:
        said = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
    return as_json({"error": said}, error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CANCELLED.status)  # nobody receives it


async def _bug(request: Request, error: Exception) -> Response:
    """Answer with nothing but the id under which the error is logged."""
    _log.error("internal error", exc_info=error)
    return as_json({"error": f"internal error; request id {logs.request_id()}"}, INTERNAL.status)


FAILURES = {ServiceError: _failed, HTTPException: _no_route, ClientDisconnect: _client_gone, Exception: _bug}
"""The app's exception handlers: every answer is JSON with an "error"."""
