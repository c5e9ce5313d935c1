"""What the report makes of its measurements: verdicts, files, plots, commands, messages."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from twinop import torch_op
from twinop.bench import merge, ncu, numerics, verdicts
from twinop.bench.__main__ import app
from twinop.bench.cases import BACKWARD, FORWARD
from twinop.bench.cells import IN_ORT, IN_TORCH, Cell, cells_of
from twinop.bench.figures import draw
from twinop.bench.providers import EAGER
from twinop.bench.report import BenchError

# ------------------------------------------------------------------------------- verdicts


def rows_of(
    times: Mapping[str, float], op: str = "relu", shape: str = "2^28", **other: Any
) -> list[dict[str, Any]]:
    family = "rows" if "x" in shape else "unary"
    row = {
        "kind": "bandwidth",
        "device": "cuda",
        "op": op,
        "family": family,
        "direction": "forward",
        "dtype": "bfloat16",
        "shape": shape,
        "aligned": True,
        "bytes": 1 << 30,
        "runs": 9,
    }
    return [
        row
        | other
        | {"provider": name, "median_us": us, "low_us": us, "gb_per_s": 1e3 * (1 << 30) / us * 1e-6}
        for name, us in times.items()
    ]


def failed(rows: list[dict[str, Any]]) -> set[str]:
    return {verdict["group"] for verdict in verdicts.verdicts(cells_of(rows)) if not verdict["passed"]}


COPY = {"torch copy_": 100.0, "torch copy_ again": 100.5}


@pytest.mark.parametrize(
    ("times", "op", "shape", "missed"),
    [
        ({IN_TORCH: 101.0, EAGER: 110.0}, "relu", "2^28", set()),
        ({IN_TORCH: 105.0, EAGER: 110.0}, "relu", "2^28", {"share of the copy, unary"}),
        ({IN_TORCH: 101.0, EAGER: 99.0}, "relu", "2^28", {"forward, against the best peer"}),
        ({IN_TORCH: 107.0}, "softmax", "32768x4096", set()),
        ({IN_TORCH: 110.0}, "softmax", "32768x4096", {"share of the copy, rows"}),
        ({IN_TORCH: 110.0}, "softmax", "4096x65536", set()),
        ({IN_TORCH: 105.0}, "swiglu", "32768x4096", {"share of the copy, rows"}),
        ({IN_ORT: 100.0, "ORT Softmax": 200.0}, "softmax", "32768x4096", set()),
        (
            {IN_ORT: 100.0, "ORT Softmax": 150.0},
            "softmax",
            "32768x4096",
            {"in ORT, times as fast as its built-in"},
        ),
    ],
)
def test_verdicts(times: dict[str, float], op: str, shape: str, missed: set[str]) -> None:
    assert failed(rows_of(COPY | times, op, shape)) == missed


def test_a_run_that_differs_from_itself_is_the_tolerance() -> None:
    times = COPY | {IN_TORCH: 105.0, IN_TORCH + " again": 110.0}
    [cell] = cells_of(rows_of(times))
    assert cell.tolerance == pytest.approx(5 / 105)
    assert failed(rows_of(times)) == set()
    noisy = COPY | {IN_TORCH: 150.0, IN_TORCH + " again": 300.0}
    assert failed(rows_of(noisy)) == {"share of the copy, unary"}, "noise does not excuse everything"


@pytest.mark.parametrize("aligned", [True, False])
def test_misaligned_rows_have_a_bar_of_their_own(aligned: bool) -> None:
    missed = failed(rows_of(COPY | {IN_TORCH: 115.0}, "softmax", "32768x4095", aligned=aligned))
    assert missed == ({"share of the copy, rows"} if aligned else set())


def test_backward_is_held_against_torch_compile_and_liger() -> None:
    times = COPY | {IN_TORCH: 100.0, EAGER: 50.0, "Liger": 120.0}
    assert failed(rows_of(times, direction="backward")) == set()
    times["torch.compile"] = 90.0
    assert failed(rows_of(times, direction="backward")) == {"backward, against the best peer"}


def test_cpu_bars() -> None:
    times = {IN_ORT: 107.0, "ORT Relu": 100.0, IN_TORCH: 100.0, EAGER: 100.0}
    assert failed(rows_of(times, device="cpu")) == {"CPU, element-wise, time"}
    times = {IN_ORT: 120.0, "ORT Softmax": 100.0, IN_TORCH: 130.0, EAGER: 200.0}
    assert failed(rows_of(times, "softmax", "512x4096", device="cpu")) == {"CPU, rows, speed"}


def test_numeric_verdicts() -> None:
    def row(provider: str, error: float) -> dict[str, Any]:
        return {
            "op": "exp",
            "family": "unary",
            "dtype": "float16",
            "provider": provider,
            "max_ulp": error,
            "device": "cpu",
        }

    found = numerics.verdicts([row(IN_TORCH, 0.9), row(IN_ORT, 1.5), row(EAGER, 1.0), row("ORT Exp", 0.5)])
    assert [verdict["passed"] for verdict in found] == [True, True, False, False]


# ------------------------------------------------------------------------------- files


def document(rows: list[dict[str, Any]], **environment: str) -> dict[str, Any]:
    facts = {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "cpu": "x", "cpu_cores": 1}
    return {
        "benchmark": "ops",
        "environment": facts | environment,
        "settings": {},
        "clocks": {"before": None, "after": None},
        "seconds": {"all": 1.0},
        "not_measured": [],
        "bars": [],
        "rows": rows,
        "numerics": [],
    }


def saved(path: Path, rows: list[dict[str, Any]], **environment: str) -> Path:
    path.write_text(json.dumps(document(rows, **environment)))
    return path


def command(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "TWINOP_COMMIT": "abc"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


FAST = COPY | {IN_TORCH: 100.0, EAGER: 130.0}


def test_parts_are_merged(tmp_path: Path) -> None:
    first = saved(tmp_path / "1.json", rows_of(FAST) + rows_of(FAST, "gelu"))
    second = saved(tmp_path / "2.json", rows_of({name: us * 2 for name, us in FAST.items()}, "gelu"))
    command("merge", str(first), str(second), "--output", str(tmp_path / "out"))
    whole = merge.load(tmp_path / "out" / "ops-nvidia-h200.json")
    cells = {cell.op: cell for cell in cells_of(whole["rows"])}
    assert cells["relu"].us(IN_TORCH) == 100 and cells["gelu"].us(IN_TORCH) == 200
    assert whole["bars"]
    for name in ("relu", "gelu", "overview"):
        with Image.open(tmp_path / "out" / f"ops-nvidia-h200-{name}.png") as image:
            image.load()
            assert min(image.size) > 200


def test_parts_of_different_commits_are_refused(tmp_path: Path) -> None:
    first = saved(tmp_path / "1.json", rows_of(FAST))
    second = saved(tmp_path / "2.json", rows_of(FAST), commit="def")
    assert "differ in commit: abc and def" in command("merge", str(first), str(second), code=1)


@pytest.mark.parametrize(("factor", "code"), [(1.02, 0), (1.05, 1), (0.5, 0)])
def test_regressions_are_flagged(factor: float, code: int, tmp_path: Path) -> None:
    old = saved(tmp_path / "old.json", rows_of(FAST))
    new = saved(tmp_path / "new.json", rows_of(FAST | {IN_TORCH: 100 * factor, EAGER: 500.0}))
    text = command("compare", str(old), str(new), code=code)
    assert f"1 cells compared, {code} slower" in text


def test_reports_without_a_common_cell_are_refused(tmp_path: Path) -> None:
    old, new = (
        saved(tmp_path / "old.json", rows_of(FAST)),
        saved(tmp_path / "new.json", rows_of(FAST, "gelu")),
    )
    assert "no cell in common" in command("compare", str(old), str(new), code=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not a JSON file"),
        ('{"benchmark": "relu"}', "its benchmark is not 'ops'"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=message):
        merge.load(path)


def test_plots_of_rows_and_both_directions(tmp_path: Path) -> None:
    rows = [
        row
        for shape in ("32768x1024", "32768x4095", "32768x4096")
        for direction in (FORWARD, BACKWARD)
        for row in rows_of(FAST | {"ORT Softmax": 200.0}, "softmax", shape, direction=direction)
    ]
    paths = draw(cells_of(rows), "a machine", tmp_path / "ops")
    assert [path.name for path in paths] == ["ops-softmax.png", "ops-overview.svg", "ops-overview.png"]
    text = paths[1].read_text()
    assert "ORT built-in" in text and "4095" in text


def test_no_line_leaves_a_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The panels of a row share their scale: that of the highest line, wherever it is."""
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
    slow, fast = {"twinop in torch": 400.0}, {"twinop in torch": 100.0}
    draw(cells_of([*rows_of(slow, "relu"), *rows_of(fast, "add")]), "a machine", tmp_path / "ops")
    panels = [axis for figure in figures for axis in figure.axes if axis.get_lines()]
    assert len(panels) == 4  # a page each, and the overview
    for axis in panels:
        heights = [y for line in axis.get_lines() for y in line.get_ydata()]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(heights)


