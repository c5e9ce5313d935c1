"""Runs the command-line tool: `python -m twinop`."""

import os
import sys

if sys.path[0] == os.getcwd():  # `python -m` puts it there: take no code from it
    del sys.path[0]

if __name__ == "__main__":
    from twinop.script import require

    require("rich", "typer")

from twinop.cli import app

app(prog_name="twinop")
