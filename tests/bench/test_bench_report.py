"""The output of the reports: files, plots, commands, messages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import FAST, rows_of
from PIL import Image
from typer.testing import CliRunner

from twinop.bench.__main__ import app
from twinop.bench.cases import BACKWARD, FORWARD
from twinop.bench.cells import IN_ORT, IN_TORCH, cells_of, verdicts
from twinop.bench.figures import draw_ops
from twinop.bench.providers import EAGER
from twinop.bench.recorded import added
from twinop.bench.recording import Recording, pack, read_ops, rest_of, to_add_to, unpack
from twinop.bench.report import BenchError

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


def test_new_cells_are_added_to_a_report() -> None:
    failed = {"op": "gelu", "direction": "forward", "dtype": "bfloat16", "shape": "2^28"}
    old = document(rows_of(FAST) + rows_of(FAST, "gelu"))
    old |= {"not_measured": [failed, failed | {"op": "relu"}], "numerics": [error_of("gelu", 1.0)]}
    new = document(rows_of({name: us * 2 for name, us in FAST.items()}, "gelu"))
    new |= {"numerics": [error_of("gelu", 0.5), error_of("relu", 0.0)]}
    whole = added(old, new)
    cells = {cell.op: cell for cell in cells_of(whole["rows"])}
    assert cells["relu"].us(IN_TORCH) == 100 and cells["gelu"].us(IN_TORCH) == 200
    assert whole["not_measured"] == [failed | {"op": "relu"}] and whole["seconds"] == {"all": 2.0}
    assert {row["op"]: row["max_ulp"] for row in whole["numerics"]} == {"gelu": 0.5, "relu": 0.0}
    groups = {bar["group"] for bar in whole["bars"]}
    assert groups > {"share of the copy, unary", "numerics, element-wise in 16 bits, ulp"}


def error_of(op: str, ulp: float) -> dict[str, Any]:
    row = {"op": op, "dtype": "float16", "family": "unary", "device": "cuda", "max_ulp": ulp}
    return row | {"provider": IN_TORCH}


def check_png(path: Path) -> None:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG" and min(image.size) > 200


@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        ({}, {}, "adds to"),
        ({"commit": "def"}, {}, "(commit was abc, is def)"),
        ({"gpu": "NVIDIA H100", "torch": "2.9"}, {}, "gpu was NVIDIA H200, is NVIDIA H100; torch was None"),
        ({}, {"quick": True}, "(quick was None, is True)"),
    ],
)
def test_only_a_report_of_the_same_machine_settings_and_commit_is_added_to(
    environment: dict[str, str],
    settings: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path / "ops.json", rows_of(FAST))
    facts = document([])["environment"] | environment
    assert (to_add_to(path, facts, settings) is None) == bool(environment or settings)
    assert said in capsys.readouterr().out.replace("\n", "")
    assert to_add_to(tmp_path / "none.json", facts, settings) is None


def test_models_that_are_not_measured_again_stay() -> None:
    old = {
        "rows": [{"op": "bert"}, {"op": "vit"}],
        "exports": {"bert": {}, "vit": {}},
        "not_measured": {"vit": "why", "bert, torch.compile": "why not", "t5": "no memory"},
    }
    assert rest_of(old, {"bert", "t5"}) == {
        "rows": [{"op": "vit"}],
        "exports": {"vit": {}},
        "not_measured": {"vit": "why"},
        "bars": [],
    }
    assert rest_of(None, {"bert"}) == {"rows": [], "exports": {}, "not_measured": {}, "bars": []}


def test_a_report_of_changed_sources_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "ops.json", rows_of(FAST), commit="abc-changed")
    assert (
        to_add_to(
            path,
            document(
                [],
            )["environment"]
            | {"commit": "abc-changed"},
            {},
        )
        is None
    )
    assert "the sources may have changed" in capsys.readouterr().out


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
        ("[]", "not a report of `twinop bench`"),
        ('{"benchmark": "relu"}', "a report of 'relu', expected one of 'ops'"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=message):
        read_ops(path)


def test_rows_are_stored_by_cell(tmp_path: Path) -> None:
    """The file has one line for each cell; reading it gives the same rows."""
    rows = rows_of(FAST) + rows_of({IN_TORCH: 3.0}, "softmax", "32768x4096")
    rows[1]["host_us"] = 7.5  # one row has it, the others do not
    columns, cells = pack(rows, ("median_us", "low_us", "runs", "host_us"))
    assert columns == ["median_us", "low_us", "runs", "host_us"] and len(cells) == 2
    assert unpack(cells, columns) == [dict(row) for row in rows]
    path = written(tmp_path, rows)
    assert path.read_text().count('"op": "softmax"') == 1
    assert read_ops(path)["rows"] == rows


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    recording = Recording("ops", torch.device("cpu"), folder, "abc")
    bars = verdicts(cells_of(rows))
    recording.write(settings={}, seconds={}, not_measured=[], bars=bars, rows=rows, numerics=[])
    return recording.path


def test_files_with_a_line_for_each_provider_are_read(tmp_path: Path) -> None:
    """Older files have another form. They can be compared with newer ones."""
    rows = rows_of(FAST)
    old = saved(tmp_path / "old.json", [row | {"gb_per_s": 4294.97} for row in rows])
    new = written(tmp_path, rows)
    assert len(json.loads(new.read_text())["rows"]) == 1 and read_ops(old)["rows"] == rows
    assert "1 cells compared, 0 slower" in command("compare", str(old), str(new))


def test_bars_are_stored_by_group(tmp_path: Path) -> None:
    slow = FAST | {IN_TORCH: 120.0}
    path = written(tmp_path, rows_of(FAST) + rows_of(slow, "silu"))
    bars = {bar["group"]: bar for bar in read_ops(path)["bars"]}
    found = bars["share of the copy, unary"]
    assert (found["cells"], found["met"]) == (2, 1)
    [missed] = found["missed"]
    assert "silu" in missed["what"] and (missed["value"], missed["passed"]) == (0.833, False)


# ------------------------------------------------------------------------------- plots


def recorded(tmp_path: Path) -> Path:
    rows = [
        row
        for shape in ("32768x1024", "32768x4095", "32768x4096")
        for direction in (FORWARD, BACKWARD)
        for row in rows_of(FAST | {"ORT Softmax": 200.0}, "softmax", shape, direction=direction)
    ]
    return saved(tmp_path / "ops.json", [*rows, *rows_of(FAST, "relu")])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["overview"]),
        (["--op=softmax"], ["softmax"]),
        (["--op=relu, softmax"], ["relu", "softmax"]),
        (["--op=all"], ["relu", "softmax"]),
    ],
)
def test_plots_are_drawn_from_the_file(options: list[str], names: list[str], tmp_path: Path) -> None:
    text = command("draw", str(recorded(tmp_path)), *options, f"--output={tmp_path / 'plots'}")
    paths = [tmp_path / "plots" / f"ops-{name}.png" for name in names]
    assert sorted((tmp_path / "plots").iterdir()) == paths
    for path in paths:
        check_png(path)
        assert path.name in text


def test_the_plot_of_the_service(tmp_path: Path) -> None:
    row = {"model": "small", "server": "twinop", "protocol": "REST", "p50_ms": 1.0, "p99_ms": 2.0}
    rows = [row | {"clients": clients, "per_second": 900.0} for clients in (1, 16, 64)]
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(document(rows) | {"benchmark": "serve"}))
    command("draw", str(path), f"--output={tmp_path}")
    check_png(tmp_path / "serve.png")


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        ("ops", ["--op=gelu"], "--op gelu: expected some of softmax, relu, all"),
        ("linear", [], "a report of 'linear', expected one of 'ops'"),
        ("serve", ["--op=relu"], "a report of 'serve', expected one of 'ops'"),
    ],
)
def test_what_cannot_be_drawn(benchmark: str, options: list[str], message: str, tmp_path: Path) -> None:
    path = recorded(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"benchmark": benchmark}))
    assert message in command("draw", str(path), *options, f"--output={tmp_path}", code=1)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", found.append)
    return found


def test_what_the_overview_shows(figures: list[Any], tmp_path: Path) -> None:
    """The overview shows the fastest of ONNX Runtime's own ops under one name, and no variants."""
    times = FAST | {"ORT Gelu": 200.0, "ORT FastGelu": 150.0, f"{IN_TORCH}, scalar": 500.0}
    draw_ops(rows_of(times, "gelu"), "a machine", tmp_path / "ops")
    [figure] = figures
    [legend] = figure.legends
    assert [text.get_text() for text in legend.texts] == ["torch copy_", IN_TORCH, EAGER, "ORT built-in"]
    [line] = [each for each in figure.axes[0].get_lines() if each.get_label() == "ORT built-in"]
    assert line.get_ydata()[0] == pytest.approx((1 << 30) * 1e-3 / 150)


