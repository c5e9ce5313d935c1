"""Defines the command `twinop pack`, whose options are those of a dataclass."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.cli.console import err, out, print_note, progress_bar

_GENAI = "onnxruntime-genai"  # a panel


def _option(help: str, panel: str, *names: str, **checks: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **checks)


@dataclass(frozen=True)
class Options:
    """What to pack, where, and how. The defaults that depend on other options are None."""

    model: Annotated[Path, typer.Argument(help="The .onnx file; with --genai, the folder.")]
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")]
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that was packed before.")] = False
    name: Annotated[str | None, _option("The model's name. Default: the file's stem.", "Model")] = None
    version: Annotated[int, _option("The model's version.", "Model", "--version", min=1)] = 1
    library: Annotated[
        list[Path] | None,
        _option("A custom-op library, once for each domain. Default: as twinop run.", "Model"),
    ] = None
    allow_model_libraries: Annotated[
        bool, _option("Take libraries from the model's own folder.", "Model", "--allow-model-libraries")
    ] = False
    max_batch_size: Annotated[
        int, _option("Batch requests, up to so many rows. 0: never.", "Model", min=0)
    ] = 0
    triton: Annotated[
        bool, _option("Write a model repository for Triton, and nothing else.", "Triton", "--triton")
    ] = False
    genai: Annotated[
        bool, _option("Pack a folder of onnxruntime-genai, and nothing else.", _GENAI, "--genai")
    ] = False
    device: Annotated[str, _option("Optimise the decoder for cuda or cpu.", _GENAI)] = "cuda"
    dtype: Annotated[str | None, _option("As in twinop optimize: float16, bfloat16 or float8.", _GENAI)] = (
        None
    )
    invariant: Annotated[bool, _option("As in twinop optimize, for cuda.", _GENAI, "--invariant")] = False
    timeout: Annotated[float, _option("Seconds that a model may run without progress.", _GENAI, min=1)] = 600
    gpu: Annotated[
        bool | None,
        _option(
            "Where it runs. Default: on a GPU if the library has code for one.", "Machine", "--gpu/--cpu"
        ),
    ] = None
    cpus: Annotated[int, _option("CPUs that a server has.", "Machine", min=1)] = 2


def main(**given: Any) -> None:
    """Pack a model and its custom-op library for deployment.

    Writes a repository of models for twinop serve: the model, its data, its
    libraries, and settings with their checksums. With --triton it writes one for
    Triton. The model is opened once with its library, so that a model that does
    not load here is refused. The folder is written whole or not at all. With
    --genai it optimises a folder of onnxruntime-genai, and puts the library into
    it. examples/serving has a Dockerfile and manifests for Kubernetes.

    Examples:

        twinop pack custom_relu.onnx -o repo/

        twinop pack model.onnx -o repo/ --name ranker --version 3
        --max-batch-size 64 --gpu

        twinop pack model.onnx -o triton/ --triton

        twinop pack --genai genai_model/ -o fast/ --device cuda
    """
    # Imported late, because --help needs no ONNX Runtime.
    from .packing import MODELS_IN_CONTAINER, TRITON_IMAGE, pack, pack_genai

    options = Options(**given)
    if options.genai:
        with progress_bar("loading") as progress:
            report = pack_genai(options, progress)
        out.print(str(report), soft_wrap=True)
        return
    packed = pack(options)
    output = options.output
    libraries = ", ".join(packed.library_paths) or "none"
    place = "a GPU" if packed.gpu else "the CPU"
    said = f"{output}: {packed.name}, version {options.version}, for {place}; libraries there: {libraries}"
    out.print(said, soft_wrap=True)
    if packed.note:
        print_note(packed.note)
    command = f"twinop serve {output}/models --allow-model-libraries"
    if options.triton:
        mount = f"-v {output.resolve()}/models:{MODELS_IN_CONTAINER}:ro"
        gpus = "--gpus all " if packed.gpu else ""
        ports = " ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))
        server = f"{TRITON_IMAGE} tritonserver --model-repository={MODELS_IN_CONTAINER}"
        command = f"docker run --rm {gpus}-e ORT_DISABLE_TELEMETRY=1 {ports} {mount} {server}"
    err.print(command, soft_wrap=True)


main.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]
