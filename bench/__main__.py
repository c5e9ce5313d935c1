"""The command `twinop bench`, also `python -m twinop.bench`.

Heavy imports wait until the options have been read.
"""

if __name__ == "__main__":
    from twinop.script import require

    require("matplotlib", "rich", "torch", "typer", command="./build.sh setup bench")

import time
from pathlib import Path
from typing import Annotated

import typer

from twinop.cli.console import err, program

from . import Device, Output

COMPILE_SECONDS = 200  # for torch.compile in all, divided among the ops
TAKES = "with the default options this takes about 2 minutes on two CPU cores, 11 on an H200"


def main(
    ops: Annotated[str, typer.Option(help="Ops to measure, such as gelu,softmax. Default: all.")] = "",
    providers: Annotated[str, typer.Option(help="Parts of names: twinop,eager,ort. Default: all.")] = "",
    library: Annotated[
        Path | None,
        typer.Option(
            help="Ops of your own: a library, the Python file of an op, or a project. Default: the project "
            "in this folder; elsewhere twinop's ops."
        ),
    ] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: few shapes, few runs.")] = False,
    output: Output = None,
    threads: Annotated[int, typer.Option(help="CPU threads of ONNX Runtime and of torch.", min=1)] = 2,
) -> None:
    """Measure every op beside torch's, ONNX Runtime's own and a plain copy: tables here, files and a plot.

    Providers: twinop in torch and in ONNX Runtime, torch eager, torch.compile, ONNX Runtime's own nodes. One
    that fails, or whose result is wrong against float64, is listed with the reason and not timed.

    On a GPU: device time. A read and a memset of 1 GiB precede each run; they hide the host and empty L2. All
    providers of a cell run in turn, in one process, on random data; the report keeps medians. The copy and
    twinop's op run twice, and the tolerance is the difference between the two runs, at least 1 %.

    On a CPU: wall time, float32.

    Each cell is a line of JSON with the machine, the commit and the versions, written at once. A file grows:
    if a cell is measured again, its last line counts. So a report can be split with --ops.

    Examples:

        twinop bench

        twinop bench --ops gelu,softmax --providers twinop,eager --quick --output /tmp/report

        twinop bench --library build/libmish.so
    """
    err.print(TAKES, soft_wrap=True)
    from .cases import cases_of, choose
    from .measurements import measuring, read
    from .providers import Providers
    from .report import draw, show

    entries = choose(ops, library or project_here())
    wanted = [part.strip() for part in providers.split(",")] if providers else None
    with measuring("ops", device, output, quick, threads) as (measured, where, timer):
        rounds = 1001 if timer is None else 7 if quick else 15
        who = Providers(where, timer, threads, wanted, rounds, seconds=0.2 if quick else 1.0)
        for name, entry in entries.items():
            who.compile_seconds = COMPILE_SECONDS / len(entries)
            started = time.monotonic()
            cells = cases_of(name, entry, where.type, quick=quick)
            for case in cells:
                measured.add(who.line(case))
            err.print(f"{name}: {len(cells)} cells, {time.monotonic() - started:.0f} s")
    show(measured.lines)
    draw(read(measured.path), measured.path.with_name(f"{measured.path.stem}-overview.png"))


def project_here() -> Path | None:
    """Returns the current folder if it is the project of an op (`twinop new`)."""
    path = Path("pyproject.toml")
    is_project = path.is_file() and "twinop.libraries" in path.read_text(encoding="utf-8")
    return Path.cwd() if is_project else None


if __name__ == "__main__":
    program(main, "python -m twinop.bench")()
