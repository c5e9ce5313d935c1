"""`twinop serve`: serve ONNX models over the Open Inference Protocol."""

import functools
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinop.console import clear_errors

from .service.model_settings import ModelSettings, Provider
from .service.settings import FILE, Control, Policy, ServerSettings, Settings, read_settings

if TYPE_CHECKING:
    from .service.processes import Member


def _server(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server", show_default=False)


def _model(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Models", show_default=False)


def main(
    context: typer.Context,
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option(help=f"Default: {FILE} in the folder.", show_default=False)
    ] = None,
    host: Annotated[str | None, _server("Default: 127.0.0.1. 0.0.0.0 listens on all interfaces.")] = None,
    http_port: Annotated[int | None, _server("Default: 8080. 0 picks a free port.")] = None,
    grpc_port: Annotated[int | None, _server("Default: 8081. 0 picks a free port.")] = None,
    no_grpc: Annotated[bool, _server("Serve HTTP only.", "--no-grpc")] = False,
    processes: Annotated[
        int | None, _server("Processes that serve behind the same ports. Default: 1.")
    ] = None,
    control: Annotated[
        Control | None,
        _server("What loads models later: none (default), poll (the folder) or explicit (clients)."),
    ] = None,
    token_file: Annotated[
        Path | None, _server("The file with the bearer token that clients must send. Default: TWINOP_TOKEN.")
    ] = None,
    tls_certificate: Annotated[Path | None, _server("A PEM file; needs --tls-key.")] = None,
    tls_key: Annotated[Path | None, _server("A PEM file.")] = None,
    max_request_bytes: Annotated[int | None, _server("Default: 64 MiB.")] = None,
    grace_seconds: Annotated[
        float | None, _server("Time to answer accepted requests after SIGTERM. Default: 30.")
    ] = None,
    access_log: Annotated[bool | None, _server("Log a line for each HTTP request.")] = None,
    log_level: Annotated[str | None, _server("debug, info, warning or error.")] = None,
    profile: Annotated[Path | None, _server("The folder for ONNX Runtime's profiles.")] = None,
    library: Annotated[
        Path | None, _model("The custom-op library. Default: one of those installed or in the folders below.")
    ] = None,
    library_sha256: Annotated[str | None, _model("Use the library only if it has this SHA-256.")] = None,
    library_folders: Annotated[
        list[Path] | None, _model("A further folder to load libraries from.", "--library-folder")
    ] = None,
    libraries: Annotated[
        str | None,
        _model("folders (default), or models: also load libraries from the models' own folders."),
    ] = None,
    provider: Annotated[Provider | None, _model("auto (CUDA if it works), cpu or cuda.")] = None,
    allow_fallback: Annotated[
        bool | None, _model("Run function bodies if the library cannot be used.")
    ] = None,
    max_batch_size: Annotated[
        int | None, _model("Join requests into runs of at most this many rows. Default: never.")
    ] = None,
    instances: Annotated[int | None, _model("Concurrent runs. Default: 1.")] = None,
    max_queue: Annotated[int | None, _model("Requests that may wait. Default: 256.")] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2).

    A folder has Triton's layout, models/<name>/<version>/model.onnx, with
    config.pbtxt or twinop.toml if needed; <name>/model.onnx works too.
    A file is served under its stem. The service reports ready once each model's
    custom-op library is found, checked, registered and compared with the model's
    function bodies. After SIGTERM it answers all accepted requests.

    Examples:

        twinop serve models/

        twinop serve custom_relu.onnx --library build/libcustom_relu.so

        curl -s localhost:8080/v2/models/custom_relu

    The last command, in another shell, describes the model and its inputs.
    Send these to /v2/models/custom_relu/infer. Prometheus reads /metrics;
    /status says in JSON what is served, and how.
    """
    with clear_errors():
        server: dict[str, Any] = {"grpc_port": None} if no_grpc else {}
        if token_file is None and (token := os.environ.get("TWINOP_TOKEN")):
            server["token"] = token
        settings = settings_of(context, models, config, **server)
        # Imported late: --help and refused options do not need these modules.
        from .service import logs

        logs.configure(settings.server.log_level, settings.server.access_log)
        if settings.server.processes > 1:
            from .service.processes import Supervisor

            raise typer.Exit(Supervisor(settings, functools.partial(_serve, models)).run())
        _serve(models, settings)


def _serve(models: Path, settings: Settings, member: "Member | None" = None) -> None:
    """Serve in this process, which ends with it. `member` is set if it is one of several."""
    gc.disable()  # imports leave no garbage; the server turns it on once the models are loaded
    from .service import logs, spans
    from .service.folders import scan

    if settings.server.devices:
        from .service.processes import use_gpu

        use_gpu(settings.server.devices[member.number if member is not None else 0])
    scan(models, may_be_empty=settings.server.control == Control.EXPLICIT)  # other servers need a model
    if member is None:
        from .service.repository import Repository

        repository = Repository(models, settings)
    else:
        from .service.shared_repository import SharedRepository

        logs.configure(settings.server.log_level, settings.server.access_log, process=member.number)
        repository = SharedRepository(models, settings, member)
    from .service.server import Server

    spans.configure(settings.server.otlp_endpoint)
    Server(repository).start()


def settings_of(context: typer.Context, models: Path, config: Path | None, **server: Any) -> Settings:
    """Return the settings of a command: those of twinop.toml, `server`, and the options named as settings.

    Raises:
        SettingsError: a setting is invalid.
    """
    given = {
        section: {
            name: value
            for name, value in context.params.items()
            if name in kind.model_fields and value not in (None, [], ())
        }
        for section, kind in (("server", ServerSettings), ("policy", Policy), ("model", ModelSettings))
    }
    given["server"] |= server
    if config is None and (models / FILE).is_file():
        config = models / FILE
    return read_settings(config, given)
