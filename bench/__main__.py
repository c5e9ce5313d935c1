"""The command `twinop bench`, also `python -m twinop.bench`."""

from typing import Any, ClassVar

if __name__ == "__main__":
    from twinop.script import require

    require("matplotlib", "rich", "torch", "typer", command="./build.sh setup bench")

import typer

from twinop.cli.console import err
from twinop.cli.lazy_commands import LazyGroup

TAKES = "report: with the default options this takes about 2 minutes on two CPU cores, 11 on an H200"


class Commands(LazyGroup):
    """The commands. Options without a command belong to `report`."""

    modules: ClassVar = {
        "report": "twinop.bench.ops_report:main",
        "compare": "twinop.bench.recorded:compare",
        "draw": "twinop.bench.recorded:draw",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts `report` if no command is given, and says at once how long it takes."""
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, args)
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["report", *args]
        if args[0] == "report" and "--help" not in args:  # before the import of torch, which takes seconds
            err.print(TAKES, soft_wrap=True)
        return super().parse_args(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def bench() -> None:
    """Measure ops beside others: tables here, files and a plot in bench-results/. Default: report."""


if __name__ == "__main__":
    app(prog_name="python -m twinop.bench")