def test_no_line_leaves_a_panel(figures: list[Any], tmp_path: Path) -> None:
    """The panels of a row share one scale, which fits the highest line of all panels."""
    slow, fast = {"twinop in torch": 400.0}, {"twinop in torch": 100.0}
    rows = [*rows_of(slow, "relu"), *rows_of(fast, "add")]
    for pages in ((), ("relu", "add")):
        draw_ops(rows, "a machine", tmp_path / "ops", pages)
    panels = [axis for figure in figures for axis in figure.axes if axis.get_lines()]
    assert len(panels) == 4  # a page for each op, and the overview
    for axis in panels:
        heights = [y for line in axis.get_lines() for y in line.get_ydata()]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(heights)


# ------------------------------------------------------------------------------- commands


def test_report_on_the_cpu(tmp_path: Path) -> None:
    """Without a command, `twinop bench` makes the report."""
    options = ["--device=cpu", "--quick", "--providers=twinop,eager,ORT", f"--output={tmp_path}"]
    text = command("--ops=relu", "--kinds=bandwidth", *options)
    assert "relu, float32: microseconds on the CPU" in text and "bars met" in text
    (path,) = tmp_path.glob("ops-*.json")
    check_png(path.with_name(f"{path.stem}-overview.png"))
    report = read_ops(path)
    assert report["environment"]["device"] == "cpu" and report["environment"]["commit"] == "abc"
    assert {row["provider"] for row in report["rows"]} >= {IN_TORCH, IN_ORT, EAGER, "ORT Relu"}
    assert "slower by more than 3 %" in command("compare", str(path), str(path))
    text = command("--ops=square", "--kinds=numerics", *options)
    assert f"adds to {path}" in text and "square" in text and "relu" not in text
    whole = read_ops(path)
    assert whole["rows"] == report["rows"] and {row["op"] for row in whole["numerics"]} == {"square"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops=nonsense"], "--ops nonsense: expected some of relu"),
        (["--kinds=speed"], "--kinds speed: expected some of bandwidth, latency, numerics"),
        (["--compare=missing.json"], "missing.json: cannot be read"),
    ],
)
def test_bad_options_are_one_message(options: list[str], message: str) -> None:
    assert message in command("report", "--device=cpu", *options, code=1)


