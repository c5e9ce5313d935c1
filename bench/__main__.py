"""The command `twinop bench`, also `python -m twinop.bench`."""

from typing import Any, ClassVar

if __name__ == "__main__":
    from twinop.script import require

    require("matplotlib", "rich", "torch", "typer", command="./build.sh setup bench")

import typer

from twinop.console import err
from twinop.lazy_commands import LazyGroup


class Commands(LazyGroup):
    """The commands. Options without a command belong to `report`."""

    modules: ClassVar = {
        "report": "twinop.bench.ops_report:main",
        "compare": "twinop.bench.recorded:compare",
        "draw": "twinop.bench.recorded:draw",
        "linear": "twinop.bench.linear:main",
        "models": "twinop.bench.models:main",
        "architectures": "twinop.bench.architectures:main",
        "node-overhead": "twinop.bench.node_overhead:main",
        "first-call": "twinop.bench.first_call:main",
        "footprint": "twinop.bench.footprint:main",
        "packed-weight": "twinop.bench.packed_weight:main",
        "triton": "twinop.bench.triton_report:main",
        "serve": "twinop.bench.serving.serve:main",
        "soak": "twinop.bench.serving.soak:main",
    }
    takes: ClassVar = {
        "report": "about 2 minutes on two CPU cores, 11 on an H200",
        "linear": "about a minute on an H200",
        "models": "about 12 minutes on an H200",
        "architectures": "about 5 minutes on an H200",
        "serve": "about 25 minutes",
        "soak": "about 4 minutes",
        "node-overhead": "about half a minute",
        "packed-weight": "about half a minute",
        "first-call": "about two minutes",
        "triton": "about two minutes on an H200",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts `report` if no command is given, and says at once how long the command takes."""
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, args)
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["report", *args]
        if args[0] in self.takes and "--help" not in args:  # before the import of torch, which takes seconds
            said = f"{args[0]}: with the default options this takes {self.takes[args[0]]}"
            err.print(said, highlight=False, soft_wrap=True)
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def bench() -> None:
    """Performance reports: tables here, JSON and plots in bench-results/ (--output). Default: report."""


if __name__ == "__main__":
    app(prog_name="python -m twinop.bench")
