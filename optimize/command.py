"""Implements the command `twinop optimize`. Heavy imports wait until the options have been read."""

from pathlib import Path
from typing import Annotated

import typer

from twinop.console import Timeout, clear_errors, out, progress_bar


def main(
    source: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="The ONNX file to optimise, or a folder of onnxruntime-genai."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file or folder to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Convert the model to float16 or bfloat16. Default: keep the dtypes of inputs and outputs, "
            "and the precision of each node."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Optimise for cuda or cpu. The file runs on both. Default: cuda where a GPU is to be seen, "
            "else cpu; for a folder that names CUDA, cuda."
        ),
    ] = None,
    padding: Annotated[
        str | None,
        typer.Option(
            help="[bold]right[/]: you promise that masks hide only the end of each sequence. This is faster."
        ),
    ] = None,
    shared_caches: Annotated[
        bool,
        typer.Option(
            "--shared-caches",
            help="You promise that past and present share memory, which has rows for the whole context.",
        ),
    ] = False,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="On CUDA, in 16 bits: a prompt's logits are the same, bit for bit, whatever else is in its "
            "batch. Slower. The report names what may still depend on it.",
        ),
    ] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(help="An .npz file of inputs to compare and measure on. Default: small generated ones."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="A rewrite to leave out, such as attention; repeat it for others."),
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            help="An op that replaces a standard operator, such as add or softmax; repeat it for others."
        ),
    ] = None,
    allow_uncompared: Annotated[
        bool,
        typer.Option(
            "--allow-uncompared", help="Keep the file although an output is empty or NaN for all inputs."
        ),
    ] = False,
    library: Annotated[
        list[Path] | None, typer.Option(help="A library of ops that the model needs; repeat it for others.")
    ] = None,
    allow_model_libraries: Annotated[
        bool,
        typer.Option(
            "--allow-model-libraries", help="Take libraries, which can do anything, from the model's folder."
        ),
    ] = False,
    timeout: Timeout = 600,
) -> None:
    """Optimise an ONNX file for ONNX Runtime.

    Matrix products are fused with their biases and activations; attention, norms and gates
    become one node each. The result is compared with the original before it is kept; what
    was not compared is named.

    Examples:

      twinop optimize old.onnx -o fast.onnx

      twinop optimize old.onnx -o fast.onnx --dtype bfloat16 --padding right

      twinop optimize genai_model/ -o fast/
    """
    with clear_errors(), progress_bar("loading") as progress:
        from .genai import optimize_folder
        from .optimizer import optimize

        report = (optimize_folder if source.is_dir() else optimize)(
            source,
            output,
            dtype=dtype,
            device=device,
            padding=padding,
            shared_caches=shared_caches,
            invariant=invariant,
            inputs_file=inputs,
            without=without or (),
            replace=replace or (),
            allow_uncompared=allow_uncompared,
            library=library,
            allow_model_libraries=allow_model_libraries,
            timeout=timeout,
            progress=progress,
        )
    out.print(str(report), soft_wrap=True)
