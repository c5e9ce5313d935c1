"""The output of the report: files, plots, commands, messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import FAST, line_of
from typer.testing import CliRunner

from twinop.bench.__main__ import app
from twinop.bench.cases import BACKWARD, FORWARD
from twinop.bench.cells import IN_ORT, IN_TORCH
from twinop.bench.measurements import BenchError, Measurements, read
from twinop.bench.providers import EAGER
from twinop.bench.timing import Time

FACTS = {"machine", "device", "cpu_cores", "date", "commit", "twinop", "torch", "onnxruntime", "python"}


def saved(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "TWINOP_COMMIT": "abc"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def check_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000


# ------------------------------------------------------------------------------- files


def test_a_file_grows_and_the_last_line_about_a_cell_counts(tmp_path: Path) -> None:
    for us in (5e-6, 7e-6):
        measured = Measurements("ops", torch.device("cpu"), tmp_path)
        for op in ("relu", "gelu"):
            measured.add({"op": op, "times": {IN_TORCH: Time.of([us])}, "missing": {EAGER: "no GPU"}})
        assert len(measured.lines) == 2
    lines = read(measured.path, "ops")
    assert len(measured.path.read_text().splitlines()) == 4 and [line["op"] for line in lines] == [
        "relu",
        "gelu",
    ]
    for line in lines:
        assert line["times"] == {IN_TORCH: {"median_us": 7.0, "low_us": 7.0, "runs": 1}}
        assert line["missing"] == {EAGER: "no GPU"} and line.keys() >= FACTS


@pytest.mark.parametrize(("factor", "code"), [(1.02, 0), (1.05, 1), (0.5, 0)])
def test_regressions_are_flagged(factor: float, code: int, tmp_path: Path) -> None:
    old = saved(tmp_path / "old.jsonl", line_of(FAST))
    new = saved(tmp_path / "new.jsonl", line_of(FAST | {IN_TORCH: 100 * factor, EAGER: 500.0}))
    text = command("compare", str(old), str(new), code=code)
    assert f"1 cells compared, {code} slower" in text


def test_reports_without_a_common_cell_are_refused(tmp_path: Path) -> None:
    old, new = saved(tmp_path / "old", line_of(FAST)), saved(tmp_path / "new", line_of(FAST, "gelu"))
    assert "no cell in common" in command("compare", str(old), str(new), code=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not a file of measurements"),
        ("[]", "not a file of measurements"),
        ("", "measurements of nothing, expected those of 'ops'"),
        ('{"benchmark": "linear", "times": {}}', "measurements of 'linear', expected those of 'ops'"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=message):
        read(path, "ops")


# ------------------------------------------------------------------------------- plots


def recorded(tmp_path: Path) -> Path:
    shapes = ("32768x1024", "32768x4095", "32768x4096")
    times = FAST | {"ORT Softmax": 200.0}
    lines = [
        line_of(times, "softmax", shape, direction=way) for shape in shapes for way in (FORWARD, BACKWARD)
    ]
    return saved(tmp_path / "ops.jsonl", *lines, line_of(FAST, "relu"))


def test_the_plot_is_drawn_from_the_file(tmp_path: Path) -> None:
    text = command("draw", str(recorded(tmp_path)), f"--output={tmp_path / 'plots'}")
    (path,) = (tmp_path / "plots").iterdir()
    check_png(path)
    assert path.name == "ops-overview.png" and path.name in text


# ------------------------------------------------------------------------------- commands


def test_report_on_the_cpu(tmp_path: Path) -> None:
    """Without a command, `twinop bench` makes the report."""
    options = ["--device=cpu", "--quick", "--providers=twinop,eager,ORT", f"--output={tmp_path}"]
    text = command("--ops=relu", *options)
    assert "relu, float32: microseconds on the CPU" in text
    (path,) = tmp_path.glob("ops-*.jsonl")
    check_png(path.with_name(f"{path.stem}-overview.png"))
    [line] = read(path, "ops")
    assert line["device"] == "cpu" and line["commit"] == "abc"
    assert line["times"].keys() >= {IN_TORCH, IN_ORT, EAGER, "ORT Relu"}
    assert "slower by more than 3 %" in command("compare", str(path), str(path))
    command("--ops=square", *options, "--no-plots")
    assert [each["op"] for each in read(path)] == ["relu", "square"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops=nonsense"], "--ops nonsense: expected some of relu"),
        (["--kinds=speed"], "--kinds speed: expected some of bandwidth, latency"),
        (["--compare=missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--device=tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--output", f"{__file__}/results"], "/results: cannot be written to"),
    ],
)
def test_bad_options_are_one_message(options: list[str], message: str) -> None:
    assert message in command("report", "--device=cpu", *options, code=1)


@pytest.mark.cuda
def test_report_on_the_gpu(tmp_path: Path) -> None:
    """Measures every kind of provider and cell once."""
    options = ["--device=cuda", "--quick", "--ops=relu", f"--output={tmp_path}"]
    text = command(*options)
    (path,) = tmp_path.glob("ops-*.jsonl")
    for kind, wanted in (("bandwidth", {"torch copy_"}), ("latency", set())):
        found = {name for line in read(path) if line["kind"] == kind for name in line["times"]}
        assert found >= wanted | {IN_TORCH, IN_ORT, EAGER, "torch.compile", "ORT Relu"}, text
