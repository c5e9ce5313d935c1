"""The image's Python packages: the versions that are installed here, which are the ones that were tried."""

import importlib.metadata
import re
from importlib.metadata import PackageNotFoundError

from packaging.requirements import Requirement

from .errors import PackError

_NEEDED = (
    "kserve", "onnx", "numpy", "ml_dtypes", "pydantic", "prometheus-client", "orjson", "Jinja2", "uvloop",
    "grpcio", "tritonclient", "packaging", "rich", "typer",
)  # fmt: skip
_IF_INSTALLED = ("httptools", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def pinned(gpu: bool) -> list[str]:
    """The lines of a requirements.txt: what `twinop serve` needs and all that this needs in turn.

    Raises:
        PackError: a package that the service needs is not installed here.
    """
    found: dict[str, str] = {}
    for name in (*_NEEDED, *_IF_INSTALLED):
        try:
            _add(name, (), found)
        except PackageNotFoundError as error:
            if name in _NEEDED:
                raise PackError(
                    f"the package {error.name} is not installed. The image gets the versions installed here, "
                    "so the service's must be: pip install -r requirements/serve.txt"
                ) from error
    runtime = runtime_version()
    lines = [f"{name}=={version}" for name, version in found.items()]
    if gpu:  # CUDA 13 comes as pip packages, so that ONNX Runtime and torch share it
        lines += [f"onnxruntime-gpu[cuda,cudnn]=={runtime}", f"torch=={_version('torch')}"]
    else:
        lines += [f"onnxruntime=={runtime}"]
    return sorted(lines, key=str.lower)


def runtime_version() -> str:
    """Of ONNX Runtime, whichever wheel is installed."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return _version(name)
        except PackError:
            continue
    raise PackError("ONNX Runtime is not installed here: pip install onnxruntime")


def _version(name: str) -> str:
    """Without what a build adds, such as +cpu: no registry has such versions."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except PackageNotFoundError as error:
        raise PackError(
            f"{name} is not installed, and the image gets the versions installed here: pip install {name}"
        ) from error


def _add(name: str, extras: tuple[str, ...], found: dict[str, str]) -> None:
    """The package and, where not there yet, all that it requires here."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    new = key not in found
    distribution = importlib.metadata.distribution(name)
    found[key] = distribution.version.split("+")[0]
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        plain = marker is None or marker.evaluate({"extra": ""})
        if (plain and new) or any(marker and marker.evaluate({"extra": extra}) for extra in extras):
            wanted = tuple(sorted(requirement.extras))
            if wanted or re.sub(r"[-_.]+", "-", requirement.name).lower() not in found:
                _add(requirement.name, wanted, found)
