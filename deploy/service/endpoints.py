"""The protocol's routes over HTTP, and how their failures are answered."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from twinop.deploy.service import bodies, codec_rest, ids, logs, metrics, spans
from twinop.deploy.service._kserve import (
    DataPlane,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    V2Endpoints,
)
from twinop.deploy.service.connection import wait_in
from twinop.deploy.service.datatypes import shown, version_number
from twinop.deploy.service.errors import (
    CANCELLED,
    INTERNAL,
    INVALID,
    NO_METHOD,
    NOT_FOUND,
    NOT_READY,
    Failure,
    ServiceError,
    invalid,
)
from twinop.deploy.service.request import LARGE
from twinop.deploy.service.settings import ServerSettings

if TYPE_CHECKING:
    from twinop.deploy.service.repository import Repository

_log = logging.getLogger(__name__)


Made = TypeVar("Made")


async def off_loop(size: int, work: Callable[..., Made], *arguments: Any) -> Made:
    """What is quick at once, the rest in a thread: 60 MB of JSON, or of empty strings, take seconds."""
    return work(*arguments) if size <= LARGE else await asyncio.to_thread(work, *arguments)


class Endpoints(V2Endpoints):
    """The protocol's routes. Each raises ServiceError, which `RestServer` turns into an answer."""

    def __init__(self, settings: ServerSettings, dataplane: DataPlane, repository: "Repository") -> None:
        super().__init__(dataplane)
        self._limit = self._json_limit = bodies.Limit(settings.max_request_bytes)
        if settings.max_json_bytes < settings.max_request_bytes:
            advice = ": send large tensors as binary data, with Inference-Header-Content-Length"
            self._json_limit = bodies.Limit(settings.max_json_bytes, "max_json_bytes", "JSON", advice)
        self._repository = repository

    async def infer(self, request: Request) -> Response:
        model = request.scope["path_params"]["model_name"]
        version = request.scope["path_params"].get("model_version", "")
        meant = functools.partial(self._repository.metrics_of, model, version)
        with spans.request_span("infer", request.headers), metrics.counting(meant) as counting:
            try:
                return await self._infer(request, model, version, counting)
            finally:
                spans.note(request_id=ids.of(request.scope))

    async def _infer(
        self, request: Request, model: str, version: str, counting: metrics.counting
    ) -> Response:
        scope, headers = request.scope, request.headers
        most = self._repository.most_tensors(model)
        logs.bind(model=model)
        has_binary = codec_rest.HEADER_LENGTH in headers
        body = await bodies.read(request, self._limit if has_binary else self._json_limit)
        asked, form = await off_loop(
            len(body), codec_rest.decode, body, headers, model, version, most, self._json_limit
        )
        asked.id = ids.of(scope, asked.id)
        logs.bind(request_id=asked.id)
        wait_in(scope)
        counting.result, _ = await self.dataplane.infer(model, asked, headers)
        size = sum(array.nbytes for array in counting.result.outputs.values())
        content, answer_headers = await off_loop(size, codec_rest.encode, counting.result, form)
        return Response(content, headers=answer_headers)

    async def ready(self) -> Response:
        if not await self._repository.ready():
            raise ServiceError(
                NOT_READY, "the server is not ready: its models are loading, or it is stopping"
            )
        return as_json({"ready": True})

    async def metadata(self) -> Response:
        return as_json(server_metadata(self.dataplane, self._repository))

    async def model_metadata(self, model_name: str, model_version: str = "") -> Response:
        return as_json(model_metadata(self._repository, model_name, model_version))

    async def model_ready(self, model_name: str, model_version: str = "") -> Response:
        self._repository.find(model_name, version_number(model_name, model_version))
        return as_json({"name": model_name, "ready": True})

    async def index(self, request: Request) -> Response:
        ready = (await self._object(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise invalid(f'"ready" must be true or false, not {shown(ready)}')
        return as_json(await self._repository.index_by_request(ready))

    async def load(self, request: Request) -> Response:
        parameters = (await self._object(request)).get("parameters") or {}
        if parameters:
            raise invalid("a model is loaded from its folder as it is: parameters are not taken")
        model = request.path_params["model_name"]
        await self._repository.load_by_request(model)
        return as_json({"name": model, "load": True})

    async def unload(self, request: Request) -> Response:
        model = request.path_params["model_name"]
        await self._repository.unload_by_request(model)
        return as_json({"name": model, "unload": True})

    async def _object(self, request: Request) -> dict[str, Any]:
        try:
            body = await bodies.read(request, self._json_limit) or b"{}"
            content = await off_loop(len(body), orjson.loads, body)
        except orjson.JSONDecodeError as error:
            raise invalid(f"invalid JSON: {error}") from None
        if not isinstance(content, dict):
            raise invalid(f"the body must be a JSON object, not {shown(content)}")
        return content


def server_metadata(dataplane: DataPlane, repository: "Repository") -> dict[str, Any]:
    """KServe's, with the extensions that are on, as Triton calls them."""
    extensions = ["binary_tensor_data", *(["model_repository"] if repository.is_controlled else [])]
    return dataplane.metadata() | {"extensions": extensions}


def model_metadata(repository: "Repository", model: str, version: str) -> dict[str, Any]:
    """
    Raises:
        ServiceError: there is no such model or version, or it is not ready.
    """
    described = repository.find(model, version_number(model, version)).loaded.describe()
    return {
        "name": model,
        "versions": [str(each) for each in sorted(repository.models[model].versions)],
        "platform": "onnxruntime_onnx",
        **{key: described[key] for key in ("inputs", "outputs", "parameters")},
    }


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content, default=str), status, headers, "application/json")


# -------------------------------------------------------------------------------- failures


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, ServiceError):
        error = _translated(error)
    return as_json({"error": str(error)}, error.failure.status, error.headers)


_KSERVES: dict[type[Exception], Failure] = {
    InvalidInput: INVALID,
    ModelNotFound: NOT_FOUND,
    ModelNotReady: NOT_READY,
}


def _translated(error: Exception) -> ServiceError:
    """KServe's own errors as ours."""
    return ServiceError(_KSERVES.get(type(error), INTERNAL), str(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, said = shown(request.url.path), error.detail
    if error.status_code == NOT_FOUND.status:
        said = f"there is nothing at {path}; the protocol is below /v2"
    elif error.status_code == NO_METHOD.status:
        said = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}"
    return as_json({"error": said}, error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CANCELLED.status)  # for nobody


async def _bug(request: Request, error: Exception) -> Response:
    """Nothing of the error goes out but the id under which the log has it."""
    number = ids.of(request.scope)
    _log.error("internal error", exc_info=error, extra={"request_id": number})
    return as_json({"error": f"internal error; request id {number}"}, INTERNAL.status)


def answer_failures(app: FastAPI) -> None:
    """Sets the app's handlers of exceptions: whatever happens, the answer is JSON with an "error"."""
    for kind in (ServiceError, ModelNotFound, ModelNotReady, InvalidInput):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
