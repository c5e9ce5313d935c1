"""The settings of the server and of each model: pydantic models, read from twinop.toml."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, model_validator

from twinop.errors import TwinopError
from twinop.system.regular_file import read_regular

from .cores import quota
from .model_settings import ModelSettings, Section
from .newer_python import StrEnum, tomllib
from .runtime_options import OptionError, not_for_folders, with_threads

FILE = "twinop.toml"
MOST_BYTES = 256 << 10  # of a file with settings
# tomllib's memory grows with the square of a dotted key's parts.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")


class SettingsError(TwinopError):
    """A setting is unknown, out of range, or contradicts another one. Long values in the message are cut."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


def cut(message: str, line: int = 1000, lines: int = 20) -> str:
    """Return the message with the middle of long lines and the last of many lines left out."""
    kept = [
        text if len(text) <= line else f"{text[: line // 2]} ... {text[-line // 4 :]}"
        for text in message.split("\n", lines)[:lines]
    ]
    more = message.count("\n") + 1 - len(kept)
    return "\n".join([*kept, f"  ... and {more} more lines"] if more > 0 else kept)


class Control(StrEnum):
    """Who decides what is loaded after the start."""

    NONE = "none"  # serve what is there at the start
    POLL = "poll"  # follow new, changed and removed versions and libraries
    EXPLICIT = "explicit"  # clients load and unload models


S = TypeVar("S", bound=Section)
_PATHS = (
    "library", "library_folders", "tls_certificate", "tls_key", "token_file", "control_token_file",
)  # fmt: skip


class ServerSettings(Section):
    """Where the server listens, what it accepts, and what it reports."""

    host: str = Field("127.0.0.1", description="where to listen; 0.0.0.0 is all interfaces")
    http_port: int = Field(8080, ge=0, le=65535, description="0: one that is free")
    grpc_port: int | None = Field(8081, ge=0, le=65535, description="0: one that is free")
    reuse_port: bool = Field(
        False, description="let several servers listen on these ports; the kernel spreads the connections"
    )
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="a port of this server alone, for probes, metrics and control"
    )
    control: Control = Field(
        Control.NONE, description="what loads models later: none, poll (the folder) or explicit (clients)"
    )
    strict: bool = Field(False, description="end at the start if a model cannot be loaded, not if all cannot")
    poll_seconds: float = Field(1.0, gt=0)
    library_folders: tuple[Path, ...] = Field(
        (), description="folders to load libraries from, besides those of twinop's installation"
    )
    token: SecretStr | None = Field(
        None, min_length=1, description="clients must send Authorization: Bearer <token>"
    )
    control_token: SecretStr | None = Field(
        None, min_length=1, description="the token for loading and unloading; by default token"
    )
    token_file: Path | None = Field(
        None, description="holds the token that clients must send; by default that in TWINOP_TOKEN"
    )
    control_token_file: Path | None = None
    tls_certificate: Path | None = Field(None, description="a PEM file; needs its key too")
    tls_key: Path | None = Field(None, description="a PEM file")
    max_request_bytes: int = Field(64 << 20, gt=0, description="limit for a request's body or message")
    max_json_bytes: int = Field(
        2 << 20, gt=0, description="limit for JSON in requests and answers; others wait while it is read"
    )
    max_bytes_in_flight: int = Field(
        default_factory=lambda given: max(1 << 30, _least_in_flight(given)),
        gt=0,
        description="limit for the memory of all requests that are read or answered",
    )
    body_seconds: float = Field(
        60.0, gt=0, description="time limit for a request's body to arrive, and for gRPC's handshake"
    )
    limit_concurrency: int | None = Field(
        None, gt=0, description="most HTTP connections, and requests; further ones get 503"
    )
    maximum_concurrent_rpcs: int = Field(
        256, gt=0, description="most gRPC calls; further ones get RESOURCE_EXHAUSTED"
    )
    grace_seconds: float = Field(30.0, ge=0, description="time after SIGTERM to answer accepted requests")
    access_log: bool = Field(False, description="log a line for each HTTP request")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _fits(self) -> "ServerSettings":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_certificate and tls_key")
        for name in ("token", "control_token"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"{name} (or TWINOP_TOKEN) and {name}_file: give one of them")
        if self.max_bytes_in_flight < (least := _least_in_flight(self.__dict__)):
            raise ValueError(f"max_bytes_in_flight must be at least {least}: four times max_request_bytes")
        if self.control == Control.EXPLICIT and self.reuse_port and self.admin_port is None:
            raise ValueError(
                "control explicit with reuse_port needs admin_port: on a shared port a client cannot choose "
                "the server that loads a model"
            )
        return self


