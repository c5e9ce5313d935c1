"""`twinop serve`: serve ONNX models over the Open Inference Protocol."""

import functools
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinop.console import clear_errors

from .service.options import settings_of, takes_settings
from .service.settings import FILE, Control, Settings

if TYPE_CHECKING:
    from .service.processes import Member


@takes_settings(
    Server=(
        "host", "http_port", "grpc_port", "processes", "control", "token_file", "tls_certificate", "tls_key",
        "max_request_bytes", "grace_seconds", "access_log", "log_level", "profile",
    ),
    Models=(
        "library", "library_sha256", "library_folders", "allow_model_libraries", "provider", "allow_fallback",
        "max_batch_size", "instances", "max_queue",
    ),
)  # fmt: skip
def main(
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option(help=f"Default: {FILE} in the folder.", show_default=False)
    ] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")] = False,
    **given: Any,
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
        fixed: dict[str, Any] = {"grpc_port": None} if no_grpc else {}
        if given["token_file"] is None and (token := os.environ.get("TWINOP_TOKEN")):
            fixed["token"] = token
        settings = settings_of(models, config, given, **fixed)
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

    spans.configure()
    Server(repository).start()
