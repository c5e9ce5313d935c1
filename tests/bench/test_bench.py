"""The reports run, record their origin, and refuse what they cannot measure. No test asserts a speed."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from twinop.bench import node_overhead, ops_report, recording, report
from twinop.bench.__main__ import Commands, app
from twinop.bench.recording import read_json
from twinop.bench.report import BenchError
from twinop.bench.timing import DeviceTimer, Time, host_times

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"date", "commit", "twinop", "device", "cpu", "cpu_cores", "python", "torch", "onnxruntime"}
ON_GPU = {"gpu", "driver", "cuda_torch", "cuda_archs"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"TWINOP_COMMIT": "abc123"} | environment
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=variables, timeout=280
    )


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "twinop.bench", *arguments, **environment)


def check_origin(document: dict[str, Any], benchmark: str) -> None:
    environment = document["environment"]
    assert document["benchmark"] == benchmark and document["settings"]
    assert environment.keys() >= ENVIRONMENT | (ON_GPU if environment["device"] == "cuda" else set())
    for bar in document.get("bars", []):
        if benchmark == "ops":  # a line for each group
            assert bar["cells"] == bar["met"] + len(bar["missed"])
            assert not any(missed["passed"] for missed in bar["missed"])
        else:
            assert bar.keys() >= {"what", "value", "bar", "passed"} and isinstance(bar["passed"], bool)


def check_document(document: dict[str, Any], benchmark: str) -> None:
    check_origin(document, benchmark)
    assert document["clocks"].keys() == {"before", "after"}
    assert document["rows"] and (document.get("bars"))
    for row in document["rows"]:
        assert 0 < row["low_us"] <= row["median_us"] and row["runs"] > 0


def test_node_overhead_report(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--output", str(tmp_path), "--commit", "def456"]
    done = bench("node-overhead", *options)
    assert done.returncode == 0, done.stderr
    assert "twinop / built-in, wall time, 200 nodes, cpu" in done.stdout
    (path,) = tmp_path.glob("node-overhead-*.json")
    document = json.loads(path.read_text())
    check_document(document, "node-overhead")
    assert document["environment"]["commit"] == "def456"
    assert document["settings"]["graph_optimization"] == "off"
    assert {row["nodes"] for row in document["rows"]} == {20, 200}
    assert document["slope_ns_per_node"].keys() == {"twinop", "built-in", "built-in again"}


@pytest.mark.slow  # it compiles an op
def test_packed_weight_report(tmp_path: Path) -> None:
    done = bench("packed-weight", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("packed-weight-*.json")
    document = json.loads(path.read_text())
    check_document(document, "packed-weight")
    assert {(row["size"], row["packed"].startswith("once")) for row in document["rows"]} == {
        (size, once) for size in (256, 1024) for once in (True, False)
    }


@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_recorded_results_say_where_they_come_from(path: Path) -> None:
    document = read_json(path)
    kinds = ("ops", "linear", "node-overhead", "packed-weight")
    of_kernels = document["benchmark"] in kinds
    (check_document if of_kernels else check_origin)(document, document["benchmark"])
    assert document["environment"]["commit"] != "unknown"


def test_help_teaches() -> None:
    done = CliRunner().invoke(app, ["node-overhead", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "--quick" in done.stdout
    assert "twinop bench node-overhead --device cpu" in done.stdout


def test_the_time_that_it_takes_is_said_before_anything_is_imported() -> None:
    """The import of torch alone takes seconds."""
    missing = "import sys; sys.modules.update(dict.fromkeys(('torch', 'onnxruntime', 'numpy', 'onnx')))"
    for command, takes in Commands.takes.items():
        done = run("-c", f"{missing}; from twinop.bench.__main__ import app; app([{command!r}])")
        said = f"{command}: with the default options this takes {takes}"
        assert done.returncode == 1 and done.stderr.splitlines()[0] == said
    timeless = {"compare", "draw", "footprint"}
    assert Commands.takes.keys() == Commands.modules.keys() - timeless


def test_a_log_is_told_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(report, "err", Console(file=sys.stderr))
    with report.progress("cells", 2) as step:
        step("first")
        step("second")
    assert "cells: 1 of 2, first\ncells: 2 of 2, second\n" in capsys.readouterr().err


def test_results_are_not_written_over_the_recorded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recording.output_folder(None).resolve() == tmp_path / "bench-results"
    ignored = subprocess.run(["git", "check-ignore", "-q", "bench-results/ops.json"], cwd=ROOT, check=False)
    assert ignored.returncode in (0, 128)  # 128: not a clone


def test_an_interrupted_report_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine_name", lambda facts: "machine")

    def interrupted(*arguments: Any, save: Any, **options: Any) -> None:
        save()
        raise KeyboardInterrupt

    def make() -> None:
        options = {"device": "cpu", "quick": True, "plots": False}
        ops_report.main(ops="relu", kinds="bandwidth", output=tmp_path, **options)  # type: ignore[arg-type]

    old = tmp_path / "ops-machine.json"
    recorded = (report.RESULTS / "ops-amd-epyc-2-cores.json").read_text()
    old.write_text(recorded)
    monkeypatch.setattr(ops_report, "measure", interrupted)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert old.read_text() == recorded
    check_origin(json.loads((tmp_path / "ops-machine.partial.json").read_text()), "ops")

    monkeypatch.setattr(ops_report, "measure", lambda *arguments, save, **options: save())
    make()
    check_origin(json.loads(old.read_text()), "ops")
    assert list(tmp_path.iterdir()) == [old] and json.loads(old.read_text())["rows"] == []


MISSING = "import sys; sys.modules.update(dict.fromkeys(('kserve', 'grpc', 'tritonclient', 'fastapi')))"


def test_kernels_are_measured_without_what_the_service_needs() -> None:
    """On a GPU machine for kernels, neither KServe nor gRPC may be installed."""
    modules = {entry.partition(":")[0] for entry in Commands.modules.values()} - {"lab.soak"}
    assert {"twinop.bench.ops_report", "lab.serve"} <= modules
    done = run("-c", f"{MISSING}; import twinop.bench.__main__, {', '.join(modules)}")
    assert done.returncode == 0, done.stderr


def test_the_soak_names_the_package_that_is_missing() -> None:
    done = run("-c", f"{MISSING}; from twinop.bench.__main__ import app; app(['soak'])", COLUMNS="200")
    assert done.returncode == 1 and "this command needs the package grpc" in done.stderr


def test_importing_the_folder_itself_is_refused() -> None:
    done = run("-c", "import bench")
    assert done.returncode != 0 and "ImportError: import twinop.bench, not bench" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--device", "cpu", "--output", f"{__file__}/results"], "/results: cannot be made"),
    ],
)
def test_bad_options_are_one_message(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["node-overhead", "--quick", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and message in done.stderr and isinstance(done.exception, SystemExit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--device cuda: torch .* sees no GPU"):
        report.choose_device("cuda")


@pytest.mark.parametrize(
    ("dtype", "nodes", "message"),
    [
        (
            "float16",
            3,
            "BenchError: a chain of 3 Relu would run as 5 nodes",
        ),  # no kernel: ORT casts
        ("bfloat16", 1, "BenchError: ONNX Runtime's CPUExecutionProvider does not run this model"),
    ],
)
def test_a_chain_that_would_not_run_as_it_stands_is_refused(dtype: str, nodes: int, message: str) -> None:
    # A separate process: after a report, this one cannot open sessions with a thread pool of their own.
    program = f"""
import torch
from twinop.bench import runtime
x = torch.ones(1, dtype=torch.{dtype})
model = runtime.one_op(runtime.chain("Relu", {nodes}), {{"x": x}}, {{"y": x}}, fixed=True)
runtime.open_session(model, torch.device("cpu"), cpu_threads=2)
"""
    done = run("-c", program)
    assert done.returncode == 1 and message in done.stderr


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_overhead, "OPS", {"broken": "Neg", "built-in": "Relu"})
    with pytest.raises(BenchError, match="broken: 1 nodes are not torch.relu: nothing is measured"):
        node_overhead.Chains(torch.device("cpu"), 1, cpu_threads=1)


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
    timer = DeviceTimer(stream)
    times = timer.times({"add": lambda: x + 1, "256 times as much": timer.flush.zero_}, rounds=3)
    assert 0 < times["add"].median < times["256 times as much"].median


@pytest.mark.cuda
def test_node_overhead_report_on_the_gpu(tmp_path: Path) -> None:
    done = bench("node-overhead", "--device", "cuda", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("node-overhead-*.json")
    check_document(json.loads(path.read_text()), "node-overhead")
