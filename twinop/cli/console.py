"""Shared by the command-line tools: consoles, help texts, and errors as one message."""

import errno
import inspect
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TwinopError, TwinopWarning, command_line, is_disk_error
from ..system.memory import tree_bytes
from ..system.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..libraries.library import Library

out: "Console"
err: "Console"

Timeout = Annotated[
    float, typer.Option(min=1, help="Seconds that a model may run without progress, before it is ended.")
]
"""The option `--timeout` of commands that run models in another process."""
_PIPE_WIDTH = 10_000
"""Columns where the output is not a terminal: tables and lines keep their words and paths whole."""
_BETWEEN = 5.0  # seconds between two lines of progress where the output is not a terminal
_PARTS = 1 << 20  # a total of more is in bytes


def __getattr__(name: str) -> Any:
    """Makes a console when it is first used: the service starts without importing rich."""
    if name not in ("out", "err"):
        raise AttributeError(f"twinop.cli.console has no attribute {name!r}")
    from rich.console import Console

    globals()[name] = console = Console(stderr=name == "err", emoji=False, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def program(function: Callable[..., None], name: str | None = None) -> typer.Typer:
    """Returns one command as a program of its own, whose errors are clear."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(name, help=help_of(function))(clear_errors()(function))
    return app


def help_of(function: Callable[..., None]) -> str:
    """Returns a command's docstring. Where twinop is not on PATH, examples say `.venv/bin/twinop`."""
    beside = Path(sys.executable).with_name("twinop")
    found = shutil.which("twinop") is not None or not beside.is_file()
    name = "twinop" if found else min(str(beside), os.path.relpath(beside), key=len)
    return re.sub(r"^( *)twinop ", rf"\1{name} ", inspect.getdoc(function) or "", flags=re.MULTILINE)


def print_note(text: str) -> None:
    """Tells the user something, beside a command's output."""
    from .console import err

    err.print("note:", style="bold yellow", end=" ")
    err.print(text, soft_wrap=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turns a TwinopError into one message and exit code 1, and a TwinopWarning into a note."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, TwinopWarning):
            print_note(str(message))
        else:
            usual(message, category, *rest, **named)

    try:
        with command_line(), warnings.catch_warnings():
            warnings.showwarning = show
            yield
    except (TwinopError, OSError) as error:
        from .console import err

        text = str(error)
        if not isinstance(error, TwinopError):
            if error.errno == errno.ENOENT and error.filename is None:  # from os.getcwd
                text = "the current folder does not exist any more: change to another"
            elif is_disk_error(error):
                what = f"{error.filename or 'a file'} cannot be written: {error.strerror}"
                text = f"{what}. Free space on its disk"
            else:
                raise
        err.print("error:", style="bold red", end=" ")
        err.print(text, soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def progress_bar(first: str) -> Iterator[Progress]:
    """Shows steps, how much is done, and the memory, as a bar, or a line all five seconds."""
    from .console import err

    if not err.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_amount(int(task.completed), int(task.total or 0)))

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), Amount())
    with Bar(*columns, console=err, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(first, total=None)

        def show(step: str, done: int = 0, total: int = 0) -> None:
            bar.update(task, description=step, completed=done, total=total or None)

        yield show


def _lines() -> Progress:
    from .console import err

    last = time.monotonic()

    def show(step: str, done: int = 0, total: int = 0) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _BETWEEN:
            last = now
            err.print(f"{step}: {_amount(done, total)}", soft_wrap=True)

    return show


def _amount(done: int, total: int) -> str:
    parts = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB" if total > _PARTS else f"{done} of {total}"
    return f"{parts if total else ''}{', ' * bool(total)}memory {tree_bytes() / 1e9:.2f} GB"


def show_library(library: "Library") -> None:
    """Prints a library's ops as a table."""
    from rich.table import Table

    from .console import out

    domain = f"domain {library.domain} {library.domain_version}"
    title = f"{library.path} ({domain}, twinop {library.version}, CUDA: {library.cuda_archs})"
    out.print(title, style="italic", soft_wrap=True)
    table = Table()
    for column in ("op", "ONNX", "schema", "dtypes", "devices"):
        table.add_column(column, overflow="fold")
    for record in library.records.values():
        onnx_name = "torch only" if record.is_backward else record.onnx_name
        dtypes = "\n".join(part.strip() for part in record.dtypes.split(";"))
        table.add_row(record.name, onnx_name, record.schema, dtypes, ", ".join(record.devices))
    out.print(table)
