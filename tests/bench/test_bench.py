"""The benchmarks time what they should, and refuse what they cannot measure. No test asserts a speed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python

from twinop.bench import measurements
from twinop.bench.__main__ import TAKES
from twinop.bench.measurements import BenchError
from twinop.bench.timing import DeviceTimer

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(command, cwd=ROOT, env=os.environ | environment)


def test_the_time_that_it_takes_is_said_before_anything_is_imported() -> None:
    """The import of torch alone takes seconds."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnxruntime', 'numpy', 'onnx')))"
    command = [sys.executable, "-c", f"{missing}; from twinop.cli import app; app(['bench'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[0] == TAKES


def test_results_are_written_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert measurements.output_folder(None).resolve() == tmp_path / "bench-results"
    ignored = subprocess.run(["git", "check-ignore", "-q", "bench-results/ops.jsonl"], cwd=ROOT, check=False)
    assert ignored.returncode in (0, 128)  # 128: not a clone


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--device cuda: torch .* sees no GPU"):
        measurements.choose_device("cuda")


@pytest.mark.parametrize(
    ("dtype", "nodes", "message"),
    [
        ("float16", 3, "BenchError: a chain of 3 Relu would run as 5 nodes"),  # no kernel: ORT casts
        ("bfloat16", 1, "BenchError: ONNX Runtime's CPUExecutionProvider does not run this model"),
    ],
)
def test_a_chain_that_would_not_run_as_it_stands_is_refused(dtype: str, nodes: int, message: str) -> None:
    # A separate process: after a report, this one cannot open sessions with a thread pool of their own.
    program = f"""
import torch
from twinop.bench import runtime
x = torch.ones(1, dtype=torch.{dtype})
nodes = runtime.parse_nodes("; ".join(["a = Relu(x)", "b = Relu(a)", "y = Relu(b)"][-{nodes}:]))
nodes[0].input[:] = ["x"]
model = runtime.one_op(nodes, {{"x": x}}, {{"y": x}})
runtime.open_session(model, torch.device("cpu"), cpu_threads=2)
"""
    done = run("-c", program)
    assert done.returncode == 1 and message in done.stderr


@pytest.mark.cuda
def test_device_times_leave_the_host_out() -> None:
    stream = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    timer = DeviceTimer(stream)
    times = timer.times({"add": lambda: x + 1, "256 times as much": timer.flush.zero_}, rounds=3)
    assert 0 < times["add"]["median_us"] < times["256 times as much"]["median_us"]
