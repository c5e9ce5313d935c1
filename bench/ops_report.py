"""The report on all ops, in torch and in ONNX Runtime, beside their peers: `twinop bench`."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors, err

from . import numerics, report
from .cases import Sample, cases_of, choose
from .cells import cells_of, numeric_verdicts, verdicts
from .figures import draw_ops
from .measure import Machine, configure_compiler, measure
from .providers import COMPILE, Budget, Providers
from .recorded import added, compare_with
from .recording import Commit, Device, Output, Recording, read_ops, to_add_to
from .tables import show_document
from .workers import FAILURE, Worker

KINDS = "bandwidth,latency,numerics"


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
    kinds: Annotated[str, typer.Option(help="What to measure: bandwidth,latency,numerics.")] = KINDS,
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
    """Measure every op beside its peers and a plain copy, and list the bars that are met.

    Peers: torch eager, torch.compile (also max-autotune), Triton, Liger, ONNX Runtime's own nodes, and
    quack and flashinfer if they are installed. A provider that fails, or whose result is
    wrong against float64, is listed with the reason and not timed.

    On a GPU: device time. A read and a memset of 1 GiB precede each run; they hide the host and empty L2. All
    providers of a cell run in turn, in one process, on random data; the report keeps medians. The copy and
    twinop's op run twice, and the tolerance is the difference between the two runs, at least 1 %. Latencies
    are those of calls in a CUDA graph.

    On a CPU: wall time, float32.

    To split a report, run it several times with --ops and the same --output: a report of the same machine,
    settings and commit receives the new cells, another one is replaced. An interrupted report leaves
    NAME.partial.json. `draw` draws the page of an op from the JSON file.

    Examples:

        twinop bench

        twinop bench --ops gelu,softmax --quick --output /tmp/report

        twinop bench --ops rms_norm --providers twinop,liger --kinds bandwidth

        twinop bench --library build/libmish.so
    """
    with clear_errors():
        where = report.choose_device(device)
        library = library or project_here()
        entries = choose(ops, library)
        wanted = [part.strip() for part in providers.split(",")] if providers else None
        chosen = report.chosen("--kinds", kinds, KINDS.split(","))
        old = read_ops(compare) if compare else None
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        rounds, seconds = (7, 0.2) if quick else (15, 1.0)
        if where.type == "cpu":
            rounds = 51 if quick else 1001
            torch.set_num_threads(threads)
        who = Providers(where, stream, threads, wanted, Budget(compile_seconds, len(entries)))
        precise = Providers(where, stream, threads, wanted, Budget(0, 0), only=numerics.providers(entries))
        machine = Machine(who, rounds=rounds, seconds=seconds)

        recording = Recording("ops", where, output, commit)
        settings = {"quick": quick, "rounds": rounds, "cpu_threads": threads}
        earlier = to_add_to(recording.path, recording.facts, settings, read_ops)
        started = time.perf_counter()
        exact: list[dict[str, Any]] = []

        def save(last: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
            """Writes the report. Returns what is new, and all that the file has now."""
            spent = machine.spent | {"all": time.perf_counter() - started}
            new = {
                "settings": settings | {"compile_seconds": compile_seconds},
                "seconds": {name: round(value, 1) for name, value in spent.items()},
                "not_measured": [problem.row() for problem in (*precise.problems, *who.problems)],
                "bars": verdicts(cells_of(machine.rows)) + numeric_verdicts(exact),
                "rows": machine.rows,
                "numerics": exact,
            }
            whole = added(earlier, new) if earlier is not None else new
            recording.write(last=last, **whole)
            return new, whole

        count = workers if workers is not None else (_half_the_cores() if where.type == "cuda" else 0)
        if count:
            with machine.spending("compiling in advance"):
                named = {"ops": ops, "library": str(library) if library else None, "wanted": wanted}
                compile_in_advance(count, named | {"kinds": chosen, "device": str(where), "quick": quick})
        if "numerics" in chosen:
            with machine.spending("numerics"):
                exact += numerics.measure(precise, entries)
        measure(machine, entries, quick=quick, kinds=chosen, save=save)
        new, whole = save(last=True)
        show_document(new)
        if plots:
            draw_ops(whole["rows"], report.machine_title(recording.facts), recording.path.with_suffix(""))
        if old is not None and not compare_with(old, new):
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

    def part(index: int) -> dict[str, Any]:
        started = Worker(f"{__name__}:compile_part", Path(folder))
        return started.result({"index": index, "count": workers, **options}, _LIMIT)

    with tempfile.TemporaryDirectory() as folder, report.progress("compiling", 1) as step:
        step(f"in {workers} processes")
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(part, range(workers)))
    if failures := [each[FAILURE] for each in found if FAILURE in each]:
        err.print(f"compiling in advance: {'; '.join(failures)}", markup=False)


def compile_part(
    index: int,
    count: int,
    ops: str | None,
    library: str | None,
    wanted: list[str] | None,
    kinds: list[str],
    device: str,
    quick: bool,
) -> dict[str, Any]:
    """Compiles every `count`-th cell for the providers that cache their code. Measures nothing."""
    where, file = torch.device(device), Path(library) if library else None
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read when torch._inductor is imported
    configure_compiler()
    stream = torch.cuda.Stream(where) if where.type == "cuda" else None
    who = Providers(where, stream, 2, wanted, Budget(1e9, 1), only=COMPILED)
    who.budget.next_op()
    cases = [
        (case, entry)
        for name, entry in choose(ops, file).items()
        for case in cases_of(name, entry, where.type, quick=quick, kinds=kinds)
    ]
    with torch.no_grad(), Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        for case, entry in cases[index::count]:
            for subject in who.build(Sample.drawn(case, entry, where)).values():
                with suppress(Exception):  # the report meets it again and lists it
                    subject.result()
    return {}
