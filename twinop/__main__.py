"""Runs the command-line tool: `python -m twinop`."""

if __name__ == "__main__":
    from twinop.script import require

    require("rich", "typer")

from twinop.cli import app

app(prog_name="twinop")
