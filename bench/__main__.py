"""`python -m twinop.bench`."""

from typing import Any

import typer
from typer.core import TyperGroup

from twinop.bench.instructions import main as instructions
from twinop.bench.matmul import main as matmul
from twinop.bench.merge import compare, merge
from twinop.bench.ncu import main as kernels
from twinop.bench.node_overhead import main as node_overhead
from twinop.bench.ops import main as report
from twinop.bench.relu import main as relu
from twinop.bench.serve import main as serve
from twinop.bench.soak import main as soak
from twinop.bench.transformer import main as encoder
from twinop.bench.warm import main as compile_part


class _ReportByDefault(TyperGroup):
    """Options without a command are the report's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["report", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ReportByDefault,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Performance reports: tables here, and JSON and plots in bench/results/ (or --output). "
    "Without a command: [bold]report[/].",
)
app.command("report")(report)
app.command("merge")(merge)
app.command("compare")(compare)
app.command("compile", hidden=True)(compile_part)
app.command("kernels", hidden=True)(kernels)
app.command("instructions")(instructions)
app.command("matmul")(matmul)
app.command("encoder")(encoder)
app.command("relu")(relu)
app.command("serve")(serve)
app.command("soak")(soak)
app.command("node-overhead")(node_overhead)

if __name__ == "__main__":
    app(prog_name="python -m twinop.bench")
