"""The settings of the server and of each model: pydantic models, read from twinop.toml."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from twinop.errors import TwinopError
from twinop.system.regular_file import read_regular

from .newer_python import tomllib

FILE = "twinop.toml"
MOST_BYTES = 256 << 10  # of a file with settings
_MOST = 2**31 - 1
_MOST_SAID = 4000  # characters of a message
# tomllib's memory grows with the square of a dotted key's parts.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")
_SERVERS = {"compare_bodies", "provider_options", "session"}
"""What a model's own folder may not change: how far it is checked, and options that may name files."""


class SettingsError(TwinopError):
    """A setting is unknown, out of range, or contradicts another one."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MOST_SAID else f"{message[:_MOST_SAID]} ...")


class Section(BaseModel):
    """A section of twinop.toml, whose values do not change. `false` is no number, and "2" neither."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _as_several(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


S = TypeVar("S", bound=Section)
_Seconds = Annotated[float, Field(le=1_000_000, allow_inf_nan=False)]  # gRPC counts milliseconds in 32 bits
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
_Options = dict[str, str | bool | int | float]
_PATHS = ("library", "library_folders", "token_file")


class ModelSettings(Section):
    """How to load and run one model."""

    library: Annotated[tuple[Path, ...], BeforeValidator(_as_several)] = Field(
        (),
        description="a custom-op library, one for each domain; by default from build/, if twinop build "
        "put it there, or from an installed package",
    )
    library_sha256: Annotated[tuple[_Sha256, ...], BeforeValidator(_as_several)] = Field(
        (), description="use libraries only if they have this SHA-256, or one of these"
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto (CUDA if it works; the log and the metadata say so), cpu or cuda"
    )
    session: _Options = Field(
        default_factory=dict,
        description="options of ONNX Runtime's sessions, such as graph_optimization_level, under its names",
    )
    provider_options: dict[Literal["cuda"], _Options] = Field(
        default_factory=dict, description="a table cuda with options of this provider, under its names"
    )
    max_batch_size: int = Field(
        0, ge=0, le=_MOST, description="most rows in one batch; 0 never batches requests"
    )
    max_queue: int = Field(
        256, gt=0, le=_MOST, description="requests that may wait; further ones are refused with 429"
    )
    instances: int = Field(
        1, ge=1, le=64, description="concurrent runs; on CUDA each has its own session and stream"
    )
    run_timeout_seconds: _Seconds | None = Field(
        None,
        gt=0,
        description="end a run that takes longer; if it goes on for 5 s, end the server with code 70",
    )
    intra_op_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="ONNX Runtime's threads for a run on the CPU; 0: one for each core of the quota",
    )
    versions: (
        Annotated[str, StringConstraints(pattern=r"^(all|latest(:[1-9][0-9]*)?)$")]
        | Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    ) = Field("latest", description="the versions to serve: latest, latest:<count>, all, or a list")
    warm_up: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(
        default_factory=dict,
        description="the shapes of the inputs for the first run; by default dynamic sizes are 1",
    )
    compare_bodies: bool = Field(
        True, description="compare the kernels with the model's function bodies before serving it"
    )
    allow_empty: bool = Field(False, description="accept inputs with a dimension of size 0")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        if self.provider_options and self.provider == "cpu":
            raise ValueError("provider_options need provider cuda or auto, not cpu")
        return self


class ServerSettings(Section):
    """Where the server listens, what it accepts, and what it reports."""

    host: str = Field("127.0.0.1", description="where to listen; 0.0.0.0 is all interfaces")
    http_port: int = Field(8080, ge=0, le=65535, description="0: one that is free")
    grpc_port: int | None = Field(8081, ge=0, le=65535, description="0: one that is free")
    poll_seconds: _Seconds = Field(
        0.0, ge=0, description="follow new, changed and removed versions and libraries this often; 0: never"
    )
    library_folders: tuple[Path, ...] = Field(
        (), description="folders to load libraries from, besides those of twinop's installation"
    )
    allow_model_libraries: bool = Field(
        False, description="also load libraries, which can run any code, from the models' own folders"
    )
    token_file: Path | None = Field(
        None, description="holds the token that clients must send; by default it is that in TWINOP_TOKEN"
    )
    max_request_bytes: int = Field(64 << 20, gt=0, description="limit for a request's body or message")
    max_json_bytes: int = Field(
        2 << 20, gt=0, description="limit for JSON in requests and answers; others wait while it is read"
    )
    max_bytes_in_flight: int = Field(
        1 << 30, gt=0, description="limit for the memory of all requests that are read or answered"
    )
    body_seconds: _Seconds = Field(
        60.0, gt=0, description="time limit for a request's body to arrive, and for gRPC's handshake"
    )
    maximum_concurrent_rpcs: int = Field(
        256, gt=0, le=_MOST, description="most gRPC calls; further ones get RESOURCE_EXHAUSTED"
    )
    grace_seconds: _Seconds = Field(30.0, ge=0, description="time after SIGTERM to answer accepted requests")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _fits(self) -> "ServerSettings":
        if self.max_bytes_in_flight < (least := 4 * self.max_request_bytes):
            raise ValueError(f"max_bytes_in_flight must be at least {least}: four times max_request_bytes")
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError("http_port and grpc_port must differ")
        return self


