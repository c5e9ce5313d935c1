"""The report on ops, in torch and in ONNX Runtime, beside their peers: `twinop bench`."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from twinop import child
from twinop.console import clear_errors, err

from .cases import KINDS, Sample, cases_of, choose
from .figures import draw_ops
from .measure import Machine, configure_compiler
from .measurements import Commit, Device, Measurements, Output, choose_device, chosen, machine_title, read
from .providers import COMPILE, Providers
from .recorded import compare_with
from .tables import show


def main(
    ops: Annotated[
        str | None,
        typer.Option(help="Ops to measure, such as gelu,softmax. Default: all.", show_default=False),
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            help="Parts of providers' names, such as twinop,eager,liger. Default: all.", show_default=False
        ),
    ] = None,
    kinds: Annotated[str, typer.Option(help="What to measure: bandwidth,latency.")] = ",".join(KINDS),
    library: Annotated[
        Path | None,
        typer.Option(
            help="Ops of your own: a library, the Python file of an op, or a project. Default: the project "
            "in this folder; elsewhere twinop's ops.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A quick look: bfloat16, few shapes, few runs.")
    ] = False,
    output: Output = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="An older report. Exit code 1 if a cell of twinop's lost more than 3 %.", show_default=False
        ),
    ] = None,
    compile_seconds: Annotated[
        int, typer.Option(help="Seconds for torch.compile in all, divided among the ops.", min=0)
    ] = 200,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile in advance. Default: half of the cores, none on a CPU.",
            min=0,
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of ONNX Runtime and of torch.", min=1)] = 2,
    plots: Annotated[bool, typer.Option(help="Draw the overview.")] = True,
    commit: Commit = None,
) -> None:
    """Measure every op beside its peers and a plain copy.

    Peers: torch eager, torch.compile (also max-autotune), Triton, Liger, ONNX Runtime's own nodes, and
    quack and flashinfer if they are installed. A provider that fails, or whose result is
    wrong against float64, is listed with the reason and not timed.

    On a GPU: device time. A read and a memset of 1 GiB precede each run; they hide the host and empty L2. All
    providers of a cell run in turn, in one process, on random data; the report keeps medians. The copy and
    twinop's op run twice, and the tolerance is the difference between the two runs, at least 1 %. Latencies
    are those of calls in a CUDA graph.

    On a CPU: wall time, float32.

    Each cell is a line of JSON with the machine, the commit and the versions, written at once. A file grows:
    if a cell is measured again, its last line counts. So a report can be split with --ops.

    Examples:

        twinop bench

        twinop bench --ops gelu,softmax --quick --output /tmp/report

        twinop bench --ops rms_norm --providers twinop,liger --kinds bandwidth

        twinop bench --library build/libmish.so
    """
    with clear_errors():
        where, wanted_kinds = choose_device(device), chosen("--kinds", kinds, KINDS)
        library = library or project_here()
        entries = choose(ops, library)
        wanted = [part.strip() for part in providers.split(",")] if providers else None
        old = read(compare, "ops") if compare else None
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        rounds, seconds = (7, 0.2) if quick else (15, 1.0)
        if where.type == "cpu":
            rounds = 51 if quick else 1001
            torch.set_num_threads(threads)
        who = Providers(where, stream, threads, wanted, 0)
        machine = Machine(who, rounds=rounds, seconds=seconds)
        measured = Measurements("ops", where, output, commit, quick)
        count = workers if workers is not None else (_half_the_cores() if where.type == "cuda" else 0)
        if count:
            named = {"ops": ops, "library": str(library) if library else None, "wanted": wanted}
            compile_in_advance(count, named | {"kinds": wanted_kinds, "device": str(where), "quick": quick})
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.no_grad())
            for name, entry in entries.items():
                who.compile_seconds = compile_seconds / len(entries)
                started = time.monotonic()
                cells = cases_of(name, entry, where.type, quick=quick, kinds=wanted_kinds)
                for case in track(cells, name, console=err, transient=True, disable=not err.is_terminal):
                    measured.add(machine.line(case, entry))
                who.close()
                if stream is not None:
                    torch.cuda.empty_cache()
                if not err.is_terminal:
                    err.print(f"{name}: {len(cells)} cells, {time.monotonic() - started:.0f} s")
        show(measured.lines)
        if plots:
            title = machine_title(measured.facts)
            draw_ops(read(measured.path), title, measured.path.with_suffix(""))
        if old is not None and not compare_with(old, measured.lines):
            raise typer.Exit(1)


def project_here() -> Path | None:
    """Returns the current folder if it is the project of an op (`twinop new`)."""
    path = Path("pyproject.toml")
    is_project = path.is_file() and "twinop.libraries" in path.read_text(encoding="utf-8")
    return Path.cwd() if is_project else None


def _half_the_cores() -> int:
    return min(max(len(os.sched_getaffinity(0)) // 2, 1), 8)


# ------------------------------------------------------------------------------------------- compiling
#
# torch.compile and Triton cache what they compile on disk. Several processes fill the caches in parallel
# before the report begins. Only the report autotunes, because it needs the GPU to itself.

COMPILED = (COMPILE, "Triton", "Liger", "quack", "flashinfer")
_LIMIT = 150.0  # seconds for the compilation in advance


def compile_in_advance(workers: int, options: dict[str, Any]) -> None:
    """Runs `compile_part` with these options in several processes and waits for them.

    A failure here costs only time: the report meets it again and lists it.
    """
    err.print(f"compiling in {workers} processes", highlight=False)
    running = []
    for index in range(workers):
        part = json.dumps(options | {"index": index, "count": workers})
        command, none = child.module("twinop.bench.ops_report", part), subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)
        running.append(process)
    end = time.monotonic() + _LIMIT
    for process in running:
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too
            process.wait()


def compile_part(
    index: int,
    count: int,
    ops: str | None,
    library: str | None,
    wanted: list[str] | None,
    kinds: list[str],
    device: str,
    quick: bool,
) -> None:
    """Compiles every `count`-th cell for the providers that cache their code. Measures nothing."""
    where, file = torch.device(device), Path(library) if library else None
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read when torch._inductor is imported
    configure_compiler()
    stream = torch.cuda.Stream(where) if where.type == "cuda" else None
    who = Providers(where, stream, 2, wanted, 1e9, only=COMPILED)
    cases = [
        (case, entry)
        for name, entry in choose(ops, file).items()
        for case in cases_of(name, entry, where.type, quick=quick, kinds=kinds)
    ]
    with torch.no_grad():
        for case, entry in cases[index::count]:
            who.subjects(Sample.drawn(case, entry, where))


if __name__ == "__main__":
    compile_part(**json.loads(sys.argv[1]))
