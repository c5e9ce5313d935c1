"""`twinop bench --library` measures the ops of any library."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm_python

from twinop.bench.__main__ import project_here
from twinop.bench.cases import BACKWARD, FORWARD, Case, Sample, cases_of, choose
from twinop.bench.measurements import BenchError, read
from twinop.record.body_registry import BODIES
from twinop.testing.under_test import op_of
from twinop.torch_op import records

ROOT = Path(__file__).resolve().parents[2]


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
    expected = (
        inputs["x"][inputs["i"]] if direction == FORWARD else torch.tensor([1, 0, 1, 0])[:, None].expand(4, 3)
    )
    assert torch.equal(found, expected.double())


def test_an_op_without_a_body(libraries: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match=r"libtest_abi.so: it has no op that can be measured"):
        choose("", libraries["test_abi"])
    assert "test.abi::spread has no function body: nothing to compare it with" in capsys.readouterr().err


def test_an_op_with_sizes_from_data(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose("", project)
    said = "not measured: wrong_ops::too_many: its output shapes are data-dependent"
    assert said in capsys.readouterr().err


def test_the_project_in_this_folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert project_here() is None
    monkeypatch.chdir(project)
    assert project_here() == project


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
