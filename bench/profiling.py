"""A look inside the kernels: a chrome trace of each provider, or Nsight Compute on twinop's kernels."""

import csv
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from twinop.console import clear_errors, out
from twinop.torch_op.registry import functions, records

from . import report
from .cases import ROWS, Case, choose, family_of, make_inputs, make_outputs, reference, table
from .measure import Machine
from .peers import Entry
from .recording import Device, Ops
from .report import BenchError

RUNS = 3  # of each provider in a trace

DTYPES = ("bfloat16", "float32", "float64")
LIMIT_BAR = 90.0  # percent of the busiest unit's peak
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "InstructionStats")
_METRICS = {  # ncu's names -> the names in the table
    "Duration": "time",
    "DRAM Throughput": "DRAM %",
    "Compute (SM) Throughput": "arithmetic %",
    "Issue Slots Busy": "issue slots %",
    "Executed Instructions": "instructions",
}
_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


def write_trace(where: Machine, entries: Mapping[str, Entry], path: Path) -> None:
    """Writes a trace of each op's first cell, for chrome://tracing or ui.perfetto.dev.

    It shows which kernels each provider launches, and what the host does meanwhile.

    Raises:
        BenchError: the file cannot be written.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    try:
        path.touch()
    except OSError as error:
        raise BenchError(f"--trace {path}: cannot be written: {error.strerror}") from error
    activities = [ProfilerActivity.CPU]
    if where.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    runs = {}
    with torch.no_grad(), torch.cuda.stream(where.providers.stream):  # None leaves the stream as it is
        for name, entry in entries.items():
            where.providers.budget.next_op()
            case = table(name, entry, where.device.type, quick=True)[0]
            inputs = make_inputs(case, entry, where.device)
            outputs = make_outputs(case, entry, where.device)
            expected = reference(case, entry, inputs, outputs)
            built = where.providers.build(case, entry, inputs, outputs)
            for provider, subject in where.providers.check(case, built, expected).items():
                runs[f"{case}: {provider}"] = subject
        with profile(activities=activities) as trace:
            for name, subject in runs.items():
                for _ in range(RUNS):
                    with record_function(name):
                        subject.run()
            if where.device.type == "cuda":
                torch.cuda.synchronize(where.device)
    trace.export_chrome_trace(str(path))
    out.print(f"wrote {path}: {len(runs)} providers, {RUNS} runs each", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------- Nsight Compute


def profile_kernels(device: torch.device, entries: Mapping[str, Entry]) -> None:
    """Runs ncu on twinop's kernels and shows how busy each unit is. Without ncu or a GPU, prints the command.

    Raises:
        BenchError: ncu failed, or saw no kernel.
    """
    program = _find_ncu()
    line = _command(program or "ncu", entries)
    if program is None or device.type != "cuda":
        missing = "ncu" if program is None else "GPU"
        out.print(f"There is no {missing} here. On a machine with both, run:", highlight=False)
        out.print(shlex.join(line), markup=False, highlight=False, soft_wrap=True)
        return
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    kernels = parse(done.stdout)
    if done.returncode != 0 or not kernels:
        tail = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise BenchError(f"ncu failed with exit code {done.returncode}: {tail}. Command: {shlex.join(line)}")
    columns = ["kernel", *_METRICS.values(), "limit"]
    table = report.table("twinop's kernels in Nsight Compute", columns, "percent of each unit's peak")
    for name, metrics in kernels:
        table.add_row(name, *(metrics.get(metric, "") for metric in _METRICS), limit(metrics))
    report.show(table)


def _find_ncu() -> str | None:
    found = shutil.which("ncu")
    for place in map(Path, _PLACES) if found is None else ():
        candidates = sorted([*place.glob("ncu"), *place.glob("*/ncu")])
        found = str(candidates[-1]) if candidates else found
    return found


def _command(program: str, ops: Iterable[str]) -> list[str]:
    """Returns ncu's command line. It leaves the clocks alone, as other work may share the machine."""
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


def parse(text: str) -> list[tuple[str, dict[str, str]]]:
    """Reads ncu's CSV output. Returns each kernel and its metrics in the order of the launches."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in _METRICS:
            unit = f" {row['Metric Unit']}" if row["Metric Name"] == "Duration" else ""
            _, metrics = found.setdefault(row["ID"], (_shorten(row["Kernel Name"]), {}))
            metrics[row["Metric Name"]] = row["Metric Value"] + unit
    return list(found.values())


def _shorten(kernel: str) -> str:
    """Removes namespaces, the return type, and the parameters, which repeat the template arguments."""
    name = kernel.replace("twinop::", "").replace("void ", "", 1)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:i][:90]
    return name[:90]


def limit(metrics: Mapping[str, str]) -> str:
    """Returns the busiest unit, in green if it is busy enough to limit the kernel."""
    names = ("DRAM Throughput", "Compute (SM) Throughput", "Issue Slots Busy")
    shares = {_METRICS[name]: float(metrics[name].replace(",", "")) for name in names if name in metrics}
    if not shares:
        return ""
    busiest = max(shares, key=shares.__getitem__)
    return report.flag(busiest.removesuffix(" %"), shares[busiest] >= LIMIT_BAR)


def run_kernels(
    ops: Ops = None,
    device: Device = "auto",
) -> None:
    """Run each of twinop's ops once on 2^26 elements for a profiler. Prints and measures nothing."""
    with clear_errors():
        where = report.choose_device(device)
        elements = 1 << (26 if where.type == "cuda" else 10)
        columns = 4096 if where.type == "cuda" else 256
        for name, entry in choose(ops).items():
            family = family_of(records()[entry.op], entry)
            shape = (elements // columns, columns) if family == ROWS else (elements,)
            for dtype in DTYPES:
                inputs = make_inputs(Case(name, family, dtype, shape), entry, where)
                with torch.no_grad():
                    functions[entry.op](*inputs.values(), **entry.attributes)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
