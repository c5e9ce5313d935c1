#!/usr/bin/env python3
"""Runs the `cuda` tests and, on a small subset, compute-sanitizer; writes what happened as JSON.

    .venv/bin/python tests/gpu_report.py --output tests/results/gpu-tests.json --commit $(git rev-parse HEAD)

Exit code 0 means no failed test and no sanitizer report. The sanitizers watch twinop's own kernels only.
With --target and --kernels a run is a row of a matrix: the ops with the kernels that another GPU would run.
"""

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from twinop.script import require

    require("pytest", "torch", "typer", command="./build.sh setup test")

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OF_KERNELS = ["tests/kernels", "tests/matrix", "tests/library", "tests/record"]


def run_pytest(marker: str, prefix: list[str], log: Path, extra: list[str]) -> dict[str, Any]:
    """One pytest run: the counts, the names of what failed or was skipped, and the exit code."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*prefix, sys.executable, "-m", "pytest", "-m", marker, "-q"]
        command += [f"--junitxml={report}", *extra]
        start = time.monotonic()
        with log.open("w") as stream:
            code = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT).returncode
        suite = next(ElementTree.parse(report).iter("testsuite")) if report.exists() else None
    counts: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    if suite is None:
        return counts | {"tests": 0, "failed": ["pytest itself: see the log"], "skipped": {}}
    cases = list(suite.iter("testcase"))

    def name(case: ElementTree.Element) -> str:
        return f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"

    failed = [name(c) for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = {name(c): skip.get("message", "") for c in cases if (skip := c.find("skipped")) is not None}
    passed = len(cases) - len(failed) - len(skipped)
    return counts | {"tests": len(cases), "passed": passed, "failed": failed, "skipped": skipped}


def sanitize(tool: str, log: Path) -> dict[str, Any]:
    prefix = ["compute-sanitizer", f"--tool={tool}", "--kernel-name=kns=twinop", "--error-exitcode=9"]
    if tool == "synccheck":
        prefix.append("--num-cuda-barriers=512")  # with too few, which it chooses itself, it fails
    marker = "cuda and sanitizer"
    if tool == "initcheck":
        marker += " and not torch_writes"  # it would report every such read
    result = run_pytest(marker, prefix, log, ["--timeout=600"])
    text = log.read_text(errors="replace")
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    result["reports"] = sum(int(a or b) for a, b in found) if found else None
    return result


def versions() -> dict[str, Any]:
    import torch

    import onnxruntime  # isort: skip  (after torch: one set of CUDA libraries)

    from twinop.libraries.library import find_library, read_library

    library = read_library(find_library("custom_ops"))
    query = "--query-gpu=name,driver_version"
    gpu = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    name, driver = gpu.splitlines()[0].split(", ")
    return {
        "gpu": name,
        "gpus": torch.cuda.device_count(),
        "driver": driver,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "twinop": library.version,
        "cuda_archs": library.cuda_archs,
        "nvcc": library.cuda_version,
    }


def _write(output: Path, facts: dict[str, Any], runs: dict[str, Any]) -> None:
    output.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n")


def main(
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    commit: Annotated[str, typer.Option(help="The commit under test.")] = "",
    logs: Annotated[Path, typer.Option(help="Folder for the full logs.")] = Path("/tmp/twinop-gpu-logs"),
    marker: Annotated[str, typer.Option(help="Which tests.")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="A test file; repeat it. Else all.")] = None,
    sanitizers: Annotated[bool, typer.Option(help="Run compute-sanitizer too.")] = True,
    workers: Annotated[int, typer.Option(help="Processes for the tests (pytest-xdist), if not one.")] = 1,
    target: Annotated[str, typer.Option(help="The GPU whose limits kernels keep: TWINOP_TARGET.")] = "",
    kernels: Annotated[bool, typer.Option("--kernels", help="Only the tests of kernels and ops.")] = False,
) -> None:
    """Run the CUDA tests and the sanitizers on this machine's GPU."""
    console = Console(width=120)
    logs.mkdir(parents=True, exist_ok=True)
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{path}:{ROOT}" if path else str(ROOT)
    sys.path.insert(0, str(ROOT))
    parallel = [f"--numprocesses={workers}"] if workers > 1 else []
    if target:
        os.environ["TWINOP_TARGET"] = target
    if kernels:
        only, sanitizers = OF_KERNELS, False
    facts = {**versions(), "target": target or "the GPU", "commit": commit}
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    runs = {"tests": run_pytest(marker, [], logs / "tests.log", [*parallel, *(only or [])])}
    _write(output, facts, runs)  # whatever becomes of the sanitizers
    if sanitizers:
        console.print(f"compute-sanitizer {', '.join(TOOLS)} ...")
        with ThreadPoolExecutor() as pool:  # each a process of its own
            found = pool.map(lambda tool: sanitize(tool, logs / f"{tool}.log"), TOOLS)
            runs |= dict(zip(TOOLS, found, strict=True))
        _write(output, facts, runs)

    good = True
    for name, run in runs.items():
        good = good and run["exit_code"] == 0 and not run.get("reports", 0) and run["tests"] > 0
        console.print(f"{name}: {json.dumps({**run, 'skipped': len(run['skipped'])})}", markup=False)
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
