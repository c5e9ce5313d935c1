"""The options of `twinop pack`: the dataclass is the signature of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


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
        bool, _option("Pack a folder of onnxruntime-genai, and nothing else.", "onnxruntime-genai", "--genai")
    ] = False
    device: Annotated[str, _option("Optimise the decoder for cuda or cpu.", "onnxruntime-genai")] = "cuda"
    dtype: Annotated[
        str | None, _option("As in twinop optimize: float16, bfloat16 or float8.", "onnxruntime-genai")
    ] = None
    invariant: Annotated[
        bool, _option("As in twinop optimize, for cuda.", "onnxruntime-genai", "--invariant")
    ] = False
    timeout: Annotated[
        float, _option("Seconds that a model may run without progress.", "onnxruntime-genai", min=1)
    ] = 600
    gpu: Annotated[
        bool | None,
        _option(
            "Where it runs. Default: on a GPU if the library has code for one.", "Machine", "--gpu/--cpu"
        ),
    ] = None
    cpus: Annotated[int, _option("CPUs that a server has.", "Machine", min=1)] = 2
