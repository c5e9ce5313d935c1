"""Implements the command `twinop optimize`. Heavy imports wait until the options have been read."""

import gc
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.cli.console import Timeout, out, progress_bar


def _option(help: str, *names: str, **shown: Any) -> Any:
    return typer.Option(*names, help=help, **shown)


@dataclass(frozen=True)
class Options:
    """What to optimise, and how: the signature of the command."""

    source: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="The ONNX file to optimise, or a folder of onnxruntime-genai."),
    ]
    output: Annotated[Path, _option("The file or folder to write.", "--output", "-o")]
    dtype: Annotated[
        str | None,
        _option(
            "Convert the model to float16 or bfloat16; or to float8: then large matmuls multiply in 8 bits. "
            "This is faster on Hopper and later GPUs, also for decoders, and close to the original, not the "
            "same. Default: keep the dtypes of inputs and outputs, and the precision of each node."
        ),
    ] = None
    device: Annotated[
        str | None,
        _option(
            "Optimise for cuda or cpu. The file runs on both. Default: cuda where a GPU is visible, else "
            "cpu; for a folder that names CUDA, cuda."
        ),
    ] = None
    padding: Annotated[
        str | None,
        _option(
            "[bold]right[/]: promise right padding: masks hide only the end of each sequence. This is faster."
        ),
    ] = None
    shared_caches: Annotated[
        bool,
        _option(
            "Promise that past and present of the KV cache share memory, allocated for the whole context.",
            "--shared-caches",
        ),
    ] = False
    invariant: Annotated[
        bool,
        _option(
            "On CUDA, in 16 bits: a prompt's logits are the same, bit for bit, whatever else is in its "
            "batch. Slower. The report names what may still depend on it.",
            "--invariant",
        ),
    ] = False
    inputs_file: Annotated[
        Path | None,
        _option("An .npz file of inputs to compare on. Default: small generated ones.", "--inputs"),
    ] = None
    without: Annotated[
        list[str] | None, _option("A rewrite to leave out, such as attention; repeat it for others.")
    ] = None
    allow_uncompared: Annotated[
        bool,
        _option("Keep the file although an output is empty or NaN for all inputs.", "--allow-uncompared"),
    ] = False
    drop_slow: Annotated[
        bool,
        _option(
            "Measure on this machine, and revert rewrites that are slower here. Without it no measurement "
            "decides, and one model gives the same file everywhere.",
            "--drop-slow",
        ),
    ] = False
    rows: Annotated[
        int,
        _option(
            "With float8: the rows that matmuls get, such as the tokens of a batch. Matmuls that 8 bits make "
            "slower stay in 16, but for those of decoders. 0 takes all."
        ),
    ] = 2048
    max_error: Annotated[
        float,
        _option(
            "With float8: the largest relative error of an output, on --inputs where they are given. Matmuls "
            "go back to 16 bits until it is kept, first those with large errors that save little time."
        ),
    ] = 0.25
    library: Annotated[
        list[Path] | None, _option("A library of ops that the model needs; repeat it for others.")
    ] = None
    allow_model_libraries: Annotated[
        bool,
        _option(
            "Also load libraries, which can run any code, from the model's folder.", "--allow-model-libraries"
        ),
    ] = False
    dry_run: Annotated[
        bool,
        _option("Write nothing: show the rewrites, and how much memory and disk they take.", "--dry-run"),
    ] = False
    explain: Annotated[
        str | None,
        _option("Write nothing: print which condition of each rewrite failed at this node.", metavar="NODE"),
    ] = None
    timeout: Timeout = 600


def main(**given: Any) -> None:
    """Optimise an ONNX file for ONNX Runtime.

    Fuses matmuls with their biases and activations, and attention, norms and gates into one
    node each. Compares the outputs with the original's before it keeps the file, and names
    what was not compared. In a model with more than 256 MiB of weights every layer runs, one
    layer of each kind is compared on more inputs, and every byte is compared with the source.
    Peak memory is that of one such layer, or of the largest weight; --dry-run shows it.

    Examples:

      twinop optimize old.onnx -o fast.onnx

      twinop optimize old.onnx -o fast.onnx --dtype bfloat16 --padding right

      twinop optimize old.onnx -o fast.onnx --dtype float8 --rows 16384 --inputs some.npz

      twinop optimize genai_model/ -o fast/
    """
    gc.set_threshold(20_000)  # graphs are many small objects: looking through them so often took 5 %
    asked = vars(Options(**given))
    source, output = asked.pop("source"), asked.pop("output")
    asked["without"] = asked["without"] or ()
    with progress_bar("loading") as progress:
        from .genai import optimize_folder
        from .optimizer import optimize

        report = (optimize_folder if source.is_dir() else optimize)(
            source, output, progress=progress, **asked
        )
    out.print(str(report), soft_wrap=True)


main.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]
