"""Defines the command `twinop pack`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import ROUNDED
from rich.table import Table

from twinop.console import clear_errors, err, out


def _option(help: str, panel: str, *names: str, **checks: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **checks)


def main(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The .onnx file.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that was packed before.")] = False,
    name: Annotated[str | None, _option("The model's name. Default: the file's stem.", "Model")] = None,
    version: Annotated[int, _option("The model's version. Default: 1.", "Model", "--version", min=1)] = 1,
    library: Annotated[
        list[Path] | None,
        _option("A custom-op library, once for each domain. Default: as twinop run.", "Model"),
    ] = None,
    max_batch_size: Annotated[
        int,
        _option("Join requests into runs of at most so many rows. Default: 0, never.", "Model", min=0),
    ] = 0,
    triton: Annotated[
        bool, _option("Write a model repository for Triton, and nothing else.", "Triton", "--triton")
    ] = False,
    bodies: Annotated[
        bool,
        _option(
            "Keep the function bodies, which Triton runs without a word where the library fails.",
            "Triton",
            "--bodies",
        ),
    ] = False,
    gpu: Annotated[
        bool | None,
        _option("Where it runs. Default: on a GPU if the library has code for one.", "Image", "--gpu/--cpu"),
    ] = None,
    image: Annotated[
        str | None, _option("The image's name. Default: the model's name and version.", "Image")
    ] = None,
    wheel: Annotated[
        Path | None,
        _option("A twinop wheel for the image. Default: the Python sources of this installation.", "Image"),
    ] = None,
    cpus: Annotated[int, _option("CPUs of a replica. Default: 2.", "Scaling", min=1)] = 2,
    min_replicas: Annotated[int, _option("Default: 1.", "Scaling", min=1)] = 1,
    max_replicas: Annotated[int, _option("Default: 4.", "Scaling")] = 4,
    prometheus: Annotated[
        str,
        _option("Whose count of waiting requests scales replicas on GPUs in KServe.", "Scaling"),
    ] = "http://prometheus-operated.monitoring:9090",
    storage_uri: Annotated[
        str | None, _option("Where KServe finds models/. Default: pvc://models/NAME.", "Scaling")
    ] = None,
) -> None:
    """Pack a model and its custom-op library for deployment.

    Writes a Triton model repository (also for twinop serve), a Dockerfile of
    the service, docker-compose.yml with Prometheus, manifests for Kubernetes
    with and without KServe, and a README.md that says how to run each. The
    model is opened once with its library, so that a model that does not load
    here is refused. The folder is written whole or not at all.

    Examples:

        twinop pack custom_relu.onnx -o repo/

        twinop pack model.onnx -o repo/ --name ranker --version 3
        --max-batch-size 64 --gpu --image registry.example.com/ranker:3

        twinop pack model.onnx -o triton/ --triton
    """
    with clear_errors():
        # Imported late, because --help needs neither ONNX Runtime nor jinja2.
        from .packing import Options, pack

        packed = pack(Options(**context.params))
    contents = packed.contents
    out.print(f"{output}", style="italic", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=ROUNDED)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("model", f"{packed.name}, version {version}")
    table.add_row("custom nodes", ", ".join(contents.custom_nodes) or "none, so no library is needed")
    for each, place, digest in zip(
        contents.libraries, packed.libraries, contents.library_sha256, strict=True
    ):
        table.add_row("library", f"{each.path}\nin the container {place}")
        table.add_row("SHA-256", digest)
    table.add_row("runs on", _place(contents))
    if not triton:
        table.add_row("image", packed.image)
    for note in contents.notes:
        table.add_row("note", note, style="yellow")
    out.print(table, highlight=False)
    commands = [f"twinop serve {output}/models --libraries models"]
    if not triton:
        commands += [f"docker build -t {packed.image} {output}", f"kubectl apply -f {output}/kubernetes/"]
    for line in commands:
        err.print(line, markup=False, highlight=False, soft_wrap=True)
    err.print(f"{output}/README.md has the rest", markup=False, highlight=False, soft_wrap=True)


def _place(contents: Any) -> str:
    if not contents.gpu:
        return "the CPU"
    archs = contents.cuda_archs
    return f"a GPU (code for compute capability {archs})" if archs else "a GPU"
