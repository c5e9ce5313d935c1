"""The operations of the protocol: where REST and gRPC have each, what answers it, and who may ask."""

import hmac
import os
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from twinop import __version__
from twinop.system.regular_file import read_regular

from .datatypes import version_number
from .errors import BROKEN, NOT_READY, ServiceError
from .instance import without_paths
from .repository import Repository
from .settings import MOST_BYTES, ServerSettings, SettingsError

OPEN = ("/v2/health/live", "/v2/health/ready")
"""The paths that need no token."""
MODEL = "/v2/models/{model}"
"""What follows is also there for a version of the model."""


class Operation(NamedTuple):
    """One operation."""

    method: str
    path: str
    rpc: str  # its name in gRPC; "" if only REST has it
    # Returns a dict with the fields of gRPC's answer. Its arguments are the names in the path. None: each
    # server has a handler of its own.
    answer: Callable[..., Any] | None
    as_rest: Callable[[dict[str, Any]], Any] = lambda found: found  # makes REST's answer of the dict
    is_question: bool = False  # over gRPC the answer is "false" if the server or the model is not ready


def operations(repository: Repository) -> list[Operation]:
    """Return the operations. A model or version that a request does not name is ""."""

    def live() -> dict[str, Any]:
        if repository.broken:
            raise ServiceError(BROKEN, without_paths(repository.broken))
        return {"live": True}

    def ready() -> dict[str, Any]:
        if why := repository.why_not_ready():
            raise ServiceError(NOT_READY, f"the server is not ready: {why}")
        missing = repository.unavailable()
        return {"ready": True} | ({"unavailable": missing} if missing else {})

    def model_ready(model: str, version: str = "") -> dict[str, Any]:
        repository.find(model, version_number(model, version))
        return {"name": model, "ready": True}

    def metadata(model: str, version: str = "") -> dict[str, Any]:
        described = repository.find(model, version_number(model, version)).loaded.describe()
        versions = [str(each) for each in sorted(repository.models[model])]
        return {"name": model, "versions": versions, "platform": "onnxruntime_onnx", **described}

    def index() -> dict[str, Any]:
        return {"models": repository.index()}

    server = {"name": "twinop", "version": __version__, "extensions": ["binary_tensor_data"]}
    return [
        Operation("POST", f"{MODEL}/infer", "ModelInfer", None),
        Operation("GET", MODEL, "ModelMetadata", metadata),
        Operation("GET", f"{MODEL}/ready", "ModelReady", model_ready, is_question=True),
        Operation("GET", "/v2/models", "", lambda: {"models": list(repository.models)}),
        Operation("GET", "/v2", "ServerMetadata", lambda: server),
        Operation("GET", OPEN[0], "ServerLive", live, is_question=True),
        Operation("GET", OPEN[1], "ServerReady", ready, is_question=True),
        Operation("GET", "/", "", lambda: {"status": "alive"}),  # as KServe does
        Operation("GET", "/metrics", "", None),
        Operation("POST", "/v2/repository/index", "RepositoryIndex", index, itemgetter("models")),
    ]


class Token:
    """The bearer token that clients must send: in the file that the settings name, or in TWINOP_TOKEN."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read the token; SettingsError: its file cannot be read, or it is empty."""
        where, found = "TWINOP_TOKEN", os.environb.get(b"TWINOP_TOKEN")
        if (file := settings.token_file) is not None:
            where = f"the token's file {file}"
            try:
                found = read_regular(file, MOST_BYTES)
            except OSError as error:
                raise SettingsError(f"{where} cannot be read: {error.strerror}") from error
        self._wanted = found if found is None else found.strip()
        if self._wanted == b"":  # such as a secret that is missing: the server would be open to all
            raise SettingsError(f"{where} is empty. Give it a token, or leave it out to serve without one")

    def allow(self, path: str, authorization: bytes) -> bool:
        """Return whether a request for the path may be answered, by its Authorization header."""
        if self._wanted is None or path in OPEN:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._wanted)
