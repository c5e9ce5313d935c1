"""Compiling for a report in several processes at once: what they compile, the report finds in the caches.

torch.compile and Triton keep what they compiled on disk. One process compiles a cell after another; a report
has hundreds. Autotuning is left to the report itself, which has the GPU alone: neither here nor there are its
results kept.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import torch
import typer

from twinop.bench import report
from twinop.bench.cases import choose, latency_table, make_inputs, make_outputs, table
from twinop.bench.peers import Entry, resolve
from twinop.bench.providers import COMPILE, Budget, Providers
from twinop.console import clear_errors, err

COMPILED = (COMPILE, "Triton", "Liger", "quack", "flashinfer")
_LIMIT = 150.0  # seconds for all of it


def configure_compiler() -> None:
    """The same in every process of a report, or the caches would not match."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    functorch.donated_buffer = False  # backward runs many times on what forward kept
    inductor.autotune_local_cache = False


def warm(options: Sequence[str], workers: int) -> float:
    """Starts `workers` processes of `python -m twinop.bench compile` with these options, and waits for them.

    What they could not compile, the report meets again and says so; here a failure costs time only.

    Returns:
        The seconds it took.
    """
    start = time.perf_counter()
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log, report.progress("compiling", 1) as step:
        step(f"in {workers} processes")
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "twinop.bench", "compile", *options, "--part", f"{i}/{workers}"],
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


def main(
    part: Annotated[str, typer.Option(help="Which cells: i/n, every n-th from the i-th on.")] = "0/1",
    ops: Annotated[str | None, typer.Option(help="As in report.", show_default=False)] = None,
    providers: Annotated[str | None, typer.Option(help="As in report.", show_default=False)] = None,
    kinds: Annotated[str, typer.Option(help="As in report.")] = "bandwidth,latency",
    device: Annotated[str, typer.Option(help="As in report.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="As in report.")] = False,
) -> None:
    """Compile a part of a report's cells for those that keep what they compiled, and measure nothing."""
    with clear_errors():
        where = report.choose_device(device)
        entries = choose(ops)
        wanted = [name.strip() for name in providers.split(",")] if providers else None
        index, count = map(int, part.split("/"))
        configure_compiler()
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        who = Providers(where, stream, 2, wanted, Budget(1e9, 1), only=COMPILED)
        who.budget.next_op()
        cases: list[Any] = []
        for name, entry in entries.items():
            if "bandwidth" in kinds:
                cases += [(case, entry) for case in table(name, entry, where.type, quick)]
            if "latency" in kinds and where.type == "cuda":
                cases += [(case, entry) for case in latency_table(name, entry, quick)]
        if index == 0 and where.type == "cuda":
            _build_inline(entries, who)
        with torch.no_grad():
            for case, entry in cases[index::count]:
                inputs = make_inputs(case, entry, where)
                outputs = make_outputs(case, entry, where)
                for subject in who.build(case, entry, inputs, outputs).values():
                    with suppress(Exception):  # the report will meet it, and say so
                        subject.result()


def _build_inline(entries: Mapping[str, Entry], who: Providers) -> None:
    """The C++ extension, in one process only: the others would wait for it."""
    wanted = who.wanted is None or any(part in "load_inline" for part in who.wanted)
    if wanted and any("load_inline" in entry.peers for entry in entries.values()):
        with suppress(Exception):
            resolve("inline:module")()
