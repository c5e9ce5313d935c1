"""The handlers of the protocol's HTTP routes, and the answers to their failures."""

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from prometheus_client import exposition
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from . import codec_rest, http_body, ids, logs, metrics, spans
from .budget import Budget, Held
from .datatypes import shown
from .errors import CANCELLED, INTERNAL, NO_METHOD, NOT_FOUND, ServiceError, invalid
from .request import off_loop
from .shared_memory import Regions

if TYPE_CHECKING:
    from .repository import Repository

_log = logging.getLogger(__name__)

WATCH_SECONDS = 0.02  # requests that take longer notice that their client disconnects
_JSON_GROWTH = 4  # "0," becomes a number of up to 8 bytes


@contextlib.contextmanager
def cancelled_with(request: Request) -> Iterator[None]:
    """Cancel the block if the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: it has disconnected.
    """
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

    def __init__(self, repository: "Repository", budget: Budget, regions: Regions) -> None:
        settings = repository.settings.server
        self._limit = self._json_limit = http_body.Limit(settings.max_request_bytes)
        if settings.max_json_bytes < settings.max_request_bytes:
            advice = ": send large tensors as binary data, with Inference-Header-Content-Length"
            self._json_limit = http_body.Limit(settings.max_json_bytes, "max_json_bytes", "JSON", advice)
        self._seconds = settings.body_seconds
        self._repository = repository
        self._budget = budget
        self._regions = regions

    async def infer(self, request: Request) -> Response:
        """Run a model: POST /v2/models/<model>[/versions/<version>]/infer."""
        model, version = request.path_params["model"], request.path_params.get("version", "")
        meant = functools.partial(self._repository.metrics_of, model, version)
        with self._held(request) as held, metrics.counting(meant) as counting:
            return await self._infer(request, model, version, held, counting)

    async def _infer(
        self, request: Request, model: str, version: str, held: Held, counting: metrics.counting
    ) -> Response:
        scope, headers = request.scope, request.headers
        most = self._repository.most_tensors(model)
        logs.bind(model=model)
        has_binary = codec_rest.HEADER_LENGTH in headers
        limit = self._limit if has_binary else self._json_limit
        body = await http_body.read(request, limit, self._seconds, held)
        if not has_binary:
            held.take(_JSON_GROWTH * len(body))
        asked, form = await off_loop(
            len(body), codec_rest.decode, body, headers, model, version, most, self._json_limit
        )
        held.take(-len(body))  # the inputs are copies, or lie in it
        del body
        await self._regions.read(asked, form.shared, held)
        asked.id = ids.of(scope, asked.id)
        logs.bind(request_id=asked.id)
        counting.request = asked
        with cancelled_with(request):
            counting.result = await self._repository.answer(asked)
        size = sum(array.nbytes for array in counting.result.outputs.values())
        held.add(2 * size)  # the arrays, and the body made of them
        await self._regions.write(counting.result, form.shared)
        content, answer_headers = await off_loop(
            size, codec_rest.encode, counting.result, form, self._json_limit
        )
        return Response(content, headers=answer_headers)

    def _held(self, request: Request) -> Held:
        return self._budget.request(int(request.headers.get("content-length", self._limit.bytes)))

    async def metrics(self, request: Request) -> Response:
        encode, content_type = exposition.choose_encoder(request.headers.get("accept", ""))
        found = encode(await self._repository.metrics())
        return Response(found, headers={"content-type": content_type})

    async def index(self, request: Request) -> Response:
        """List models and versions with their states (repository extension)."""
        ready = (await self.read_object(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise invalid(f'"ready" must be true or false, not {shown(ready)}')
        self._repository.require_explicit()
        return as_json(await self._repository.index(ready))

    async def load(self, request: Request) -> Response:
        parameters = (await self.read_object(request)).get("parameters") or {}
        if parameters:
            raise invalid("a model is loaded from its folder as it is: parameters are not taken")
        model = request.path_params["model"]
        await self._repository.load_by_request(model)
        return as_json({"name": model, "load": True})

    async def unload(self, request: Request) -> Response:
        model = request.path_params["model"]
        await self._repository.unload_by_request(model)
        return as_json({"name": model, "unload": True})

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read a request's body, a JSON object; {} if it is empty."""
        try:
            with self._held(request) as held:
                body = await http_body.read(request, self._json_limit, self._seconds, held) or b"{}"
                content = await off_loop(len(body), orjson.loads, body)
        except orjson.JSONDecodeError as error:
            raise invalid(f"invalid JSON: {error}") from None
        if not isinstance(content, dict):
            raise invalid(f"the body must be a JSON object, not {shown(content)}")
        return content


def telling(query: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route's handler that answers with the result of a query for what its path names."""

    async def answer(request: Request) -> Response:
        found = query(**request.path_params)
        return as_json(await found if inspect.isawaitable(found) else found)

    return answer


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(orjson.dumps(content, default=str), status, headers, "application/json")


# -------------------------------------------------------------------------------- failures


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    spans.note(failure=error.failure.reason)
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
    number = ids.of(request.scope)
    _log.error("internal error", exc_info=error, extra={"request_id": number})
    return as_json({"error": f"internal error; request id {number}"}, INTERNAL.status)


FAILURES = {
    ServiceError: _failed,
    HTTPException: _no_route,
    ClientDisconnect: _client_gone,
    Exception: _bug,
}
"""The app's exception handlers: every answer is JSON with an "error"."""
