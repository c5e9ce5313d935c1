"""`python -m twinop.bench`."""

from typing import Any, ClassVar

import typer

from twinop.lazy_commands import LazyGroup


class Commands(LazyGroup):
    """Options without a command are the report's."""

    modules: ClassVar = {
        "report": "twinop.bench.ops:main",
        "merge": "twinop.bench.merge:merge",
        "compare": "twinop.bench.merge:compare",
        "compile": "twinop.bench.warm:main",
        "kernels": "twinop.bench.ncu:main",
        "instructions": "twinop.bench.instructions:main",
        "matmul": "twinop.bench.matmul:main",
        "encoder": "twinop.bench.transformer:main",
        "relu": "twinop.bench.relu:main",
        "serve": "twinop.bench.serve:main",
        "soak": "twinop.bench.soak:main",
        "node-overhead": "twinop.bench.node_overhead:main",
    }
    unlisted: ClassVar = {"compile", "kernels"}  # the report runs them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["report", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def bench() -> None:
    """Performance reports: tables here, JSON and plots in bench/results/ (--output). Default: report."""


if __name__ == "__main__":
    app(prog_name="python -m twinop.bench")
