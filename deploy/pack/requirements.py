"""Lists the image's Python packages, in the versions that are installed here."""

import importlib.metadata
from importlib.metadata import PackageNotFoundError

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..errors import PackError

_NEEDED = (
    "starlette", "uvicorn", "httptools", "uvloop", "grpcio", "grpcio-health-checking", "tritonclient", "onnx",
    "numpy", "ml_dtypes", "pydantic", "prometheus-client", "orjson", "Jinja2", "packaging", "rich", "typer",
)  # fmt: skip
_IF_INSTALLED = (
    "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-instrumentation-asgi",
    "opentelemetry-instrumentation-grpc",
)  # fmt: skip


def pinned(gpu: bool) -> list[str]:
    """Returns the lines of a requirements.txt with all that `twinop serve` needs, directly or not.

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
    if gpu:  # CUDA 13 comes as pip packages
        lines += [f"onnxruntime-gpu[cuda,cudnn]=={runtime}"]
    else:
        lines += [f"onnxruntime=={runtime}"]
    return sorted(lines, key=str.lower)


def runtime_version() -> str:
    """Returns the version of ONNX Runtime, from either of its wheels.

    Raises:
        PackError: no wheel is installed.
    """
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return _version(name)
        except PackError:
            continue
    raise PackError("ONNX Runtime is not installed here: pip install onnxruntime")


def _version(name: str) -> str:
    """Returns the version without a local part such as +cpu, which no registry has."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except PackageNotFoundError as error:
        raise PackError(
            f"{name} is not installed, and the image gets the versions installed here: pip install {name}"
        ) from error


def _add(name: str, extras: tuple[str, ...], found: dict[str, str]) -> None:
    """Adds a package and all that it requires here."""
    key = canonicalize_name(name)
    new = key not in found
    distribution = importlib.metadata.distribution(name)
    found[key] = distribution.version.split("+")[0]
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        plain = marker is None or marker.evaluate({"extra": ""})
        if (plain and new) or any(marker and marker.evaluate({"extra": extra}) for extra in extras):
            wanted = tuple(sorted(requirement.extras))
            if wanted or canonicalize_name(requirement.name) not in found:
                _add(requirement.name, wanted, found)
