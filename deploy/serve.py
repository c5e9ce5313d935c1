"""`twinop serve`: serve ONNX models over the Open Inference Protocol."""

import gc
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.cli.console import clear_errors

from .service.options import settings_of, takes_settings
from .service.settings import FILE


@takes_settings(
    Server=(
        "host", "http_port", "grpc_port", "reuse_port", "admin_port", "poll_seconds", "token_file",
        "log_level",
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
    with clear_errors():
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
