"""`twinop bench footprint`: sizes, the times in ninja's log, and the facts about the sources."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinop.bench import footprint
from twinop.bench.__main__ import app
from twinop.bench.report import BenchError
from twinop.bench.source_tree import Import, SourceTree

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


def make_tree(folder: Path, **files: str) -> SourceTree:
    """Writes these files: `export__first_py` is a module in the folder export."""
    texts = {name.replace("__", "/").replace("_py", ".py"): text for name, text in files.items()}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return SourceTree(folder, tuple(texts))


def test_lines_of_the_program(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, twinop__a_py="x = 1\ny = 2\n", tests__b_py="x = 1\n" * 9, twinop__data="1\n")
    assert tree.program_lines() == 3
    assert tree.longest() == [(9, "tests/b.py"), (2, "twinop/a.py")]


def test_imports(tmp_path: Path) -> None:
    tree = make_tree(
        tmp_path,
        twinop__record_py="def f():\n    from .bench import cells\n",
        export__first_py="import torch\nfrom twinop.record import f\nfrom . import second\n",
        export__second_py="from .first import x\n",
        torch_op__call_py="from twinop.export.second import y\nimport twinop.record\n",
        bench__cells_py="from ..export import first\n",
    )
    assert set(tree.imports()) == {
        Import("twinop.export.first", "twinop.record"),
        Import("twinop.export.first", "twinop.export.second"),
        Import("twinop.export.second", "twinop.export.first"),
        Import("twinop.torch_op.call", "twinop.export.second"),
        Import("twinop.torch_op.call", "twinop.record"),
        Import("twinop.bench.cells", "twinop.export.first"),
    }
    assert {each.importer for each in tree.imports() if each.is_upward} == {"twinop.torch_op.call"}
    assert set(tree.import_cycle()) == {"twinop.export.first", "twinop.export.second"}


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
    assert bars["seconds of the build"]["passed"] and bars["imports that run upward"]["value"] == 0


@pytest.mark.parametrize(
    ("archs", "what"), [(0, []), (1, ["libcustom_ops.so", "an installation"]), (6, ["an installation"])]
)
def test_bars_for_sizes(archs: int, what: list[str]) -> None:
    rows = [{"what": name, "bytes": 46e6} for name in ("libcustom_ops.so", "an installation")]
    tree = {"lines": 1, "longest": 1, "longest_file": "a.py", "upward": [], "cycle": []}
    found = [bar["what"] for bar in footprint.bars(rows, archs, {"wall": 1.0}, tree) if not bar["passed"]]
    assert found == [f"bytes of {name}, architectures: {archs}" for name in what]