# ------------------------------------------------------------------------------- commands


def test_report_on_the_cpu(tmp_path: Path) -> None:
    """Without a command it is the report."""
    options = ["--device=cpu", "--quick", "--ops=relu", "--providers=twinop,eager,ORT", "--kinds=bandwidth"]
    text = command(*options, f"--output={tmp_path}")
    assert "relu, float32, CPU: microseconds" in text and "bars met" in text
    (path,) = tmp_path.glob("ops-*.json")
    report = merge.load(path)
    assert report["environment"]["device"] == "cpu" and report["environment"]["commit"] == "abc"
    assert {row["provider"] for row in report["rows"]} >= {IN_TORCH, IN_ORT, EAGER, "ORT Relu"}
    assert "slower by more than 3 %" in command("compare", str(path), str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops=nonsense"], "--ops nonsense: unknown"),
        (["--kinds=speed"], "--kinds speed: expected some of bandwidth, latency, numerics"),
        (["--compare=missing.json"], "missing.json: cannot be read"),
        (["--ops=relu", "--trace=/nowhere/trace.json"], "--trace /nowhere/trace.json: cannot be written"),
    ],
)
def test_bad_options_are_one_message(options: list[str], message: str) -> None:
    assert message in command("report", "--device=cpu", *options, code=1)


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command("--device=cpu", "--ops=relu", "--providers=twinop,eager", "--trace", str(path))
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any(str(name).startswith("relu forward") and IN_TORCH in str(name) for name in names)


