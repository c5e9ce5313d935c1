"""`twinop bench footprint`: sizes, the times in ninja's log, and the lines of source."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinop.bench import footprint
from twinop.bench.__main__ import app
from twinop.bench.report import BenchError

LOG = """# ninja log v7
5\t3005\t0\tops/silu.cu.o\tabc
10\t1510\t0\tops/silu.cpp.o\tabc
3010\t3500\t0\tlibcustom_ops.so\tabc
3000\t9000\t0\ttests/ops/probe.cu.o\tabc
9000\t9100\t0\tlibtest_probe.so\tabc
"""


def test_times_of_a_build(tmp_path: Path) -> None:
    (tmp_path / ".ninja_log").write_text(LOG)
    found = footprint.build_times(tmp_path / ".ninja_log")
    assert found == {
        "wall": 3.5,
        "sum": 5.0,
        "slowest": {"ops/silu.cu.o": 3.0, "ops/silu.cpp.o": 1.5, "libcustom_ops.so": 0.5},
    }
    with pytest.raises(BenchError, match=r"No such file.* Build with \./build\.sh, or name the folder"):
        footprint.build_times(tmp_path / "nowhere")


def test_lines_of_the_program(tmp_path: Path) -> None:
    texts = {"twinop/a.py": "x = 1\ny = 2\n", "tests/b.py": "x = 1\n" * 9, "twinop/data.json": "1\n"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = footprint.source_facts(tmp_path, list(texts))
    assert found == {"lines": 2, "longest": 9, "longest_file": "tests/b.py"}
    with pytest.raises(BenchError, match="not a git checkout"):
        footprint.tracked_files(tmp_path)


def test_the_report(tmp_path: Path) -> None:
    (tmp_path / ".ninja_log").write_text(LOG)
    done = CliRunner().invoke(app, ["footprint", f"--build={tmp_path}", f"--output={tmp_path}"])
    assert done.exit_code == 0, done.output
    [path] = tmp_path.glob("footprint-*.json")
    document = json.loads(path.read_text())
    sizes = {row["what"]: row for row in document["rows"]}
    assert all(row["bytes"] == row["gpu"] + row["cpu"] + row["rest"] for row in sizes.values())
    whole = sizes.pop("an installation")
    assert whole["bytes"] == sum(row["bytes"] for row in sizes.values())
    assert sizes["libcustom_ops.so"]["cpu"] > sizes["libcustom_relu.so"]["cpu"] > 100_000
    assert sizes["libtwinop_torch.so"]["gpu"] == 0
    assert document["build"]["wall"] == 3.5
    bars = {bar["what"]: bar for bar in document["bars"]}
    assert bars["seconds of the build"]["passed"]
    assert document["sources"]["lines"] > 1000


@pytest.mark.parametrize(
    ("archs", "what"), [(0, []), (1, ["libcustom_ops.so", "an installation"]), (6, ["an installation"])]
)
def test_bars_for_sizes(archs: int, what: list[str]) -> None:
    rows = [{"what": name, "bytes": 46e6} for name in ("libcustom_ops.so", "an installation")]
    tree = {"lines": 1, "longest": 1, "longest_file": "a.py"}
    found = [bar["what"] for bar in footprint.bars(rows, archs, {"wall": 1.0}, tree) if not bar["passed"]]
    assert found == [f"bytes of {name}, architectures: {archs}" for name in what]
