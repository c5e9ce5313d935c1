"""What the reports share: the machine they ran on, tables, JSON, progress."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from twinop.console import err, out
from twinop.errors import TwinopError
from twinop.library import find_library, read_library

RESULTS = Path(__file__).resolve().parent / "results"


class BenchError(TwinopError):
    """A report cannot be made here, or what would be measured is not what was meant."""


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        BenchError: an unknown name, or CUDA where torch has none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise BenchError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"--device cuda: torch {torch.__version__} sees no GPU. Take --device cpu, or a machine with one"
        )
    use_cuda = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


# ------------------------------------------------------------------------------------------- the machine


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Where and with what a report is made."""
    import onnxruntime

    library = read_library(find_library("custom_relu"))
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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
    """The GPU's clocks, power and temperature now, as nvidia-smi has them; None without a GPU."""
    if device.type != "cuda":
        return None
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "temperature.gpu")
    values = _nvidia_smi(device, ",".join(names)).split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else dict.fromkeys(names, "?")


def _nvidia_smi(device: torch.device, query: str) -> str:
    uuid = getattr(
        torch.cuda.get_device_properties(device), "uuid", None
    )  # as CUDA_VISIBLE_DEVICES renumbers
    identifier = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = ["nvidia-smi", f"--id={identifier}", f"--query-gpu={query}", "--format=csv,noheader"]
    return _output(command) or "unknown"


def _git_commit() -> str:
    root = RESULTS.parent.parent
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
    """For file names: nvidia-h200, amd-epyc-2-cores."""
    text = facts.get("gpu") or f"{facts['cpu']} {facts['cpu_cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# ------------------------------------------------------------------------------------------- output


def output_folder(folder: Path | None) -> Path:
    """Makes the folder, before anything is measured.

    Raises:
        BenchError: it cannot be made or written to.
    """
    folder = folder or RESULTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"--output {folder}: cannot be made: {error.strerror}. Name another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise BenchError(f"--output {folder}: not writable. Name another folder")
    return folder


def write_json(
    path: Path, benchmark: str, facts: Mapping[str, Any], *, quiet: bool = False, **content: Any
) -> None:
    """One report: {"benchmark", "environment", ...content}."""
    document = {"benchmark": benchmark, "environment": dict(facts), **content}
    path.write_text(_dumps(document))
    if not quiet:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _dumps(document: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of a list of dicts: they are many, and read and compared as lines."""
    fields = []
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            lines = ",\n  ".join(map(json.dumps, value))
            fields.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
        else:
            fields.append(f" {json.dumps(name)}: " + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(fields) + "\n}\n"


def print_environment(facts: Mapping[str, Any]) -> None:
    where = f"{facts['gpu']}, driver {facts['driver']}" if "gpu" in facts else f"{facts['cpu']} (CPU)"
    versions = f"torch {facts['torch']}, onnxruntime {facts['onnxruntime']}, twinop {facts['twinop']}"
    commit = facts["commit"][:12] + (" with changes" if facts["commit"].endswith("-changed") else "")
    out.print(f"{where}; {versions}; commit {commit}", highlight=False, soft_wrap=True)


def show(content: Table) -> None:
    """Prints a table; where there is no terminal whose width counts, in its full width."""
    console = out if out.is_terminal else Console(file=out.file, width=160)
    console.print(content)


def table(title: str, columns: Sequence[str], caption: str | None = None) -> Table:
    """The first column is text, the others are numbers."""
    result = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return result


def show_bars(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """What was promised and missed, and how much was met."""
    missed = [bar for bar in verdicts if not bar["passed"]]
    for bar in missed:
        text = f"[red]missed:[/] {bar['what']}: {bar['value']}, bar {bar['bar']}"
        out.print(text, highlight=False, soft_wrap=True)
    out.print(f"{len(verdicts) - len(missed)} of {len(verdicts)} bars met", highlight=False)


def size_name(elements: int) -> str:
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 1 << exponent else str(elements)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Any]:
    """Shows a bar on stderr while the body runs; yields a function that takes one step and its name."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=steps, now="")

        def step(name: str) -> None:
            bar.update(task, advance=1, now=name)

        yield step
