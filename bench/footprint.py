"""The size of the libraries and of the sources, and the time of the build: `twinop bench footprint`."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors
from twinop.library import find_library, read_library, section_sizes

from . import report
from .recording import Commit, Output, Recording
from .report import BenchError

ROOT = report.RESULTS.parents[1]
LIBRARIES = ("custom_relu", "custom_ops", "twinop_torch")
_GPU_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_SLOWEST = 10  # outputs of the build that the report lists

BYTES = {1: {"libcustom_ops.so": 8e6, "an installation": 10e6}}
"""The most bytes for a number of CUDA architectures."""
BYTES_OF_SEVERAL = {"an installation": 45e6}
BUILD_SECONDS = 210
LINES = 29_600
LONGEST = 350

_PACKAGE = ("twinop", "torch_op", "deploy", "export", "bench")
_NOT_INSTALLED = {".cpp", ".h", ".map"}  # as in pyproject.toml
_NOT_THE_PROGRAM = ("tests/", "docs/", "examples/", "lab/results/")
_NOT_CODE = {".json", ".md", ".txt", ".svg", ".png"}
_SOURCES = {".py", ".h", ".cuh", ".cu", ".cpp", ".sh"}


def tracked_files(root: Path) -> list[str]:
    """Returns the files of a checkout that git tracks, without links, relative to `root`.

    Raises:
        BenchError: `root` is not a git checkout.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode != 0:
        raise BenchError(f"{root}: not a git checkout, so the project's files are not known")
    names = listed.stdout.splitlines()
    return [name for name in names if (root / name).is_file() and not (root / name).is_symlink()]


def source_facts(root: Path, files: Sequence[str]) -> dict[str, Any]:
    """Counts the lines of the program and of the longest source file, tests included."""
    lines = {name: (root / name).read_bytes().count(b"\n") for name in files}
    program = [name for name in files if not name.startswith(_NOT_THE_PROGRAM)]
    longest = max((name for name in files if Path(name).suffix in _SOURCES), key=lines.__getitem__)
    return {
        "lines": sum(lines[name] for name in program if Path(name).suffix not in _NOT_CODE),
        "longest": lines[longest],
        "longest_file": longest,
    }


def size_rows(root: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the bytes of each library by kind, of the package's other files, and of both together."""
    rows: list[dict[str, Any]] = []
    for path in map(find_library, LIBRARIES):
        sizes = section_sizes(path)
        gpu = sum(sizes.get(name, 0) for name in _GPU_SECTIONS)
        cpu = sum(size for name, size in sizes.items() if name.startswith(".text"))
        total = path.stat().st_size
        rows.append({"what": path.name, "bytes": total, "gpu": gpu, "cpu": cpu, "rest": total - gpu - cpu})
    modules = (name for name in files if name.startswith(_PACKAGE) and not name.startswith(_NOT_THE_PROGRAM))
    others = sum((root / name).stat().st_size for name in modules if Path(name).suffix not in _NOT_INSTALLED)
    rows.append({"what": "Python modules", "bytes": others, "gpu": 0, "cpu": 0, "rest": others})
    totals = {name: sum(row[name] for row in rows) for name in ("bytes", "gpu", "cpu", "rest")}
    return [*rows, {"what": "an installation", **totals}]


def build_times(log: Path) -> dict[str, Any]:
    """Reads ninja's log, which has the times of one build if that began in an empty folder.

    Returns:
        `wall`, the seconds from the first command to the end of the last; `sum`, those of all commands; and
        `slowest`, the commands that took longest. The ops of the tests do not count.

    Raises:
        BenchError: the log cannot be read.
    """
    try:
        lines = log.read_text().splitlines()[1:]
    except OSError as error:
        raise BenchError(f"{log}: {error.strerror}. Build with ./build.sh, or name the folder") from error
    times = {}
    for begin, end, _, output, *_ in (line.split("\t") for line in lines):
        if not output.startswith(("tests/", "libtest_")):
            times[output] = (int(begin) / 1e3, int(end) / 1e3)
    seconds = {output: round(end - begin, 1) for output, (begin, end) in times.items()}
    slowest = sorted(seconds.items(), key=lambda each: -each[1])[:_SLOWEST]
    return {
        "wall": round(max((end for _, end in times.values()), default=0.0), 1),
        "sum": round(sum(seconds.values()), 1),
        "slowest": dict(slowest),
    }


def bars(rows: list[dict[str, Any]], archs: int, build: dict[str, Any], tree: dict[str, Any]) -> list[Any]:
    """Returns the verdicts. The bars for sizes depend on the number of CUDA architectures."""
    sizes = {row["what"]: row["bytes"] for row in rows}
    most = {} if archs == 0 else BYTES.get(archs, BYTES_OF_SEVERAL)
    values: list[tuple[str, float, float]] = [
        (f"bytes of {what}, architectures: {archs}", sizes[what], bound) for what, bound in most.items()
    ]
    values += [
        ("seconds of the build", build["wall"], BUILD_SECONDS),
        ("lines of the program", tree["lines"], LINES),
        (f"lines of the longest file, {tree['longest_file']}", tree["longest"], LONGEST),
    ]
    return [report.bar(*each) for each in values]


def main(
    build: Annotated[Path, typer.Option(help="The build folder, whose ninja log has the times.")] = ROOT
    / "build",
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure what twinop weighs: the libraries by kind of code, the build, and the sources.

    The times are those of the last build, so build in an empty folder first. A library is measured where
    Python finds it.

    Example:

        twinop bench footprint
    """
    with clear_errors():
        recording = Recording("footprint", torch.device("cpu"), output, commit)
        archs = read_library(find_library("custom_ops")).cuda_archs
        files, times = tracked_files(ROOT), build_times(build / ".ninja_log")
        rows, tree = size_rows(ROOT, files), source_facts(ROOT, files)
        report.show_rows("Bytes", rows, list(rows[0]))
        slowest = [{"command": name, "seconds": seconds} for name, seconds in times["slowest"].items()]
        title = f"Build: {times['wall']} s, commands: {times['sum']} s"
        report.show_rows(title, slowest, ["command", "seconds"])
        count = 0 if archs == "none" else archs.count(",") + 1
        verdicts = bars(rows, count, times, tree)
        report.show_bars(verdicts)
        recording.write(settings={"cuda_archs": archs}, bars=verdicts, rows=rows, build=times, sources=tree)
