"""Defines the command `twinop` and its part `twinop ops`."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..libraries.library import find_library, read_library
from .console import show_library
from .lazy_commands import LazyGroup


class Commands(LazyGroup):
    """The commands of `twinop`, each imported when it is used."""

    modules: ClassVar = {
        "new": "twinop.building.new:new",
        "build": "twinop.building.build_command:build",
        "test": "twinop.testing.command:main",
        "bench": "twinop.bench.__main__:main",
        "export": "twinop.export.to_onnx:main",
        "optimize": "twinop.optimize.command:main",
        "run": "twinop.deploy.run_onnx:main",
        "check": "twinop.deploy.serve:check",
        "doctor": "twinop.deploy.diagnosis:main",
        "serve": "twinop.deploy.serve:main",
        "pack": "twinop.deploy.pack.command:main",
    }


app = typer.Typer(
    cls=Commands,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"twinop {__version__}")
        raise typer.Exit


@app.callback()
def twinop(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """One kernel, two runtimes: custom ops for PyTorch and ONNX Runtime from the same code."""


@app.command("ops")
def ops(
    library: Annotated[
        Path | None, typer.Argument(help="A .so file of twinop's or your own. Default: libcustom_ops.so.")
    ] = None,
) -> None:
    """List the ops that a library holds, without loading it."""
    show_library(read_library(library or find_library("custom_ops")))