class Settings(Section):
    """A twinop.toml: [server], [model] for all models, [models.<name>] for one model."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)  # of the command line: they come last

    def for_model(self, name: str, own: Mapping[str, Any] = MappingProxyType({})) -> ModelSettings:
        """Return the settings of one model. Its `own` folder's come between [model] and [models.<name>]."""
        by_server = self.models.get(name, {}) | self._options
        merged = self.model.model_dump(exclude_unset=True) | dict(own) | by_server
        settings = checked(ModelSettings, merged, f"the settings of model {name}")
        is_pinned = bool(self.model.library_sha256)  # to known code, which may not become other code
        servers = {"library_sha256"} if is_pinned else set()
        if is_pinned or not self.server.allow_model_libraries:
            servers |= _SERVERS
        refused = [
            each
            for each in sorted(servers & own.keys() - by_server.keys())
            if getattr(settings, each) != getattr(self.model, each)
        ]
        if refused:
            raise SettingsError(
                f"model {name}: its folder sets {', '.join(refused)}, which only the server may: write it "
                f"under [models.{name}] in the server's {FILE}"
                + ("" if is_pinned else ", or trust all folders: allow_model_libraries = true under [server]")
            )
        return settings


def read_settings(path: Path | None, overrides: dict[str, dict[str, Any]]) -> Settings:
    """Read a twinop.toml, if given. `overrides` are command-line options by section, and take precedence.

    Paths in the file are relative to it. Libraries may be loaded from the folder of each library that is
    named here. Settings in a model's own folder do not extend these folders.
    """
    sections: dict[str, Any] = {}
    if path is not None:
        sections = read_toml(path)
        folder = path.absolute().parent
        for section in (sections.get("server"), *_model_sections(sections)):
            if isinstance(section, dict):
                section |= anchored(section, folder)
    for name, values in overrides.items():
        if isinstance(sections.setdefault(name, {}), dict):
            sections[name] |= anchored(values, Path.cwd())
    settings = checked(Settings, sections, str(path or "the options"))
    for name, values in settings.models.items():  # only the names: values may depend on its folder
        if unknown := values.keys() - ModelSettings.model_fields.keys():
            known = ", ".join(ModelSettings.model_fields)
            said = f"no such setting: {', '.join(sorted(unknown))}. There are: {known}"
            raise SettingsError(f"{path}: [models.{name}]: {said}")
    asked = [section.get("library") for section in _model_sections(sections) if isinstance(section, dict)]
    named = [each for paths in asked if isinstance(paths, tuple) for each in paths]
    folders = (*settings.server.library_folders, *(each.parent for each in named if isinstance(each, Path)))
    server = settings.server.model_copy(update={"library_folders": tuple(dict.fromkeys(folders))})
    settings = settings.model_copy(update={"server": server})
    settings._options = anchored(overrides.get("model", {}), Path.cwd())
    return settings


def _model_sections(sections: dict[str, Any]) -> list[Any]:
    models = sections.get("models")
    return [sections.get("model"), *(models.values() if isinstance(models, dict) else ())]


def anchored(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the section with relative paths resolved against `folder`, and several libraries as a tuple."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(absolute, value))
        if "\0" in str(value):
            raise SettingsError(f"{folder}: the path {value!r} has a NUL character, which none can have")
        return folder / value if isinstance(value, str | Path) else value  # pydantic reports other types

    found = {name: absolute(section[name]) for name in _PATHS if section.get(name)}
    return section | found | ({"library": _as_several(found["library"])} if "library" in found else {})


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise SettingsError if it cannot be read, or is not TOML."""
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8-sig")  # editors of Windows write such a mark
        if _LONG_KEY.search(text):
            raise SettingsError(f"{path}: not settings: a key has more than 32 parts")
        return tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or more digits or tables than Python takes
        raise SettingsError(f"{path}: not TOML: {error}") from error


def checked(kind: type[S], values: dict[str, Any], where: str) -> S:
    """Validate `values`; the message of a SettingsError lists each problem on a line."""
    try:
        return kind.model_validate(_with_tuples(values))
    except ValidationError as error:
        places = [".".join(map(str, each["loc"])) or "together" for each in error.errors()]
        lines = [f"\n  - {at}: {_said(each, kind)}" for at, each in zip(places, error.errors(), strict=True)]
        raise SettingsError(f"{where}:" + "".join(lines)) from error


def _with_tuples(value: Any) -> Any:
    """Return a value of TOML with a tuple for each array, as sections have them."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _said(problem: Any, kind: type[Section]) -> str:
    if problem["type"] == "extra_forbidden":
        for section in problem["loc"][:-1]:
            kind = kind.model_fields[section].annotation  # type: ignore[assignment]  # the section's class
        return f"no such setting. There are: {', '.join(kind.model_fields)}"
    return problem["msg"].removeprefix("Value error, ").replace("valid tuple", "valid array")
