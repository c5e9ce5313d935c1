"""The command `twinop`. A command's module and what it needs (torch, ONNX Runtime) is imported when used."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from twinop.console import clear_errors, out
from twinop.library import find_library, read_library

_COMMANDS = {
    "export": "twinop.export.to_onnx",
    "run": "twinop.deploy.run_onnx",
    "serve": "twinop.deploy.serve",
    "pack": "twinop.deploy.pack.command",
    "bench": "twinop.bench.__main__",
}
"""Commands that are the `main` of a module, or its `app`."""


class _Lazy(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*_COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(_COMMANDS[cmd_name])
        if hasattr(module, "app"):
            group = typer.main.get_command(module.app)
            group.name = cmd_name
            return group
        part = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
        part.command(cmd_name)(module.main)
        return typer.main.get_command(part)


app = typer.Typer(
    cls=_Lazy,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def twinop() -> None:
    """One kernel, two runtimes: custom ops for PyTorch and ONNX Runtime from the same code."""


@app.command("ops")
def ops(
    library: Annotated[
        Path | None,
        typer.Argument(
            help="A .so file of twinop's or your own. Default: libcustom_ops.so.", show_default=False
        ),
    ] = None,
) -> None:
    """List the ops that a library holds, without loading it."""
    with clear_errors():
        found = read_library(library or find_library("custom_ops"))
    title = f"{found.path} (twinop {found.version}, CUDA: {found.cuda_archs})"
    table = Table(title=title, title_justify="left")
    for column in ("op", "ONNX", "schema", "dtypes", "devices"):
        table.add_column(column, overflow="fold")
    for record in found.records.values():
        onnx_name = "torch only" if record.is_backward else record.onnx_name
        dtypes = "\n".join(part.strip() for part in record.dtypes.split(";"))
        table.add_row(record.name, onnx_name, record.schema, dtypes, ", ".join(record.devices))
    out.print(table)
