"""python -m twinop.bench: every op beside its peers, in torch and in ONNX Runtime."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # a script: the root comes first, and this folder is not a place to import from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer

from twinop.bench import numerics, options, report
from twinop.bench.cases import choose, without_entry
from twinop.bench.cells import cells_of
from twinop.bench.figures import draw
from twinop.bench.measure import machine, measure
from twinop.bench.merge import compare_with, load
from twinop.bench.providers import Budget, Providers
from twinop.bench.report import BenchError
from twinop.bench.tables import show_cells, show_problems, show_seconds, show_verdicts
from twinop.bench.verdicts import verdicts
from twinop.bench.warm import warm
from twinop.console import clear_errors, err, out

KINDS = ("bandwidth", "latency", "numerics")


def main(
    ops: Annotated[
        str | None, typer.Option(help="Such as gelu,softmax; else all.", show_default=False)
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            help="Parts of providers' names, such as twinop,eager,liger; else all.", show_default=False
        ),
    ] = None,
    kinds: Annotated[str, typer.Option(help="What to measure, of bandwidth,latency,numerics.")] = ",".join(
        KINDS
    ),
    device: options.Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="bfloat16, few shapes, few runs: for a look.")
    ] = False,
    output: options.PlotFolder = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the files, without suffix; else ops-MACHINE.", show_default=False),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="An older report: exit code 1 if a cell of ours lost 3 %.", show_default=False),
    ] = None,
    compile_seconds: Annotated[
        int, typer.Option(help="Time that torch.compile may take in all, shared out over the ops.", min=0)
    ] = 200,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile in advance, in parallel; else half of the cores, none on a CPU.",
            min=0,
            show_default=False,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads, of ONNX Runtime and of torch.", min=1)] = 2,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing; write a chrome trace of one run of each provider.", show_default=False
        ),
    ] = None,
    ncu: Annotated[
        bool,
        typer.Option(
            "--ncu", help="Measure nothing; run Nsight Compute on our kernels, or print the command."
        ),
    ] = False,
    plots: Annotated[bool, typer.Option(help="Draw the plots, as `merge` does.")] = True,
    commit: options.Commit = None,
) -> None:
    """Measure every op beside its peers and a plain copy, and say which bars are met.

    Peers: torch eager, torch.compile (also max-autotune), Triton, numba, load_inline, Liger, ONNX Runtime's
    own nodes, and apex, quack, flashinfer where installed. A provider whose result is wrong (against fp64) or
    that raises is reported with the reason and not timed.

    On a GPU: device time. Every run is queued behind a read and a memset of 1 GiB, which hide the host and
    empty the L2. All providers of a cell run in turn in one process, on random data; medians; the copy and
    our op are timed twice, and what a run differs from itself, or 1 %, is the tolerance. Latency: calls in a
    CUDA graph.

    On a CPU: wall time, fp32.

    The report may be split: several runs with --ops and --name, then `merge`.

    Examples:

        python -m twinop.bench

        python -m twinop.bench --ops gelu,softmax --quick --output /tmp/report

        python -m twinop.bench --ops rms_norm --providers twinop,liger --kinds bandwidth

        python -m twinop.bench --ops gelu --trace gelu.json

        python -m twinop.bench --ops gelu --ncu
    """
    with clear_errors():
        where = report.choose_device(device)
        entries = choose(ops)
        wanted = [part.strip() for part in providers.split(",")] if providers else None
        chosen = [kind.strip() for kind in kinds.split(",")]
        if unknown := set(chosen) - set(KINDS):
            raise BenchError(f"--kinds {', '.join(sorted(unknown))}: expected some of {', '.join(KINDS)}")
        old = load(compare) if compare else None
        if ncu:
            from twinop.bench.ncu import profile

            profile(where, entries)
            return
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        who = Providers(where, stream, threads, wanted, Budget(compile_seconds, len(entries)))
        rounds, seconds = (7, 0.2) if quick else (15, 1.0)
        if where.type == "cpu":
            rounds = 51 if quick else 1001
            torch.set_num_threads(threads)
        device_of = machine(where, who, rounds=rounds, seconds=seconds)
        if trace is not None:
            from twinop.bench.trace import write_trace

            write_trace(device_of, entries, trace)
            return

        folder = report.output_folder(output)
        facts = report.environment(where, commit)
        report.print_environment(facts)
        if names := without_entry():
            err.print(f"not in bench/peers: {', '.join(names)}", markup=False, highlight=False)
        path = folder / f"{name or 'ops-' + report.machine_name(facts)}.json"
        before, started = report.clocks(where), time.perf_counter()
        settings = {
            "quick": quick,
            "rounds": rounds,
            "compile_seconds": compile_seconds,
            "cpu_threads": threads,
        }

        exact: list[dict[str, Any]] = []
        precise = Providers(where, stream, threads, wanted, Budget(0, 0), only=numerics.providers(entries))

        def save(last: bool = False) -> dict[str, Any]:
            content: dict[str, Any] = {
                "settings": settings,
                "clocks": {"before": before, "after": report.clocks(where) if last else None},
                "seconds": device_of.report.seconds | {"all": round(time.perf_counter() - started, 1)},
                "not_measured": [problem.row() for problem in (*precise.problems, *who.problems)],
                "bars": verdicts(cells_of(device_of.report.rows)) + numerics.verdicts(exact),
                "rows": device_of.report.rows,
                "numerics": exact,
            }
            report.write_json(path, "ops", facts, quiet=True, **content)
            return content

        count = workers if workers is not None else (_half_the_cores() if where.type == "cuda" else 0)
        if count:
            options = [f"--kinds={kinds}", f"--device={where.type}", *(["--quick"] if quick else [])]
            options += [f"--ops={ops}"] if ops else []
            options += [f"--providers={providers}"] if providers else []
            device_of.report.seconds["compiling in advance"] = round(warm(options, count), 1)
        if "numerics" in chosen:
            start = time.perf_counter()
            exact += numerics.measure(precise, entries)
            device_of.report.spend("numerics", start)
        measure(device_of, entries, quick=quick, kinds=chosen, save=save)
        document = save(last=True)
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)
        show(document, facts, path, plots)
        if old is not None and not compare_with(old, document):
            raise typer.Exit(1)


def _half_the_cores() -> int:
    return min(max(len(os.sched_getaffinity(0)) // 2, 1), 8)


def show(document: dict[str, Any], facts: dict[str, Any], path: Path, plots: bool = True) -> None:
    """Tables on the terminal and plots beside the JSON file."""
    cells = cells_of(document["rows"])
    show_cells(cells)
    numerics.show(document["numerics"])
    show_problems(document["not_measured"])
    show_verdicts(document["bars"])
    show_seconds(document["seconds"])
    title = facts.get("gpu") or f"{facts['cpu']} (CPU)"
    for written in draw(cells, title, path.with_suffix("")) if plots else ():
        out.print(f"wrote {written}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
