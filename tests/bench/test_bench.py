"""The benchmarks time what they should, and refuse what they cannot measure. No test asserts a speed."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from torch import Tensor

from twinop import torch_op
from twinop.bench import measurements
from twinop.bench.cases import BACKWARD, FORWARD, Case, Sample, built_entries, cases_of, choose, family_of
from twinop.bench.entries import ENTRIES, Entry, entry_of
from twinop.bench.measure import BUILT_IN, IN_ORT, IN_TORCH
from twinop.bench.measurements import BenchError, read
from twinop.bench.providers import EAGER, Providers
from twinop.bench.timing import DeviceTimer
from twinop.record.body_registry import BODIES
from twinop.testing.under_test import op_of
from twinop.torch_op import records

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(command, cwd=ROOT, env=os.environ | environment)


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


@pytest.fixture(scope="module")
def project(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "build").mkdir()
    shutil.copy(libraries["test_ops"].with_name("libwrong_ops.so"), folder / "build")
    shutil.copy(ROOT / "tests/matrix/wrong_ops.py", folder)
    (folder / "pyproject.toml").write_text(
        '[project.entry-points."twinop.libraries"]\nwrong_ops = "wrong_ops"\n'
    )
    yield folder
    BODIES.pop("wrong_ops::squared", None)  # which does not fit: an export in this process would refuse it


def test_cases_follow_from_the_record(project: Path) -> None:
    """Forward and backward, beside the function body in torch, whose float64 result is the exact one."""
    entries = choose("", project)
    assert list(entries) == ["shift", "squared", "twice"]
    entry = choose("twice", project)["twice"]
    cases = cases_of("twice", entry, "cpu")
    assert {case.direction for case in cases} == {FORWARD, BACKWARD}
    assert {case.dtype for case in cases} == {"float32"}
    sample = Sample.drawn(cases[0], torch.device("cpu"))
    (x,) = sample.inputs.values()
    function = op_of(records()[entry.op]).function
    assert torch.equal(function(x), 2 * x) and torch.equal(entry.eager(x), 2 * x)
    assert torch.equal(sample.exact()[0], 2 * x.double())


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_integers_beside_floats(direction: str, project: Path) -> None:
    entry = replace(choose("twice", project)["twice"], eager=lambda x, i: x.index_select(0, i))
    inputs = {"x": torch.randn(4, 3), "i": torch.tensor([2, 0])}
    sample = Sample(Case("twice", entry, "float32", (2, 3), direction), inputs, {"y": torch.ones(2, 3)})
    (found,) = sample.exact()
    gradient = torch.tensor([[1], [0], [1], [0]]).expand(4, 3)
    assert torch.equal(found, (inputs["x"][[2, 0]] if direction == FORWARD else gradient).double())


def test_an_op_without_a_body(libraries: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match=r"libtest_abi.so: it has no op that can be measured"):
        choose("", libraries["test_abi"])
    assert "test.abi::spread has no function body: nothing to compare it with" in capsys.readouterr().err


def test_a_report(project: Path) -> None:
    command = ["-m", "twinop", "bench", "--ops", "twice", "--quick"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command += ["--providers", "twinop,eager"]
    done = warm_python.run(command, cwd=project, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (project / "bench-results").glob("*.jsonl")
    lines = {line["direction"]: line for line in read(path, "ops")}
    assert all("torch eager" in line["times"] for line in lines.values())
    assert {"twinop in ORT", "torch copy_"} <= lines[FORWARD]["times"].keys()
    assert lines[BACKWARD]["missing"]["twinop in torch"].startswith("wrong result: relative error")
    assert list((project / "bench-results").glob("*.png"))


CPU = torch.device("cpu")
BUILT = built_entries()
each_entry = pytest.mark.parametrize("name", list(BUILT))


def on_cpu(*wanted: str) -> Providers:
    return Providers(CPU, None, 2, wanted, rounds=2, seconds=0.01)


def small(name: str, direction: str = FORWARD, entry: Entry | None = None) -> Case:
    entry = entry or BUILT[name]
    family = family_of(torch_op.records()[entry.op])
    return Case(name, entry, "float32", (6, 32) if family == "rows" else (192,), direction)


def test_an_op_without_an_entry_is_measured_beside_its_body() -> None:
    where = on_cpu("twinop", "eager")
    entry = entry_of(torch_op.records()["silu"])
    forward, backward = (where.line(small("silu", way, entry)) for way in (FORWARD, BACKWARD))
    assert forward["missing"] == backward["missing"] == {}
    assert {IN_TORCH, IN_ORT, EAGER} <= forward["times"].keys()
    assert {IN_TORCH, EAGER} <= backward["times"].keys()
    compiled = torch.compile(entry.eager, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), torch.nn.functional.silu(torch.ones(3)))


@each_entry
def test_all_of_ours_and_torchs_are_right(name: str) -> None:
    where = on_cpu("twinop", "eager", BUILT_IN)
    forward = where.line(small(name))
    assert forward["missing"] == {}
    assert {IN_TORCH, IN_ORT, EAGER} <= forward["times"].keys()
    assert (BUILT_IN in forward["times"]) == bool(BUILT[name].ort)
    tensors = len(BUILT[name].input_names) + len(torch_op.records()[BUILT[name].op].outputs)
    assert forward["bytes"] <= 4 * 192 * (tensors + (name == "swiglu_packed"))
    assert all(time["median_us"] > 0 for time in forward["times"].values())
    if BUILT[name].backward:
        backward = where.line(small(name, BACKWARD))
        assert backward["missing"] == {} and {IN_TORCH, EAGER} <= backward["times"].keys()


def test_the_time_for_compilation_ends() -> None:
    line = on_cpu("compile", "eager").line(small("relu"))
    assert set(line["missing"].values()) == {"not compiled: the time for compilation is spent"}


def wrong(x: Tensor) -> Tensor:
    """The exact result is that in float64."""
    return torch.relu(x) + (x.dtype == torch.float32)


def raising(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        raise ValueError("no kernel for this\nand more")
    return torch.relu(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(wrong, r"wrong result: relative error [0-9.e+-]+"), (raising, "ValueError: no kernel for this")],
)
def test_a_provider_that_fails_is_reported_and_not_timed(function: Any, reason: str) -> None:
    entry = replace(ENTRIES["relu"], eager=function)
    line = on_cpu("twinop in torch", "eager").line(small("relu", entry=entry))
    assert re.fullmatch(reason, line["missing"].pop(EAGER)) and not line["missing"]
    assert IN_TORCH in line["times"] and EAGER not in line["times"]
