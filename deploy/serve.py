"""`twinop serve`: an ONNX model, or a folder of them, behind the Open Inference Protocol."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.console import clear_errors

from .service.settings import FILE, Control, Provider, SettingsError, read_settings

_SERVER = "server"
_MODEL = "model"


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def main(
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option(help=f"Default: {FILE} in the folder.", show_default=False)
    ] = None,
    host: Annotated[str | None, _option("Default: 127.0.0.1; 0.0.0.0 for all.", "Server")] = None,
    http_port: Annotated[int | None, _option("Default: 8080; 0 takes a free one.", "Server")] = None,
    grpc_port: Annotated[int | None, _option("Default: 8081; 0 takes a free one.", "Server")] = None,
    no_grpc: Annotated[bool, _option("HTTP only.", "Server", "--no-grpc")] = False,
    control: Annotated[
        Control | None,
        _option(
            "poll follows the folder (the default), explicit obeys clients, none neither.",
            "Server",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, _option("Holds the bearer token that clients must send; or TWINOP_TOKEN.", "Server")
    ] = None,
    tls_certificate: Annotated[Path | None, _option("PEM; with --tls-key.", "Server")] = None,
    tls_key: Annotated[Path | None, _option("PEM.", "Server")] = None,
    max_request_bytes: Annotated[int | None, _option("Default: 64 MiB.", "Server")] = None,
    grace_seconds: Annotated[
        float | None, _option("To finish, after SIGTERM. Default: 30.", "Server")
    ] = None,
    access_log: Annotated[
        bool | None,
        _option(
            "A log line for each HTTP request.",
            "Server",
        ),
    ] = None,
    log_level: Annotated[str | None, _option("debug, info, warning or error.", "Server")] = None,
    profile: Annotated[Path | None, _option("A folder for ONNX Runtime's profiles.", "Server")] = None,
    library: Annotated[
        Path | None,
        _option("The custom-op library. Default: beside the model or installed.", "Models"),
    ] = None,
    library_sha256: Annotated[str | None, _option("The library's checksum.", "Models")] = None,
    library_folder: Annotated[list[Path] | None, _option("Libraries may lie there too.", "Models")] = None,
    provider: Annotated[
        Provider | None, _option("auto (CUDA where it works), cpu or cuda.", "Models")
    ] = None,
    allow_fallback: Annotated[
        bool | None, _option("Run function bodies where the library cannot be used.", "Models")
    ] = None,
    max_batch_size: Annotated[
        int | None, _option("Join requests into runs of up to so many rows. Default: never.", "Models")
    ] = None,
    instances: Annotated[int | None, _option("Runs at a time. Default: 1.", "Models")] = None,
    max_queue: Annotated[int | None, _option("Requests that may wait. Default: 256.", "Models")] = None,
    cuda_graph: Annotated[bool | None, _option("Replay CUDA graphs, for fixed shapes.", "Models")] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2, by KServe's server).

    A folder has Triton's layout, models/<name>/<version>/model.onnx, with
    config.pbtxt or twinop.toml where needed; <name>/model.onnx works too.
    A file is served under its stem. Each model's custom-op library is found,
    checked, registered and compared with the model's function bodies before
    the service reports ready. SIGTERM finishes what was accepted.

    Examples:

        twinop serve models/

        twinop serve custom_relu.onnx --library build/libcustom_relu.so

        curl -s localhost:8080/v2/models/custom_relu

    The last, in another shell, describes the model and its inputs; they
    go to /v2/models/custom_relu/infer. /metrics is for Prometheus, /status
    is a page for people.
    """
    with clear_errors():
        server = {
            "host": host, "http_port": http_port, "grpc_port": grpc_port, "control": control,
            "token": _token(token_file), "tls_certificate": tls_certificate, "tls_key": tls_key,
            "max_request_bytes": max_request_bytes, "grace_seconds": grace_seconds, "access_log": access_log,
            "log_level": log_level, "profile": profile, "library_folders": library_folder or None,
        }  # fmt: skip
        model = {
            "library": library, "library_sha256": library_sha256, "provider": provider,
            "allow_fallback": allow_fallback, "max_batch_size": max_batch_size, "instances": instances,
            "max_queue": max_queue, "cuda_graph": cuda_graph,
        }  # fmt: skip
        given = {_SERVER: _given(server), _MODEL: _given(model)}
        if no_grpc:
            given[_SERVER]["grpc_port"] = None
        settings = read_settings(_config(models, config), given)
        # Not before: KServe takes half a second to import, and neither --help nor the scan needs it.
        from .service import logs, spans
        from .service.folders import scan

        logs.configure(settings.server.log_level, settings.server.access_log)
        scan(models)  # where there is no model, no server starts, and none says that it stops

        from .service.repository import Repository
        from .service.server import Server

        spans.configure(settings.server.otlp_endpoint)
        Server(Repository(models, settings)).start()


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _config(models: Path, config: Path | None) -> Path | None:
    if config is not None:
        return config
    beside = models / FILE
    return beside if beside.is_file() else None


def _token(file: Path | None) -> str | None:
    """Never an option's value: those can be read in the list of processes."""
    if file is None:
        return os.environ.get("TWINOP_TOKEN") or None
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"--token-file {file}: cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"--token-file {file}: the file is empty")
    return token
