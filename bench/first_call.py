"""The cost of an op's first call in a fresh process: `twinop bench first-call`."""

import itertools
import json
import statistics
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop import child
from twinop.console import clear_errors

from . import report
from .recording import Commit, Output, Recording

OPS = ("CustomRelu", "CustomGelu", "CustomSoftmax", "CustomLayerNorm")
_STEPS = ("register", "session", "first run", "second run")

# Plain ONNX Runtime, so that libraries of any version of twinop can be compared.
_PROGRAM = """
import json, sys, time
import numpy as np, onnx.parser, torch, onnxruntime
library, op, provider = sys.argv[1:]
onnxruntime.preload_dlls()
shapes = {"x": [64, 4096]} | ({"weight": [4096]} if op == "CustomLayerNorm" else {})
inputs = ", ".join(f"float{shape} {name}" for name, shape in shapes.items())
text = f"({inputs}) => (float[64, 4096] y) {{ y = custom_domain.{op}({', '.join(shapes)}) }}"
head = '<ir_version: 10, opset_import: ["" : 20, "custom_domain" : 1]> model '
model = onnx.parser.parse_model(head + text).SerializeToString()
feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
if provider == "CUDAExecutionProvider":
    torch.zeros(1, device="cuda")  # the context, which every program pays for
options = onnxruntime.SessionOptions()
times = [time.perf_counter()]
options.register_custom_ops_library(library)
times.append(time.perf_counter())
session = onnxruntime.InferenceSession(model, options, providers=[provider])
times.append(time.perf_counter())
for _ in range(2):
    session.run(None, feeds)
    times.append(time.perf_counter())
print(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


def measure(libraries: list[Path], provider: str, rounds: int) -> list[dict[str, Any]]:
    """Runs each op of each library in processes of its own, in turn.

    Returns:
        A row for each library and op, with medians in milliseconds.

    Raises:
        BenchError: a process failed.
    """
    found: dict[tuple[Path, str], list[list[float]]] = {}
    cases = [*itertools.product(range(rounds), OPS, libraries)]
    with report.progress("first call", len(cases)) as step:
        for _, op, library in cases:
            step(op)
            command = child.python(_PROGRAM, str(library), op, provider)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise report.BenchError(f"{library}, {op}: {done.stderr.strip().splitlines()[-1]}")
            found.setdefault((library, op), []).append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {
            "library": str(library),
            "bytes": library.stat().st_size,
            "op": op,
            **{
                f"{step}_ms": round(statistics.median(each) * 1e3, 3)
                for step, each in zip(_STEPS, zip(*runs, strict=True), strict=True)
            },
        }
        for (library, op), runs in found.items()
    ]


def main(
    libraries: Annotated[list[Path], typer.Argument(help="Libraries to compare.", exists=True)],
    rounds: Annotated[int, typer.Option(help="Processes for each op and library.", min=1)] = 7,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure registering a library, opening a session and the first two runs, in fresh processes.

    Example:

        twinop bench first-call build/libcustom_ops.so old/libcustom_ops.so
    """
    with clear_errors():
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        recording = Recording("first-call", device, output, commit)
        provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        rows = measure([library.absolute() for library in libraries], provider, rounds)
        rows.sort(key=lambda row: row["op"])
        report.show_rows("First calls in a fresh process, medians", rows, list(rows[0]))
        recording.write(settings={"rounds": rounds, "provider": provider}, rows=rows)