def test_linear(tmp_path: Path) -> None:
    text = command("linear", "--device=cpu", "--quick", "--output", str(tmp_path))
    assert "twinop in ORT / ORT, time" in text
    (path,) = tmp_path.glob("linear-*.json")
    report = json.loads(path.read_text())
    providers = {"twinop in ORT", "twinop in torch", "torch", "torch again", "ORT", "ORT again"}
    providers.add("twinop in torch, two kernels")
    assert {row["provider"] for row in report["rows"]} == providers and not report["not_measured"]
    assert len(report["bars"]) == len({(row["op"], row["shape"]) for row in report["rows"]})


@pytest.mark.cuda
def test_report_on_the_gpu(tmp_path: Path) -> None:
    """Measures every kind of provider and cell once, and compiles in advance."""
    options = ["--device=cuda", "--quick", "--ops=relu", "--workers=1", f"--output={tmp_path}"]
    text = command(*options)
    (path,) = tmp_path.glob("ops-*.json")
    report = read_ops(path)
    for kind, wanted in (("bandwidth", {"torch copy_"}), ("latency", set())):
        found = {row["provider"] for row in report["rows"] if row["kind"] == kind}
        assert found >= wanted | {IN_TORCH, IN_ORT, EAGER, "torch.compile", "ORT Relu"}, text
    assert report["numerics"] and report["clocks"]["after"]