def _least_in_flight(given: Mapping[str, Any]) -> int:
    """The least memory for requests: four of the largest."""
    return 4 * int(given.get("max_request_bytes", 0))


class Policy(Section):
    """What the folders of models may bring and ask for. Settings in these folders cannot change it."""

    allow_model_libraries: bool = Field(
        False, description="also load libraries, which can run any code, from the models' own folders"
    )
    allow_weaker_checks: bool = Field(
        False,
        description="settings in a model's own folder may allow_fallback, turn compare_bodies off, and "
        "replace the server's library_sha256",
    )
    max_instances: int = Field(
        8, ge=1, description="the most instances that a model's own folder may ask for"
    )

    def require(self, name: str, asked: ModelSettings, by_folder: set[str], server: ModelSettings) -> None:
        """Check what a model's own folder asks for.

        Args:
            asked: the model's settings.
            by_folder: the names of those that its folder decides.
            server: the server's settings for all models.

        Raises:
            SettingsError: the policy does not permit it.
        """
        weaker = {
            "allow_fallback = true": asked.allow_fallback and not server.allow_fallback,
            "compare_bodies = false": server.compare_bodies and not asked.compare_bodies,
            f"library_sha256 = {json.dumps(asked.library_sha256)}": bool(server.library_sha256)
            and asked.library_sha256 != server.library_sha256,
        }
        found = [text for text, is_weaker in weaker.items() if is_weaker and text.split()[0] in by_folder]
        if found and not self.allow_weaker_checks:
            raise SettingsError(
                f"model {name}: its folder asks for {' and '.join(found)}, but only the server decides what "
                f"is checked: write this under [models.{name}] in the server's {FILE}, or let all models "
                "decide for themselves, with allow_weaker_checks = true under [policy]"
            )
        tables = {"session": [asked.session], "provider_options": asked.provider_options.values()}
        if names := not_for_folders(*(each for name in by_folder & tables.keys() for each in tables[name])):
            raise SettingsError(
                f"model {name}: its folder sets {', '.join(names)}, which name files, code or addresses, or "
                f"are not known to be harmless: only the server may, under [models.{name}] in its {FILE}"
            )
        most = max(self.max_instances, server.instances)
        if "instances" in by_folder and asked.instances > most:
            raise SettingsError(
                f"model {name}: its folder asks for {asked.instances} instances, but the server permits "
                f"{most}: write max_instances = {asked.instances} under [policy] in the server's {FILE}"
            )


class Settings(Section):
    """A twinop.toml: [server], [policy], [model] for all models, [models.<name>] for one model."""

    server: ServerSettings = ServerSettings()
    policy: Policy = Policy()
    model: ModelSettings = ModelSettings()
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    _options: dict[str, Any] = PrivateAttr(
        default_factory=dict
    )  # from the command line, which overrides everything

    def for_model(self, name: str, own: Mapping[str, Any] = MappingProxyType({})) -> ModelSettings:
        """Return the settings of one model.

        Those in its `own` folder come between [model] and [models.<name>].

        Raises:
            SettingsError: a setting is invalid, or its folder asks for what the policy does not permit.
        """
        by_server = self.models.get(name, {}) | self._options
        merged = self.model.model_dump(exclude_unset=True) | dict(own) | by_server
        settings = checked(ModelSettings, merged, f"the settings of model {name}")
        by_folder = own.keys() - by_server.keys()
        self.policy.require(name, settings, by_folder, self.model)
        cores = quota() or len(os.sched_getaffinity(0))
        if "intra_op_threads" in by_folder and settings.intra_op_threads > cores:
            settings = settings.model_copy(update={"intra_op_threads": cores})
        if "session" in by_folder:
            try:
                settings = settings.model_copy(update={"session": with_threads(settings.session, cores)})
            except OptionError as error:
                raise SettingsError(f"model {name}: {error}") from error
        return settings


