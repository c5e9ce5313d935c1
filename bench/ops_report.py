"""The report on all ops, in torch and in ONNX Runtime, beside their peers: `twinop bench`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors, err

from . import numerics, report
from .cases import choose, make_inputs, make_outputs, without_entry
from .cells import cells_of, numeric_verdicts, verdicts
from .figures import draw_ops
from .measure import cases_of, configure_compiler, machine, measure
from .merge import announce, compare_with
from .providers import COMPILE, Budget, Providers
from .recording import Commit, Device, Name, Ops, Output, Recording, read_ops
from .report import BenchError
from .tables import show_document

KINDS = "bandwidth,latency,numerics"

Parts = Annotated[
    str | None,
    typer.Option(
        help="Parts of providers' names, such as twinop,eager,liger. Default: all.", show_default=False
    ),
]
Kinds = Annotated[str, typer.Option(help="What to measure: bandwidth,latency,numerics.")]
Quick = Annotated[bool, typer.Option("--quick", help="A quick look: bfloat16, few shapes, few runs.")]


def main(
    ops: Ops = None,
    providers: Parts = None,
    kinds: Kinds = KINDS,
    device: Device = "auto",
    quick: Quick = False,
    output: Output = None,
    name: Name = None,
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
    """Measure every op beside its peers and a plain copy, and list the bars that are met.

    Peers: torch eager, torch.compile (also max-autotune), Triton, Liger, ONNX Runtime's own nodes, and
    quack and flashinfer if they are installed. A provider that fails, or whose result is
    wrong against float64, is listed with the reason and not timed.

    On a GPU: device time. A read and a memset of 1 GiB precede each run; they hide the host and empty L2. All
    providers of a cell run in turn, in one process, on random data; the report keeps medians. The copy and
    twinop's op run twice, and the tolerance is the difference between the two runs, at least 1 %. Latencies
    are those of calls in a CUDA graph.

    On a CPU: wall time, float32.

    To split a report, run it several times with --ops and --name, then use `merge`. An interrupted report
    leaves NAME.partial.json. `draw` draws the page of an op from the JSON file.

    Examples:

        twinop bench

        twinop bench --ops gelu,softmax --quick --output /tmp/report

        twinop bench --ops rms_norm --providers twinop,liger --kinds bandwidth
    """
    with clear_errors():
        where = report.choose_device(device)
        entries = choose(ops)
        wanted = [part.strip() for part in providers.split(",")] if providers else None
        chosen = [kind.strip() for kind in kinds.split(",")]
        if unknown := set(chosen) - set(known := KINDS.split(",")):
            raise BenchError(f"--kinds {', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
        old = read_ops(compare) if compare else None
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        who = Providers(where, stream, threads, wanted, Budget(compile_seconds, len(entries)))
        rounds, seconds = (7, 0.2) if quick else (15, 1.0)
        if where.type == "cpu":
            rounds = 51 if quick else 1001
            torch.set_num_threads(threads)
        device_of = machine(where, who, rounds=rounds, seconds=seconds)

        recording = Recording("ops", where, output, commit, name)
        if names := without_entry():
            err.print(f"not in bench/peers: {', '.join(names)}", markup=False, highlight=False)
        measured, started = device_of.measured, time.perf_counter()
        exact: list[dict[str, Any]] = []
        precise = Providers(where, stream, threads, wanted, Budget(0, 0), only=numerics.providers(entries))
        settings = {
            "quick": quick,
            "rounds": rounds,
            "compile_seconds": compile_seconds,
            "cpu_threads": threads,
        }

        def save(last: bool = False) -> dict[str, Any]:
            document: dict[str, Any] = {
                "settings": settings,
                "seconds": measured.seconds | {"all": round(time.perf_counter() - started, 1)},
                "not_measured": [problem.row() for problem in (*precise.problems, *who.problems)],
                "bars": verdicts(cells_of(measured.rows)) + numeric_verdicts(exact),
                "rows": measured.rows,
                "numerics": exact,
            }
            recording.write(last=last, **document)
            return document

        count = workers if workers is not None else (_half_the_cores() if where.type == "cuda" else 0)
        if count:
            line = [f"--kinds={kinds}", f"--device={where.type}", *(["--quick"] if quick else [])]
            line += [f"--ops={ops}"] if ops else []
            line += [f"--providers={providers}"] if providers else []
            measured.spend("compiling in advance", compile_in_advance(line, count))
        if "numerics" in chosen:
            start = time.perf_counter()
            exact += numerics.measure(precise, entries)
            measured.spend("numerics", time.perf_counter() - start)
        measure(device_of, entries, quick=quick, kinds=chosen, save=save)
        document = save(last=True)
        show_document(document)
        if plots:
            title = report.machine_title(recording.facts)
            announce(draw_ops(document["rows"], title, recording.path.with_suffix("")))
        if old is not None and not compare_with(old, document):
            raise typer.Exit(1)


def _half_the_cores() -> int:
    return min(max(len(os.sched_getaffinity(0)) // 2, 1), 8)


# ------------------------------------------------------------------------------------------- compiling
#
# torch.compile and Triton cache what they compile on disk. Several processes fill the caches in parallel
# before the report begins. Only the report autotunes, because it needs the GPU to itself.

COMPILED = (COMPILE, "Triton", "Liger", "quack", "flashinfer")
_LIMIT = 150.0  # seconds for the compilation in advance


def compile_in_advance(line: Sequence[str], workers: int) -> float:
    """Runs `twinop bench compile` with these options in several processes and waits for them.

    A failure here costs only time: the report meets it again and lists it.

    Returns:
        The seconds it took.
    """
    start = time.perf_counter()
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log, report.progress("compiling", 1) as step:
        step(f"in {workers} processes")
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "twinop.bench", "compile", *line, "--part", f"{i}/{workers}"],
                stdout=log,
                stderr=log,
                env=environment,
            )
            for i in range(workers)
        ]
        for process in processes:
            try:
                process.wait(max(_LIMIT - (time.perf_counter() - start), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            log.seek(0)
            codes = [process.returncode for process in processes]
            last = (log.read().strip().splitlines() or [""])[-1]
            err.print(f"compiling in advance: exit codes {codes}: {last}", markup=False, highlight=False)
    return time.perf_counter() - start


def compile_part(
    part: Annotated[
        str, typer.Option(help="Which cells: i/n is every n-th, starting with the i-th.")
    ] = "0/1",
    ops: Ops = None,
    providers: Parts = None,
    kinds: Kinds = KINDS,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Compile part of a report's cells for the providers that cache their code. Measures nothing."""
    with clear_errors():
        where = report.choose_device(device)
        entries = choose(ops)
        wanted = [name.strip() for name in providers.split(",")] if providers else None
        index, count = map(int, part.split("/"))
        configure_compiler()
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        who = Providers(where, stream, 2, wanted, Budget(1e9, 1), only=COMPILED)
        who.budget.next_op()
        cases = [
            (case, entry)
            for name, entry in entries.items()
            for case in cases_of(name, entry, where.type, quick=quick, kinds=kinds.split(","))
        ]
        with torch.no_grad():
            for case, entry in cases[index::count]:
                inputs = make_inputs(case, entry, where)
                outputs = make_outputs(case, entry, where)
                for subject in who.build(case, entry, inputs, outputs).values():
                    with suppress(Exception):  # the report meets it again and lists it
                        subject.result()
