"""What both protocols tell of the server and its models."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from twinop import __version__

from . import triton_tools
from .datatypes import version_number
from .errors import BROKEN, NOT_READY, ServiceError
from .instance import without_paths

if TYPE_CHECKING:
    from .repository import Repository


class Queries:
    """Answers in the form of REST. A version is "" where a request names none.

    All raise ServiceError if there is no such model or version, or it is not ready.
    """

    def __init__(self, repository: "Repository") -> None:
        self._repository = repository

    def live(self) -> dict[str, Any]:
        if self._repository.broken:
            raise ServiceError(BROKEN, without_paths(self._repository.broken))
        return {"live": True}

    def ready(self) -> dict[str, Any]:
        if why := self._repository.why_not_ready():
            raise ServiceError(NOT_READY, f"the server is not ready: {why}")
        return {"ready": True}

    def server(self) -> dict[str, Any]:
        """Return the server's name and version, and the extensions that are on, under Triton's names."""
        extensions = ["binary_tensor_data", "model_configuration", "statistics"]
        extensions += ["model_repository"] if self._repository.is_controlled else []
        extensions += ["system_shared_memory"] if self._repository.settings.policy.shared_memory else []
        return {"name": "twinop", "version": __version__, "extensions": extensions}

    def models(self) -> dict[str, Any]:
        return {"models": list(self._repository.models)}

    async def model_ready(self, model: str, version: str = "") -> dict[str, Any]:
        await self._repository.require_ready(model, version_number(model, version))
        return {"name": model, "ready": True}

    def model(self, model: str, version: str = "") -> dict[str, Any]:
        """Return a model's interface, and how it runs."""
        described = self._repository.find(model, version_number(model, version)).loaded.describe()
        return {
            "name": model,
            "versions": [str(each) for each in sorted(self._repository.models[model].versions)],
            "platform": "onnxruntime_onnx",
            **described,
        }

    def config(self, model: str, version: str = "") -> Any:
        """Return Triton's ModelConfig. A ServiceError says so if Triton has no counterpart of the model."""
        return triton_tools.model_config(self._repository.find(model, version_number(model, version)).loaded)

    def config_as_json(self, model: str, version: str = "") -> dict[str, Any]:
        return triton_tools.as_json(self.config(model, version))

    async def statistics(self, model: str = "", version: str = "") -> dict[str, Any]:
        """Return Triton's ModelStatistics of each version of a model; of all models for ""."""
        if model:
            self._repository.find(model, version_number(model, version))
        metrics = await self._repository.metrics()
        return {"model_stats": triton_tools.statistics(metrics, model, version)}

    async def status(self) -> dict[str, Any]:
        """Return the server's state, and every version with its state and how it runs."""
        repository = self._repository
        counts: Counter[tuple[str, str, str]] = Counter()
        for family in (await repository.metrics()).collect():
            for name, labels, value, *_ in family.samples if family.type == "gauge" else ():
                counts[name, labels.get("model", ""), labels.get("version", "")] += int(value)
        versions: list[dict[str, Any]] = []
        for each in await repository.index():
            versions.append({**each, "state": each["state"].lower()})
            model = repository.models.get(each["name"])
            if model is not None and (served := model.versions.get(int(each["version"]))) is not None:
                versions[-1] |= served.loaded.describe()["parameters"]
                for count in ("queued", "in_flight"):  # of all processes
                    versions[-1][count] = counts[f"twinop_{count}", each["name"], each["version"]]
        ready = "loading" if repository.why_not_ready() else "ready"
        return {
            "version": __version__,
            "state": "draining" if repository.draining else ready,
            "started": repository.started,
            "control": repository.settings.server.control,
            "models": versions,
        }
