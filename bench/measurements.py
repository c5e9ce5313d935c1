"""Files of measurements: JSON lines, one for each cell, with what was measured side by side, and where.

    {"benchmark": "ops", "op": "gelu", "times": {"twinop in torch": {"median_us": 250.3}}, "machine": ...}

A file grows: of several lines about the same cell, the last one counts.
"""

import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from twinop import __version__
from twinop.cli.console import clear_errors, out
from twinop.errors import TwinopError

from . import Device as Device
from . import Output as Output
from .timing import DeviceTimer, timer_on

_GIT = ("git", "-C", str(Path(__file__).resolve().parent))
_COMMIT = (*_GIT, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-changed")

_NOT_OF_THE_CELL = {"benchmark", "machine", "cpu_cores", "date", "commit", "driver", "python"}
_NOT_OF_THE_CELL |= {"twinop", "torch", "onnxruntime", "bytes"}


class BenchError(TwinopError):
    """Something cannot be measured here, or a file has no such measurements."""


def choose_device(name: str) -> torch.device:
    """Returns the device for `--device`; raises BenchError if there is no such name or no GPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise BenchError(f"--device {name}: expected auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise BenchError(
            f"--device cuda: torch {torch.__version__} sees no GPU. Use --device cpu, or a machine with a GPU"
        )
    return (
        torch.device("cuda", torch.cuda.current_device())
        if has_gpu and name != "cpu"
        else torch.device("cpu")
    )


def chosen(option: str, names: str, known: Sequence[str]) -> list[str]:
    """Returns an option's comma-separated names, each once; raises BenchError unless `known` has them."""
    found = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    if not found or not set(found) <= set(known):
        raise BenchError(f"{option} {names}: expected some of {', '.join(known)}")
    return found


def reason_of(failure: Exception) -> str:
    """Returns one line for an error; for ONNX Runtime's errors, the text after its codes."""
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    kind = "" if isinstance(failure, BenchError) else type(failure).__name__
    text = ": ".join(filter(None, (kind, first)))
    return re.sub(r"^.*?\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", text)[:300]


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the machine, the versions and the commit (TWINOP_COMMIT, if git cannot tell it)."""
    import onnxruntime

    cpu = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cuda = device.type == "cuda"
    facts = {
        "machine": torch.cuda.get_device_name(device) if cuda else (cpu or [platform.machine()])[0],
        "device": device.type,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("TWINOP_COMMIT") or _output(*_COMMIT) or "unknown",
        "twinop": __version__,
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }
    if cuda:
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver"] = drivers.partition("\n")[0]
    return facts


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine_title(line: Mapping[str, Any]) -> str:
    """Returns the machine of a measurement for titles and, in other letters, for names of files."""
    return line["machine"] if line["device"] == "cuda" else f"{line['machine']}, {line['cpu_cores']} cores"


class Measurements:
    """The file to which a run adds its `lines`; BenchError: its folder cannot be written to."""

    def __init__(
        self, benchmark: str, device: torch.device, output: Path | None = None, quick: bool = False
    ) -> None:
        self.benchmark, self.facts = benchmark, environment(device)
        machine = re.sub(r"[^a-z0-9]+", "-", machine_title(self.facts).lower()).strip("-")
        self.path = output_folder(output) / f"{benchmark}{'-quick' * quick}-{machine}.jsonl"
        self.lines: list[dict[str, Any]] = []
        versions = ", ".join(f"{name} {self.facts[name]}" for name in ("torch", "onnxruntime", "twinop"))
        said = f"{machine_title(self.facts)}; {versions}; commit {self.facts['commit'][:12]}; to {self.path}"
        out.print(said, soft_wrap=True)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line: the fields of its cell, the "times" by provider, and why others are "missing"."""
        whole = {"benchmark": self.benchmark, "missing": {}, **line, **self.facts}
        self.lines.append(whole)
        with self.path.open("a") as file:
            file.write(json.dumps(whole) + "\n")

    def say(self, line: Mapping[str, Any]) -> None:
        """Adds a line, and prints it with the times as multiples of the first provider's."""
        self.add(line)
        line = self.lines[-1]
        us = {name: time["median_us"] for name, time in line["times"].items()}
        said = [f"{name} {each:.5g} us ({each / next(iter(us.values())):.3f})" for name, each in us.items()]
        said += [f"{name}: not measured: {reason}" for name, reason in line["missing"].items()]
        cell = " ".join(map(str, cell_of(line).values()))
        out.print(f"{cell}: {', '.join(said)}", soft_wrap=True)


@contextmanager
def measuring(
    benchmark: str, device: str, output: Path | None, quick: bool, threads: int = 1
) -> Iterator[tuple[Measurements, torch.device, DeviceTimer | None]]:
    """Opens a command's file, with the device, and a GPU's timer; a TwinopError becomes one message."""
    with clear_errors(), torch.no_grad(), timer_on(where := choose_device(device)) as timer:
        torch.set_num_threads(threads)
        yield Measurements(benchmark, where, output, quick), where, timer


def output_folder(folder: Path | None) -> Path:
    """Creates the folder for results, before anything is measured; BenchError: it cannot be written to."""
    folder = folder or Path("bench-results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BenchError(
            f"--output {folder}: cannot be written to: {error.strerror}. Name another folder"
        ) from error
    return folder


def cell_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that name the cell of a line, and say nothing about its times."""
    return {
        name: value
        for name, value in line.items()
        if name not in _NOT_OF_THE_CELL and isinstance(value, str | int)
    }


def read(path: Path, benchmark: str | None = None) -> list[dict[str, Any]]:
    """Reads a file: the last line about each cell; BenchError: it does not have such measurements."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = {line["benchmark"] for line in lines if "times" in line}
        last = {frozenset(cell_of(line).items()): line for line in lines}
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise BenchError(f"{path}: not a file of measurements, which are JSON lines (since 0.3)") from error
    if benchmark is not None and kinds != {benchmark}:
        said = ", ".join(map(repr, sorted(kinds))) or "nothing"
        raise BenchError(f"{path}: measurements of {said}, expected those of {benchmark!r}")
    return list(last.values())