def test_ncu_prints_its_command() -> None:
    text = command("--device=cpu", "--ops=relu", "--ncu")
    assert "--clock-control=none" in text and "twinop.bench kernels --ops=relu" in text
    assert command("kernels", "--device=cpu", "--ops=relu") == ""


def test_ncu_output_is_read() -> None:
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    name = "void twinop::elementwise::Kernel<twinop::Gelu<float>, (int)4>(const T1 *, T2 (*)[3])"
    lines = [
        "==PROF== Connected to process 1",
        header,
        f'"0","1","{name}","Duration","us","63.10"',
        f'"0","1","{name}","DRAM Throughput","%","88.2"',
        f'"0","1","{name}","Compute (SM) Throughput","%","93.5"',
        f'"1","1","{name}","DRAM Throughput","%","50"',
    ]
    kernels = ncu.parse("\n".join(lines))
    assert [found for found, _ in kernels] == ["elementwise::Kernel<Gelu<float>, (int)4>"] * 2
    assert kernels[0][1]["Duration"] == "63.10 us"
    assert ncu.limit(kernels[0][1]) == "[green]arithmetic[/]"
    assert ncu.limit(kernels[1][1]) == "[red]DRAM[/]" and ncu.limit({}) == ""


@pytest.mark.skipif("matmul" not in torch_op.records(), reason="no matmul in these libraries")
def test_matmul(tmp_path: Path) -> None:
    text = command("matmul", "--device=cpu", "--quick", "--output", str(tmp_path))
    assert "TFLOP/s" in text and "naive" in text and "tiled, in ORT" in text


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_encoder(tmp_path: Path) -> None:
    text = command("encoder", "--device=cpu", "--quick", "--styles=llama", "--output", str(tmp_path))
    assert "llama, float32, 2x16, twinop" in text
    (path,) = tmp_path.glob("encoder-*.json")
    rows = {row["provider"]: row for row in json.loads(path.read_text())["rows"]}
    assert any(name.startswith("Custom") for name in rows["twinop"]["nodes"])
    assert not any(name.startswith("Custom") for name in rows["stock export"]["nodes"])


@pytest.mark.cuda
def test_report_on_the_gpu(tmp_path: Path) -> None:
    """Every kind of provider and cell once, compiled in advance as well."""
    options = ["--device=cuda", "--quick", "--ops=relu", "--workers=1", f"--output={tmp_path}"]
    text = command(*options)
    (path,) = tmp_path.glob("ops-*.json")
    report = merge.load(path)
    for kind, wanted in (("bandwidth", {"torch copy_"}), ("latency", set())):
        found = {row["provider"] for row in report["rows"] if row["kind"] == kind}
        assert found >= wanted | {IN_TORCH, IN_ORT, EAGER, "torch.compile", "ORT Relu"}, text
    assert report["numerics"] and report["clocks"]["after"]


@pytest.mark.cuda
def test_other_commands_on_the_gpu(tmp_path: Path) -> None:
    command("kernels", "--device=cuda", "--ops=relu")
    if "matmul" in torch_op.records():
        assert "cuBLAS" in command("matmul", "--device=cuda", "--quick", f"--output={tmp_path}")
    trace = tmp_path / "trace.json"
    command("--device=cuda", "--ops=relu", "--providers=twinop", "--trace", str(trace))
    assert "twinop" in trace.read_text()


def test_a_cell_knows_its_best_peer() -> None:
    [cell] = cells_of(rows_of(FAST | {"Triton": 120.0}))
    assert isinstance(cell, Cell) and cell.best_peer == "Triton" and cell.size == 1 << 28
    assert cell.share(IN_TORCH) == 1.0
