"""The output of the report: files, plots, commands, messages."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from twinop.bench.__main__ import main
from twinop.bench.measure import BUILT_IN, IN_ORT, IN_TORCH
from twinop.bench.measurements import BenchError, Measurements, read
from twinop.bench.providers import EAGER
from twinop.bench.timing import time_of
from twinop.cli.console import program

FACTS = {"machine", "device", "cpu_cores", "date", "commit", "twinop", "torch", "onnxruntime", "python"}


def command(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(program(main), arguments, env={"COLUMNS": "200", "TWINOP_COMMIT": "abc"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def check_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000


def test_a_file_grows_and_the_last_line_about_a_cell_counts(tmp_path: Path) -> None:
    for us in (5e-6, 7e-6):
        measured = Measurements("ops", torch.device("cpu"), tmp_path)
        for op in ("relu", "gelu"):
            measured.add({"op": op, "times": {IN_TORCH: time_of([us])}, "missing": {EAGER: "no GPU"}})
        assert len(measured.lines) == 2
    lines = read(measured.path, "ops")
    assert len(measured.path.read_text().splitlines()) == 4
    assert [line["op"] for line in lines] == ["relu", "gelu"]
    for line in lines:
        assert line["times"] == {IN_TORCH: {"median_us": 7.0, "low_us": 7.0, "runs": 1}}
        assert line["missing"] == {EAGER: "no GPU"} and line.keys() >= FACTS


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


def test_report_on_the_cpu(tmp_path: Path) -> None:
    options = ["--device=cpu", "--quick", "--providers=twinop,eager,ORT", f"--output={tmp_path}"]
    text = command("--ops=relu", *options)
    assert "relu, float32: microseconds on the CPU" in text
    (path,) = tmp_path.glob("ops-*.jsonl")
    check_png(path.with_name(f"{path.stem}-overview.png"))
    [line] = read(path, "ops")
    assert line["device"] == "cpu" and line["commit"] == "abc"
    assert line["times"].keys() >= {IN_TORCH, IN_ORT, EAGER, BUILT_IN}
    command("--ops=square", *options)
    assert [each["op"] for each in read(path)] == ["relu", "square"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops=relu,swish"], "--ops relu,swish: expected some of relu, gelu"),
        (["--ops= , "], "--ops , : expected some of relu"),
        (["--device=tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--output", f"{__file__}/results"], "/results: cannot be written to"),
    ],
)
def test_bad_options_are_one_message(options: list[str], message: str) -> None:
    assert message in command("--device=cpu", *options, code=1)


@pytest.mark.cuda
def test_report_on_the_gpu(tmp_path: Path) -> None:
    """Measures every kind of provider once."""
    options = ["--device=cuda", "--quick", "--ops=relu", f"--output={tmp_path}"]
    text = command(*options)
    (path,) = tmp_path.glob("ops-*.jsonl")
    found = {name for line in read(path) for name in line["times"]}
    assert found >= {"torch copy_", IN_TORCH, IN_ORT, EAGER, "torch.compile", BUILT_IN}, text
