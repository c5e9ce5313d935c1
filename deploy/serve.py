"""`twinop serve`: serve ONNX models over the Open Inference Protocol; `twinop check`: do all but serve.

Their options are settings: types, defaults and helps are those of the settings.
"""

import gc
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from twinop.cli.console import Timeout
from twinop.errors import TwinopError

from .service.settings import FILE, ModelSettings, Section, ServerSettings, Settings, read_settings

Command = TypeVar("Command", bound=Callable[..., None])
_SECTIONS: dict[str, type[Section]] = {"server": ServerSettings, "model": ModelSettings}
_FLAGS = {"library_folders": "--library-folder"}  # given once for each folder


def takes_settings(**panels: Sequence[str]) -> Callable[[Command], Command]:
    """Give a command options for the settings of each panel, as `**given`: None if they are not given."""

    def changed(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [_option(name, panel) for panel, names in panels.items() for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return changed


def _option(name: str, panel: str) -> inspect.Parameter:
    [field] = (kind.model_fields[name] for kind in _SECTIONS.values() if name in kind.model_fields)
    kind: Any = field.annotation
    if isinstance(field.default, tuple):  # the option is given several times
        each = get_args(kind)[0]
        kind = list[getattr(each, "__origin__", each)]  # type: ignore[misc]  # without a setting's conditions
    default = "" if field.default in (None, ()) else str(field.default)
    flags = [_FLAGS[name]] if name in _FLAGS else []
    option = typer.Option(
        *flags, help=field.description, rich_help_panel=panel, show_default=default or False
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def settings_of(models: Path, config: Path | None, given: dict[str, Any], **fixed: Any) -> Settings:
    """Return the settings of a command: those of twinop.toml, the options, and `fixed` ones."""
    if config is None and os.path.lexists(models / FILE):
        config = models / FILE
    values = {name: value for name, value in given.items() if value is not None} | fixed
    sections = {
        section: {name: value for name, value in values.items() if name in kind.model_fields}
        for section, kind in _SECTIONS.items()
    }
    return read_settings(config, sections)


@takes_settings(
    Server=(
        "host", "http_port", "grpc_port", "poll_seconds", "token_file", "log_level",
    ),
    Models=("library", "library_folders", "allow_model_libraries", "provider", "max_batch_size"),
)  # fmt: skip
def main(
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.")],
    config: Annotated[Path | None, typer.Option(help=f"Default: {FILE} in the folder.")] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")] = False,
    **given: Any,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2).

    A folder has Triton's layout, models/<name>/<version>/model.onnx, with a
    twinop.toml if needed; <name>/model.onnx works too. Further settings are in
    twinop.toml (docs/serving.md).
    A file is served under its stem. The service reports ready once each model's
    custom-op library is found, checked, registered and compared with the model's
    function bodies. After SIGTERM it answers all accepted requests.

    Examples:

        twinop serve models/

        twinop serve custom_relu.onnx --library build/libcustom_relu.so

        curl -s localhost:8080/v2/models/custom_relu

    The last command, in another shell, describes the model and its inputs.
    Send these to /v2/models/custom_relu/infer. Prometheus reads /metrics.
    """
    fixed = {"grpc_port": None} if no_grpc else {}
    settings = settings_of(models, config, given, **fixed)
    # Imported late: --help and refused options do not need these modules.
    gc.disable()  # imports leave no garbage; the server turns it on once the models are loaded
    from .service import logs

    logs.configure(settings.server.log_level)
    from .service.folders import scan

    scan(models)
    from .service.repository import Repository
    from .service.server import Server

    Server(Repository(models, settings)).start()


@takes_settings(
    Models=(
        "library", "library_sha256", "library_folders", "allow_model_libraries", "provider", "max_batch_size",
    ),
)  # fmt: skip
def check(
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.")],
    config: Annotated[Path | None, typer.Option(help=f"Default: {FILE} in the folder.")] = None,
    timeout: Timeout = 600,
    **given: Any,
) -> None:
    """Check models as twinop serve does before it serves them.

    Reads the same settings and takes the same options. For each version that
    would be served, it finds the custom-op library, compares the model's nodes
    with the library's records, opens the session, runs the model, and compares
    the kernels with the model's function bodies. Then it ends: nothing listens
    on a port. The exit code is 0 if all of them can be served, else 1, as an
    init container or a pipeline needs it.

    Examples:

        twinop check custom_relu.onnx --library build/libcustom_relu.so

        twinop check models/ --allow-model-libraries --provider cpu
    """
    settings = settings_of(models, config, given)
    from twinop.cli.console import out

    from .ort_process import SERVER, time_limit
    from .service.folders import scan

    problems = []
    for name, folder in scan(models).items():
        try:
            asked = folder.settings(settings)
            for where in folder.wanted(asked.versions).values():
                with time_limit(timeout):
                    [summary] = SERVER.run(_load, where, asked, settings.server)
                line = f"{name} version {where.version} can be served: {summary}"
                out.print(line, soft_wrap=True)
        except TwinopError as error:
            problems.append(f"model {name}: {error}")
            SERVER.close()  # a GPU's error may stay in the process
    if problems:
        raise TwinopError("\n".join(problems))


def _load(*version: Any) -> Iterator[str]:
    """Yields how a version would be served, in another process."""
    from .service.loading import load

    loaded = load(*version)
    yield loaded.summary()
    loaded.close()
