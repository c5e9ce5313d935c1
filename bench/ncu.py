"""Nsight Compute on our kernels: what share of the memory's and the arithmetic units' speed they use."""

import csv
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from twinop.bench import report
from twinop.bench.cases import ROWS, Case, choose, family_of, make_inputs
from twinop.bench.peers import Entry
from twinop.bench.report import BenchError
from twinop.console import clear_errors, out
from twinop.torch_op.registry import functions, records

DTYPES = ("bfloat16", "float32", "float64")
LIMIT_BAR = 90.0  # percent of the busiest unit
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "InstructionStats")
_METRICS = {  # ncu's names -> the table's
    "Duration": "time",
    "DRAM Throughput": "DRAM %",
    "Compute (SM) Throughput": "arithmetic %",
    "Issue Slots Busy": "issue slots %",
    "Executed Instructions": "instructions",
}
_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    for place in map(Path, _PLACES) if found is None else ():
        candidates = sorted([*place.glob("ncu"), *place.glob("*/ncu")])
        found = str(candidates[-1]) if candidates else found
    return found


def command(program: str, ops: Iterable[str]) -> list[str]:
    """The clocks stay as they are (other work may share the machine); only our kernels are looked at."""
    sections = [word for name in _SECTIONS for word in ("--section", name)]
    return [
        program,
        "--csv",
        "--page=details",
        "--clock-control=none",
        "--kernel-name-base=demangled",
        "--kernel-name=regex:twinop",
        *sections,
        sys.executable,
        "-m",
        "twinop.bench",
        "kernels",
        f"--ops={','.join(ops)}",
    ]


def profile(device: torch.device, entries: Mapping[str, Entry]) -> None:
    """Runs ncu and shows what it found, or prints the command where there is no ncu or no GPU.

    Raises:
        BenchError: ncu failed, or saw no kernel.
    """
    program = find_ncu()
    line = command(program or "ncu", entries)
    if program is None or device.type != "cuda":
        why = "no ncu here" if program is None else "no GPU here"
        out.print(f"{why}; on a machine with both:", highlight=False)
        out.print(shlex.join(line), markup=False, highlight=False, soft_wrap=True)
        return
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    kernels = parse(done.stdout)
    if done.returncode != 0 or not kernels:
        tail = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise BenchError(f"ncu failed with exit code {done.returncode}: {tail}. Command: {shlex.join(line)}")
    columns = ["kernel", *_METRICS.values(), "limit"]
    table = report.table("Our kernels under Nsight Compute", columns, "percent of each unit's peak")
    for name, metrics in kernels:
        table.add_row(name, *(metrics.get(metric, "") for metric in _METRICS), limit(metrics))
    report.show(table)


def parse(text: str) -> list[tuple[str, dict[str, str]]]:
    """(kernel, its metrics) of ncu's CSV output, in the order of the launches."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in _METRICS:
            unit = f" {row['Metric Unit']}" if row["Metric Name"] == "Duration" else ""
            _, metrics = found.setdefault(row["ID"], (shorten(row["Kernel Name"]), {}))
            metrics[row["Metric Name"]] = row["Metric Value"] + unit
    return list(found.values())


def shorten(kernel: str) -> str:
    """Without namespaces, return type and parameters, which repeat what the template arguments say."""
    name = kernel.replace("twinop::", "").replace("void ", "", 1)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i][:90]
    return name[:90]


def limit(metrics: Mapping[str, str]) -> str:
    """The unit that is busiest, and whether it is busy enough to be what limits the kernel."""
    names = ("DRAM Throughput", "Compute (SM) Throughput", "Issue Slots Busy")
    shares = {_METRICS[name]: float(metrics[name].replace(",", "")) for name in names if name in metrics}
    if not shares:
        return ""
    busiest = max(shares, key=shares.__getitem__)
    color = "green" if shares[busiest] >= LIMIT_BAR else "red"
    return f"[{color}]{busiest.removesuffix(' %')}[/]"


def main(
    ops: Annotated[str | None, typer.Option(help="As in report.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="As in report.")] = "auto",
) -> None:
    """Run each op of ours once on 2^26 elements, for a profiler to look at; print and measure nothing."""
    with clear_errors():
        where = report.choose_device(device)
        for name, entry in choose(ops).items():
            for dtype in DTYPES:
                _run(name, entry, dtype, where)


def _run(name: str, entry: Entry, dtype: str, device: torch.device) -> None:
    family = family_of(records()[entry.op], entry)
    elements = 1 << (26 if device.type == "cuda" else 10)
    shape: Sequence[int] = (elements // 256, 256) if device.type == "cpu" else (elements // 4096, 4096)
    case = Case(name, family, dtype, tuple(shape) if family == ROWS else (elements,))
    inputs = make_inputs(case, entry, device)
    with torch.no_grad():
        functions[entry.op](*inputs.values(), **entry.attributes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