def read_settings(path: Path | None, overrides: dict[str, dict[str, Any]]) -> Settings:
    """Read a twinop.toml, if given. `overrides` are command-line options by section, and take precedence.

    Paths in the file are relative to it. Libraries may be loaded from the folder of each library that is
    named here. Settings in a model's own folder do not extend these folders.

    Raises:
        SettingsError: the file is missing or not TOML, or a setting is invalid.
    """
    sections: dict[str, Any] = {}
    if path is not None:
        sections = read_toml(path)
        folder = path.absolute().parent
        for section in (sections.get("server"), *_model_sections(sections)):
            if isinstance(section, dict):
                section |= anchored(section, folder)
    for section, values in overrides.items():
        if isinstance(sections.setdefault(section, {}), dict):
            sections[section] |= anchored(values, Path.cwd())
    settings = checked(Settings, sections, str(path or "the options"))
    for name, values in settings.models.items():  # only the names: values may depend on its folder
        if unknown := values.keys() - ModelSettings.model_fields.keys():
            known = ", ".join(ModelSettings.model_fields)
            said = f"no such setting: {', '.join(sorted(unknown))}. There are: {known}"
            raise SettingsError(f"{path}: [models.{name}]: {said}")
    asked = [section.get("library") for section in _model_sections(sections) if isinstance(section, dict)]
    named = [path for paths in asked for path in (paths if isinstance(paths, tuple) else (paths,))]
    folders = (*settings.server.library_folders, *(each.parent for each in named if isinstance(each, Path)))
    server = settings.server.model_copy(update={"library_folders": tuple(dict.fromkeys(folders))})
    settings = settings.model_copy(update={"server": server})
    settings._options = anchored(overrides.get("model", {}), Path.cwd())
    return settings


def _model_sections(sections: dict[str, Any]) -> list[Any]:
    models = sections.get("models")
    return [sections.get("model"), *(models.values() if isinstance(models, dict) else ())]


def anchored(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the section with relative paths resolved against `folder`."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(absolute, value))
        if "\0" in str(value):
            raise SettingsError(f"{folder}: the path {value!r} has a NUL character, which none can have")
        if isinstance(value, str | Path) and any(len(os.fsencode(part)) > 255 for part in Path(value).parts):
            raise SettingsError(f"{folder}: the path {str(value)!r} has a name of more than 255 bytes")
        return folder / value if isinstance(value, str | Path) else value  # pydantic reports other types

    return section | {name: absolute(section[name]) for name in _PATHS if section.get(name)}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise SettingsError if it cannot be read, or is not TOML."""
    try:
        text = read_regular(path, MOST_BYTES).decode()
        if _LONG_KEY.search(text):
            raise SettingsError(f"{path}: not settings: a key has more than 32 parts")
        return tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not TOML, or a number with more digits than Python takes
        raise SettingsError(f"{path}: not TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: not settings: arrays or tables are nested too deeply") from error


def checked(kind: type[S], values: dict[str, Any], where: str) -> S:
    """Validate `values`; the message of a SettingsError lists each problem on a line."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, each['loc'])) or 'together'}: {_said(each, kind)}"
            for each in error.errors()
            if each["type"] != "default_factory_not_called"  # follows from another problem
        ]
        raise SettingsError(f"{where}:" + "".join(f"\n  - {line}" for line in lines)) from error


def _said(problem: Any, kind: type[Section]) -> str:
    if problem["type"] == "extra_forbidden":
        for section in problem["loc"][:-1]:
            kind = kind.model_fields[section].annotation  # type: ignore[assignment]  # the section's class
        return f"no such setting. There are: {', '.join(kind.model_fields)}"
    return problem["msg"].removeprefix("Value error, ")
