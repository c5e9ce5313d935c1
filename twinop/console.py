"""What the command-line tools share: where they print, and errors as one message."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from twinop.errors import TwinopError

out = Console()
err = Console(stderr=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Ends the program with one message and exit code 1 where twinop refuses something."""
    try:
        yield
    except TwinopError as error:
        err.print("error:", style="bold red", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
