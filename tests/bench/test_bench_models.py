"""The reports on whole models, with the one model that needs torch alone. No test asserts a speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lab import models
from twinop.bench.__main__ import app
from lab.model_runs import COMPILE, MEASURED, OURS, TWINOP, checked, measure, prepare
from twinop.bench.providers import Subject
from twinop.bench.workers import FAILURE, Pipeline, Worker

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_row(tmp_path: Path) -> None:
    """Its exports hold what their columns say, and compute what torch computes."""
    ours, stock = str(tmp_path / "ours.onnx"), str(tmp_path / "ours-source.onnx")
    said = prepare("dit", OURS, "float32", True, ours)
    assert said["made"]["attention"] == 1 and not said["taken_back"]
    columns = {"torch eager": "", "ORT stock": stock, TWINOP: ours, MEASURED: ours}
    found = measure("dit", "float32", True, "cpu", columns, rounds=1)
    assert not found["reasons"]
    rows = {row["provider"]: row for row in found["rows"]}
    assert list(rows) == list(columns) and all(row["error"] < 1e-5 for row in rows.values())
    assert "MultiHeadAttention" in rows[TWINOP]["nodes"]
    assert not any(name.startswith("Custom") for name in rows["ORT stock"]["nodes"])


def test_a_column_that_fails_is_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"")
    columns = {"torch eager": "", "ORT stock": str(broken)}
    found = measure("dit", "float32", True, "cpu", columns, rounds=1)
    assert [row["provider"] for row in found["rows"]] == ["torch eager"]
    assert list(found["reasons"]) == ["ORT stock"]


def test_a_run_without_a_graph_where_none_can_be_recorded() -> None:
    expected = torch.arange(6.0).reshape(1, 3, 2)

    def make(graph: bool) -> Subject:
        if graph:
            raise RuntimeError("the model waits for the GPU")
        return Subject(lambda: expected + torch.tensor([[[0.0], [0.0], [9.0]]]))

    subject = checked(make, expected, torch.tensor([[1, 1, 0]]), graph=True)
    assert subject.facts == {"error": 0.0, "no_graph": "RuntimeError: the model waits for the GPU"}
    with pytest.raises(RuntimeError):
        checked(lambda graph: make(True), expected, None)


def test_verdicts_leave_out_wrong_results() -> None:
    """The fastest other column does not count if it computes something else."""
    times = {
        "torch eager": (20e3, 1e-3),
        "ORT optimizer": (5e3, 4e-3),
        TWINOP: (9e3, 1e-3),
        MEASURED: (8e3, 1e-3),
    }
    rows = [
        {"op": "bert-any-mask", "provider": column, "median_us": us, "error": error}
        for column, (us, error) in times.items()
    ]
    error, ratio, milliseconds = models.bars(rows)
    assert error["passed"] and error["value"] == 1
    assert ratio["what"] == "bert-any-mask: twinop measured / torch eager, time" and ratio["value"] == 0.4
    assert ratio["passed"] and not milliseconds["passed"]


def table_of(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the documentation: a model's times in ms, and the fastest other column's share."""
    shown = [COMPILE, "ORT optimizer", *models.OURS]
    lines = ["| model | " + " | ".join(shown) + " | of the fastest other |", "|---" * (len(shown) + 2) + "|"]
    for title, columns in models.panels(rows).items():
        best = min((each for each in columns if each not in models.OURS), key=columns.__getitem__)
        ours = min(columns[each] for each in models.OURS if each in columns)
        times = [f"{columns[each]:.2f}" if each in columns else "-" for each in shown]
        lines.append(f"| {title} | " + " | ".join(times) + f" | {ours / columns[best]:.2f} ({best}) |")
    return "\n".join(lines)


def test_the_documentation_says_what_was_recorded() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "bench/results/models-nvidia-h200.json").read_text())["rows"]
    assert table_of(rows) in (root / "docs/guide/performance.md").read_text()
    shares = sorted(bar["value"] for bar in models.bars(rows) if bar["what"].endswith(", time"))
    assert f"{shares[0]:.2f} to {shares[-1]:.2f} of the time" in (root / "README.md").read_text()


def test_a_plot_of_a_record(tmp_path: Path) -> None:
    rows = [
        {"op": "dit", "provider": column, "median_us": us, "wall_us": us, "error": error}
        for column, us, error in (("torch eager", 650, 1e-3), ("ORT stock", 9, 1.0), (TWINOP, 450, 1e-3))
    ]
    assert models.panels(rows) == {"DiT block, 8 x 1024, fp16": {"torch eager": 0.65, TWINOP: 0.45}}
    record = tmp_path / "models-gpu.json"
    record.write_text(json.dumps({"benchmark": "models", "environment": {"gpu": "GPU"}, "rows": rows}))
    done = CliRunner().invoke(app, ["draw", str(record), f"--output={tmp_path}"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "models-gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_answers_fails_and_is_stopped(tmp_path: Path) -> None:
    assert Worker("builtins:dict", tmp_path).result({"a": 1}, 60) == {"a": 1}
    gone = Worker("os:missing", tmp_path).result({}, 60)
    assert "module 'os' has no attribute 'missing'" in gone[FAILURE]
    waits = Worker("signal:pause", tmp_path).result({}, 0.2)
    assert waits == {FAILURE: "stopped after 0.2 s"}


def test_a_pipeline_on_a_cpu_measures_when_all_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.py").write_text(
        "import pathlib\n"
        "def prepare(path): return {'bytes': pathlib.Path(path).write_text('x')}\n"
        "def measure(folder): return {'files': len(list(pathlib.Path(folder).glob('*.txt')))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # children find modules where this process does
    with Pipeline("steps", torch.device("cpu"), count=1, at_once=2) as pipeline:
        made = [pipeline.prepare(path=f"{pipeline.folder}/{number}.txt") for number in range(2)]
        assert pipeline.measure(folder=str(pipeline.folder)) == {"files": 2}
        assert [each.result() for each in made] == [{"bytes": 1}] * 2
    assert not pipeline.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "--rows=nonsense"), "--rows nonsense: expected some of bert-fp16"),
        (("models", "--columns=nonsense"), "--columns nonsense: expected some of torch eager"),
        (("architectures", "--models=nonsense"), "--models nonsense: expected some of bert"),
    ],
)
def test_bad_options_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, [*arguments, "--device=cpu"], env={"COLUMNS": "300"})
    assert done.exit_code == 1 and message in done.output
