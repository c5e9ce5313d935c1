"""`python -m twinop.bench`."""

import typer

from twinop.bench.node_overhead import main as node_overhead
from twinop.bench.relu import main as relu

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Performance reports: a table here, and JSON and plots in bench/results/ (or --output).",
)
app.command("relu")(relu)
app.command("node-overhead")(node_overhead)

if __name__ == "__main__":
    app(prog_name="python -m twinop.bench")
