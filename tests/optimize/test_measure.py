"""No time decides which file is written, unless `drop_slow` asks for it."""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from optimizing import exported

from twinop.deploy.cuda import has_gpu
from twinop.errors import ExportError
from twinop.optimize import measure, optimize
from twinop.optimize.measure import Stopwatch, drop_slow

NAMES = ["norm", "attention", "gated"]


class Files:
    """Files that hold the names of their rewrites, and a clock that adds up what each of these costs."""

    def __init__(self, folder: Path, costs: dict[str, float]) -> None:
        self.folder, self.costs, self.most = folder, costs, 0
        self.source, self.result = folder / "source", folder / "result"
        self.source.write_text("the source")
        self.result.write_text(" ".join(NAMES))

    def write(self, names: Sequence[str], folder: Path) -> Path:
        (folder / "file").write_text(" ".join(names))
        self.most = max(self.most, len([*self.folder.rglob("file")]))
        return folder / "file"

    def clock(self, *paths: Path) -> list[float]:
        return [10 + self.cost(path) for path in paths]

    def cost(self, path: Path) -> float:
        return sum(self.costs.get(name, 0) for name in path.read_text().split())

    def measured(self) -> measure.Measured:
        return drop_slow(self.source, self.result, NAMES, self.write, self.clock, self.folder, seconds=60.0)


@pytest.mark.parametrize(
    ("costs", "slow", "times"),
    [
        ({}, set(), (10.0, 10.0)),
        ({"attention": 2}, {"attention"}, (10.0, 12.0)),
        ({"attention": 2, "norm": 1, "gated": -1}, {"attention", "norm"}, (10.0, 12.0)),
        (dict.fromkeys(NAMES, 0.3), {*NAMES}, (10.0, 10.9)),  # each alone is noise
        ({"the": 5}, set(), (15.0, 10.0)),
    ],
)
def test_slow_rewrites(costs: dict[str, float], slow: set[str], times: object, tmp_path: Path) -> None:
    files = Files(tmp_path, costs)
    found = files.measured()
    assert found.slow.keys() == slow and found.times == times and not found.untimed
    assert all(text.startswith("slower here (1") for text in found.slow.values())
    assert files.most <= 2 and len([*tmp_path.rglob("file")]) <= 1  # what was measured goes at once


def _clock(self: Stopwatch, *paths: Path) -> list[float]:
    """Attention is slow."""
    found = [{node.op_type for node in onnx.load(path).graph.node} for path in paths]
    return [10.0 + ("MultiHeadAttention" in each) for each in found]


def test_a_slow_rewrite_is_reverted_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "__call__", _clock)
    path = exported("bert", tmp_path)
    report = optimize(path, tmp_path / "fast.onnx", device="cpu", drop_slow=True)
    assert [*report.reverted] == ["attention"] and report.fused and report.times == (10.0, 10.0)
    assert "reverted: attention: slower here (11 ms with it, 10 without)" in str(report)
    assert "MultiHeadAttention" not in {node.op_type for node in onnx.load(report.path).graph.node}
    assert re.search(r"; nothing gained: 10 -> 10 ms on cpu, first input \[3, 7\]\n", str(report))


def test_nothing_is_timed_and_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: the clock of the second run is another one."""
    monkeypatch.setattr(Stopwatch, "__call__", _clock)
    path = exported("bert", tmp_path)
    first = optimize(path, tmp_path / "fast.onnx", device="cpu")
    shutil.copy(first.path, tmp_path / "first")
    usual = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 1000 * usual())
    second = optimize(path, tmp_path / "fast.onnx", device="cpu")
    assert second.path.read_bytes() == (tmp_path / "first").read_bytes()
    assert second.times is None and " ms " not in str(second) and not second.untimed
    assert "MultiHeadAttention" in {node.op_type for node in onnx.load(second.path).graph.node}


@pytest.mark.skipif(has_gpu(), reason="this machine has the device")
def test_no_times_of_another_device(tmp_path: Path) -> None:
    source = exported("bert", tmp_path)
    report = optimize(source, tmp_path / "fast.onnx", device="cuda", drop_slow=True)
    assert report.times is None and " ms " not in str(report)
    assert "no time was measured: no NVIDIA" in str(report)


def test_invariant_products_are_not_dropped(tmp_path: Path) -> None:
    source = exported("bert", tmp_path)
    with pytest.raises(ExportError, match="drop_slow=True: invariant=True keeps slow rewrites. Leave"):
        optimize(source, tmp_path / "fast.onnx", dtype="float16", invariant=True, drop_slow=True)
