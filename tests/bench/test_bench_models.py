"""The reports on whole models, with the one model that needs torch alone. No test asserts a speed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinop.bench import models
from twinop.bench.__main__ import app
from twinop.bench.model_exports import OURS, STOCK, prepare
from twinop.bench.model_runs import MEASURED, TWINOP, measure
from twinop.bench.model_zoo import ROWS
from twinop.bench.workers import FAILURE, Worker

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_row(tmp_path: Path) -> None:
    """Its exports hold what their columns say, and compute what torch computes."""
    files = {OURS: str(tmp_path / "ours.onnx"), STOCK: str(tmp_path / "ours-source.onnx")}
    said = prepare("dit", OURS, "float32", True, files[OURS])
    assert said["made"]["attention"] == 1 and not said["taken_back"]
    columns = ["torch eager", "ORT stock", TWINOP, MEASURED]
    found = measure("dit", True, "cpu", files, columns, rounds=1)
    assert not found["reasons"]
    rows = {row["provider"]: row for row in found["rows"]}
    assert list(rows) == columns and all(row["error"] < 1e-5 for row in rows.values())
    assert "MultiHeadAttention" in rows[TWINOP]["nodes"]
    assert not any(name.startswith("Custom") for name in rows["ORT stock"]["nodes"])


def test_a_column_that_fails_is_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"")
    found = measure("dit", True, "cpu", {STOCK: str(broken)}, ["torch eager", "ORT stock"], rounds=1)
    assert [row["provider"] for row in found["rows"]] == ["torch eager"]
    assert list(found["reasons"]) == ["ORT stock"]


def test_rows_that_differ_in_the_mask_share_exports() -> None:
    first, second = ROWS["bert-fp16"], ROWS["bert-any-mask"]
    assert first.stored(STOCK) == second.stored(STOCK) and first.stored(OURS) != second.stored(OURS)


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


def test_the_documentation_says_what_was_recorded() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "bench/results/models-nvidia-h200.json").read_text())["rows"]
    assert models.markdown(rows) in (root / "docs/guide/performance.md").read_text()
    shares = sorted(bar["value"] for bar in models.bars(rows) if bar["what"].endswith(", time"))
    claim = f"{shares[0]:.2f} to {shares[-2]:.2f} of the time"
    readme = (root / "README.md").read_text()
    assert claim in readme and f"as a CUDA graph, {shares[-1]:.2f}." in readme


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
    assert Worker("builtins:dict", tmp_path / "answers").result({"a": 1}, 60) == {"a": 1}
    gone = Worker("os:missing", tmp_path / "gone").result({}, 60)
    assert "module 'os' has no attribute 'missing'" in gone[FAILURE]
    waits = Worker("signal:pause", tmp_path / "waits").result({}, 0.2)
    assert waits == {FAILURE: "stopped after 0.2 s"}


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
