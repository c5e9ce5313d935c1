"""Implements the command `twinop optimize`. Heavy imports wait until the options have been read."""

from pathlib import Path
from typing import Annotated

import typer

from twinop.console import clear_errors, err, out


def main(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An ONNX file from anywhere.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option(help="float16 or bfloat16: converts the model. Default: as it is.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(help="What it is optimised for: cuda or cpu. It runs on both.")
    ] = "cuda",
    padding: Annotated[
        str | None,
        typer.Option(
            help="[bold]right[/] promises that masks hide only the end of each sequence, which is faster.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="An .npz file of inputs to compare on. Default: made up.", show_default=False),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="A rewrite to leave out; repeat it for others.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Keep only what is faster on this machine.")
    ] = False,
    library: Annotated[
        list[Path] | None,
        typer.Option(help="A library that the model needs; repeat it for others.", show_default=False),
    ] = None,
) -> None:
    """Optimise an ONNX file for ONNX Runtime.

    Products with constant weights take over biases and activations; attention, norms and
    gates become one node each. The result is compared with the original before it is kept.

    Examples:

      twinop optimize old.onnx -o fast.onnx

      twinop optimize old.onnx -o fast.onnx --dtype bfloat16 --padding right
    """
    with clear_errors(), err.status("loading") as status:
        from .optimizer import optimize

        report = optimize(
            source,
            output,
            dtype=dtype,
            device=device,
            padding=padding,
            inputs_file=inputs,
            without=without or (),
            measure=measure,
            library=library,
            progress=status.update,
        )
    out.print(str(report), markup=False, highlight=False, soft_wrap=True)
