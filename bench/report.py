"""What all reports share: the facts about the machine, tables and progress bars."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from twinop.console import err, out
from twinop.errors import TwinopError
from twinop.library import find_library, read_library

RESULTS = Path(__file__).resolve().parents[1] / "lab/results"  # the recorded reports
TELL_SECONDS = 10.0


class BenchError(TwinopError):
    """A report cannot be made here, or would not measure what it should."""


def choose_device(name: str) -> torch.device:
    """Returns the device for `--device`; `auto` takes the GPU if there is one.

    Raises:
        BenchError: the name is unknown, or it is `cuda` and torch sees no GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise BenchError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"--device cuda: torch {torch.__version__} sees no GPU. Use --device cpu, or a machine with a GPU"
        )
    use_cuda = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def chosen(option: str, names: str, known: Sequence[str]) -> list[str]:
    """Returns the comma-separated names that an option has, each once.

    Raises:
        BenchError: there is none, or one that is not in `known`.
    """
    found = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    if not found or not set(found) <= set(known):
        raise BenchError(f"{option} {names}: expected some of {', '.join(known)}")
    return found


def reason_of(failure: Exception) -> str:
    """Returns one line for an error; for ONNX Runtime's errors, the text after its codes."""
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    text = f"{type(failure).__name__}: {first}" if first else type(failure).__name__
    return re.sub(r"^BenchError: .*?\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", text)[:300]


# ------------------------------------------------------------------------------------------- the machine


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Returns the date, commit, machine and versions that a report is made with."""
    import onnxruntime

    library = read_library(find_library("custom_relu"))
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or os.environ.get("TWINOP_COMMIT") or _git_commit(),
        "twinop": library.version,
        "device": device.type,
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": _nvidia_smi(device, "driver_version"),
            "cuda_torch": torch.version.cuda,
            "cuda_library": library.cuda_version,
            "cuda_archs": library.cuda_archs,
        }
    return facts


def clocks(device: torch.device) -> dict[str, str] | None:
    """Returns the GPU's current clocks, power and temperature from nvidia-smi, or None for a CPU."""
    if device.type != "cuda":
        return None
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "temperature.gpu")
    values = _nvidia_smi(device, ",".join(names)).split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else dict.fromkeys(names, "?")


def _nvidia_smi(device: torch.device, query: str) -> str:
    # By UUID, because CUDA_VISIBLE_DEVICES renumbers the devices.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    identifier = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = ["nvidia-smi", f"--id={identifier}", f"--query-gpu={query}", "--format=csv,noheader"]
    return _output(command) or "unknown"


def _git_commit() -> str:
    root = RESULTS.parents[1]
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return "unknown"
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-changed" if changed else commit


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def machine_name(facts: Mapping[str, Any]) -> str:
    """Returns the machine's name for file names, such as nvidia-h200 or amd-epyc-2-cores."""
    text = facts.get("gpu") or f"{facts['cpu']} {facts['cpu_cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def machine_title(facts: Mapping[str, Any]) -> str:
    """Returns the machine's name for the titles of plots."""
    return str(facts.get("gpu") or f"{facts['cpu']}, {facts['cpu_cores']} cores")


# ------------------------------------------------------------------------------------------- the terminal


def print_environment(facts: Mapping[str, Any]) -> None:
    where = f"{facts['gpu']}, driver {facts['driver']}" if "gpu" in facts else f"{facts['cpu']} (CPU)"
    versions = f"torch {facts['torch']}, onnxruntime {facts['onnxruntime']}, twinop {facts['twinop']}"
    commit = facts["commit"][:12] + (" with changes" if facts["commit"].endswith("-changed") else "")
    out.print(f"{where}; {versions}; commit {commit}", highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str]) -> Table:
    """Returns an empty table. The first column is text, the others are numbers."""
    result = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return result


def show_rows(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Prints the rows of a report, with these of their fields as columns."""
    result = Table(title=title, title_justify="left")
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float) for row in rows)
        result.add_column(column, justify="right" if numbers else "left")
    for row in rows:
        values = (row.get(column, "") for column in columns)
        result.add_row(*(f"{each:.4g}" if isinstance(each, float) else str(each) for each in values))
    out.print(result)


def by_cell(
    rows: Iterable[Mapping[str, Any]], *names: str
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Groups rows by these of their fields, and the rows of a group by provider."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), {})[row["provider"]] = row
    return found


def medians(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Groups rows as `by_cell` does, and returns the medians in microseconds."""
    return {
        cell: {provider: row["median_us"] for provider, row in providers.items()}
        for cell, providers in by_cell(rows, *names).items()
    }


def show_missing(missing: Mapping[str, str]) -> None:
    """Prints what was not measured, and why."""
    for what, reason in missing.items():
        err.print(f"not measured: {what}: {reason}", markup=False, soft_wrap=True)


def flag(text: str, good: bool) -> str:
    """Returns the text in green or red markup."""
    return f"[{'green' if good else 'red'}]{text}[/]"


def bar(
    what: str, value: float, bound: float, *, least: bool = False, tolerance: float = 0.0
) -> dict[str, Any]:
    """Returns a verdict: whether the value is at most `bound`, or with `least` at least.

    Args:
        tolerance: the share of `bound` by which the value may miss it.
    """
    bounds = bound * (1 - tolerance if least else 1 + tolerance)
    text = f"{'>=' if least else '<='} {bound:g}" + (f" within {tolerance:.1%}" if tolerance else "")
    passed = value >= bounds if least else value <= bounds
    return {"what": what, "value": round(value, 3), "bar": text, "passed": bool(passed)}


def show_bars(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Prints which bars are met."""
    for bar in verdicts:
        text = f"{flag('met' if bar['passed'] else 'missed', bar['passed'])}: {bar['what']}: {bar['value']}"
        out.print(f"{text}, bar {bar['bar']}", highlight=False, soft_wrap=True)


def size_name(elements: int) -> str:
    """Returns 2^28 for a power of two, else the number."""
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 1 << exponent else str(elements)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Any]:
    """Shows a progress bar on stderr. Yields a function that advances it and takes the name of a step.

    If stderr is not a terminal, it prints a line every 10 seconds instead.
    """
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=steps, now="")
        done, told = 0, time.monotonic()

        def step(name: str) -> None:
            nonlocal done, told
            done += 1
            bar.update(task, advance=1, now=name)
            if not err.is_terminal and time.monotonic() > told + TELL_SECONDS:
                told = time.monotonic()
                err.print(f"{what}: {done} of {steps}, {name}", markup=False, highlight=False, soft_wrap=True)

        yield step
