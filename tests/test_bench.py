"""The performance reports run, say what they measured, and refuse what they cannot. Never how fast it is."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from twinop.bench import relu, report
from twinop.bench.__main__ import Commands
from twinop.bench.report import BenchError
from twinop.bench.timing import DeviceTimer, Time, host_times

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"date", "commit", "twinop", "device", "cpu", "cpu_cores", "python", "torch", "onnxruntime"}
ON_GPU = {"gpu", "driver", "cuda_torch", "cuda_archs"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != str(ROOT)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}  # bench finds the root by itself
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=variables | {"TWINOP_COMMIT": "abc123"} | environment,
        timeout=280,
    )


def check_origin(document: dict[str, Any], benchmark: str) -> None:
    environment = document["environment"]
    assert document["benchmark"] == benchmark and document["settings"]
    assert environment.keys() >= ENVIRONMENT | (ON_GPU if environment["device"] == "cuda" else set())
    for bar in document.get("bars", []):
        assert bar.keys() >= {"what", "value", "bar", "passed"} and isinstance(bar["passed"], bool)


def check_document(document: dict[str, Any], benchmark: str) -> None:
    check_origin(document, benchmark)
    assert document["clocks"].keys() == {"before", "after"}
    assert document["rows"] and (document.get("bars") or benchmark == "matmul")
    for row in document["rows"]:
        assert 0 < row["low_us"] <= row["median_us"] and row["runs"] > 0


def test_relu_report(tmp_path: Path) -> None:
    done = run(
        "-m",
        "twinop.bench",
        "relu",
        "--device",
        "cpu",
        "--quick",
        "--log2-sizes",
        "4,7",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert "twinop in ORT" in done.stdout and "bars met" in done.stdout
    (path,) = tmp_path.glob("relu-*.json")
    document = json.loads(path.read_text())
    check_document(document, "relu")
    assert document["environment"]["commit"] == "abc123"
    assert {row["elements"] for row in document["rows"]} == {16, 128}
    assert {relu.IN_ORT, relu.ORT_RELU, relu.IN_TORCH, relu.EAGER, relu.COPY} <= {
        row["provider"] for row in document["rows"]
    }
    with Image.open(path.with_suffix(".png")) as image:
        image.load()
        assert image.format == "PNG" and min(image.size) > 300
    assert ElementTree.parse(path.with_suffix(".svg")).getroot().tag.endswith("svg")


def test_node_overhead_report_run_as_a_script(tmp_path: Path) -> None:
    script = ROOT / "bench" / "node_overhead.py"
    done = run(str(script), "--device", "cpu", "--quick", "--output", str(tmp_path), "--commit", "def456")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("node-overhead-*.json")
    document = json.loads(path.read_text())
    check_document(document, "node-overhead")
    assert document["environment"]["commit"] == "def456"
    assert document["settings"]["graph_optimization"] == "off"
    assert {row["nodes"] for row in document["rows"]} == {20, 200}
    assert document["slope_ns_per_node"].keys() == {"twinop", "built-in", "built-in again"}


@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_recorded_results_say_where_they_come_from(path: Path) -> None:
    document = json.loads(path.read_text())
    of_no_kernel = document["benchmark"] in ("instructions", "serve", "soak")
    (check_origin if of_no_kernel else check_document)(document, document["benchmark"])
    assert document["environment"]["commit"] != "unknown"


def test_help_teaches() -> None:
    done = run("-m", "twinop.bench", "relu", "--help", COLUMNS="200")
    assert done.returncode == 0 and "--quick" in done.stdout and "python bench/relu.py" in done.stdout


def test_kernels_are_measured_without_what_the_service_needs() -> None:
    """Where neither KServe nor gRPC is installed, as on a machine that is there for its GPU."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('kserve', 'grpc', 'tritonclient', 'fastapi')))"
    modules = {entry.partition(":")[0] for entry in Commands.modules.values()}
    assert {"twinop.bench.ops", "twinop.bench.serve"} <= modules
    done = run("-c", f"{missing}; import twinop.bench.__main__, {', '.join(modules)}")
    assert done.returncode == 0, done.stderr


def test_importing_the_folder_itself_is_refused() -> None:
    done = run("-c", "import bench")
    assert done.returncode != 0 and "ImportError: import twinop.bench, not bench" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--device", "cpu", "--log2-sizes", "x"], "--log2-sizes x: expected numbers from 0 to 31"),
        (["--device", "cpu", "--output", "README.md/results"], "--output README.md/results: cannot be made"),
    ],
)
def test_bad_options_are_one_message(arguments: list[str], message: str) -> None:
    done = run("bench/relu.py", "--quick", *arguments, COLUMNS="200")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--device cuda: torch .* sees no GPU"):
        report.choose_device("cuda")


@pytest.mark.parametrize(
    ("dtype", "nodes", "message"),
    [
        ("float16", 3, "BenchError: a chain of 3 Relu would run as 5 nodes"),  # no kernel: casts around it
        ("bfloat16", 1, "BenchError: ONNX Runtime's CPUExecutionProvider does not run this model"),
    ],
)
def test_a_chain_that_would_not_run_as_it_stands_is_refused(dtype: str, nodes: int, message: str) -> None:
    # A process of its own: sessions with a pool of their own cannot be opened where a report's have been.
    program = f"""
import torch
from twinop.bench import runtime
model = runtime.chain("Relu", {nodes}, torch.{dtype}, 1)
runtime.open_session(model, torch.device("cpu"), cpu_threads=2)
"""
    done = run("-c", program)
    assert done.returncode == 1 and message in done.stderr


def test_a_wrong_result_is_not_measured() -> None:
    x = torch.randn(8)
    y = torch.empty_like(x)
    with pytest.raises(BenchError, match="broken is not torch.relu"):
        relu.check({"broken": lambda: y.copy_(x)}, x, y)


def test_host_times_runs_all_in_turn() -> None:
    order: list[str] = []
    runs = {name: partial(order.append, name) for name in "ab"}
    times = host_times(runs, rounds=4, seconds=9.0, warmup=0)
    assert order == list("abbaabba")
    assert {name: time.runs for name, time in times.items()} == {"a": 4, "b": 4}


def test_time_is_the_median() -> None:
    time = Time.of([5.0, 1.0, 2.0, 100.0, 3.0])
    assert (time.median, time.low, time.runs) == (3.0, 1.0, 5)


@pytest.mark.cuda
def test_device_times_leave_the_host_out() -> None:
    stream = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    times = DeviceTimer(stream).times({"add": lambda: x + 1}, rounds=3)
    assert 0 < times["add"].median < 1e-3


@pytest.mark.cuda
def test_reports_on_the_gpu(tmp_path: Path) -> None:
    for command in (["relu", "--log2-sizes", "12,20"], ["node-overhead"]):
        done = run("-m", "twinop.bench", *command, "--device", "cuda", "--quick", "--output", str(tmp_path))
        assert done.returncode == 0, done.stderr
    for benchmark in ("relu", "node-overhead"):
        (path,) = tmp_path.glob(f"{benchmark}-*.json")
        check_document(json.loads(path.read_text()), benchmark)
