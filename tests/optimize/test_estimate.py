"""How much memory and disk a model takes is said before anything is written."""

from collections import namedtuple
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import parsed, weights
from typer.testing import CliRunner

from twinop.cli import app
from twinop.errors import ExportError
from twinop.optimize import estimate, optimize
from twinop.optimize.segments import MOST_BYTES

TEXT = "(float[N, 64] x) => (float[N, 64] y) { m = MatMul (x, w) a = Add (m, b) y = Relu (a) }"
_Usage = namedtuple("_Usage", "total free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parsed(TEXT, w=weights(64, 64), b=weights(64)), tmp_path / "old.onnx")
    return tmp_path / "old.onnx"


def sized(*shapes: tuple[int, int], dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Model:
    """Makes a model of weights that take no memory."""
    graph = ir.Graph([], [], nodes=[])
    for index, shape in enumerate(shapes):
        tensor = ir.LazyTensor(lambda: ir.tensor(np.zeros(1)), dtype=dtype, shape=ir.Shape(shape))
        graph.register_initializer(ir.val(f"w{index}", const_value=tensor))
    return ir.Model(graph, ir_version=10)


def test_what_a_model_takes_does_not_grow_with_its_layers(tmp_path: Path) -> None:
    """Memory is what a segment takes, and a large weight runs in slices; the disk has the whole result."""
    layer = [(4096, 4096)] * 4 + [(4096, 14336)] * 3
    some, many = (estimate.estimate(sized(*layer * count), tmp_path / "a") for count in (4, 32))
    assert some.memory == many.memory and many.disk > 7 * some.disk
    head = estimate.estimate(sized(*layer * 4, (4096, 128256)), tmp_path / "none/of/these/a")
    assert head.memory == some.memory
    half = estimate.estimate(sized((4096, 4096)), tmp_path / "a")
    wide = estimate.estimate(sized((4096, 4096)), tmp_path / "a", "float32")
    assert wide.disk - half.disk == 2 * 4096 * 4096
    assert half.memory < some.memory < 20 * MOST_BYTES


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_what_is_too_little(what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how much is needed."""
    if what == "memory":
        monkeypatch.setattr(estimate, "free_bytes", lambda: 100_000_000)
        said = r"old.onnx: optimising it takes about 0\.\d GB of memory, and 0\.1 GB are free .*Raise the"
    else:
        monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: _Usage(1 << 40, 10_000_000))
        said = r"new.onnx: to write it takes 10 MB of disk, and 10 MB are free in .*Free space, or name"
    with pytest.raises(ExportError, match=said):
        optimize(model, tmp_path / "new.onnx", device="cpu")
    assert [each.name for each in tmp_path.iterdir()] == ["old.onnx"]


def test_a_file_system_that_takes_no_files(model: Path) -> None:
    with pytest.raises(ExportError, match=r"/sys/new.onnx: cannot be written, /sys: .*\. Name ano"):
        optimize(model, "/sys/new.onnx", device="cpu")


def test_a_file_above_2_gb_without_external_data(tmp_path: Path) -> None:
    """It is not read: the file has no blocks on the disk."""
    with (tmp_path / "old.onnx").open("wb") as file:
        file.truncate((2 << 30) + 1)
    said = r"old.onnx: cannot be read: larger than 2147483648 bytes. An ONNX file ends at 2 GB: save it with"
    with pytest.raises(ExportError, match=said):
        optimize(tmp_path / "old.onnx", tmp_path / "new.onnx", device="cpu")


def test_a_dry_run_shows_the_rewrites_and_the_estimate(model: Path, tmp_path: Path) -> None:
    options = [str(model), "-o", str(tmp_path / "new/fast.onnx"), "--device", "cuda", "--dry-run"]
    ran = CliRunner().invoke(app, ["optimize", *options])
    assert ran.exit_code == 0, ran.output
    for text in ("3 nodes -> 1; nothing was compared or written", "1 linear+bias+relu", "takes about 0."):
        assert text in ran.output
    assert [each.name for each in tmp_path.iterdir()] == ["old.onnx"]


def test_a_node_is_explained(model: Path, tmp_path: Path) -> None:
    options = [str(model), "-o", str(tmp_path / "fast.onnx"), "--device", "cuda"]
    ran = CliRunner().invoke(app, ["optimize", *options, "--explain", "m"])
    assert ran.exit_code == 0 and ran.output.startswith("MatMul m:\n") and "  linear: matches" in ran.output
    missing = CliRunner().invoke(app, ["optimize", *options, "--explain", "mm"])
    assert missing.exit_code == 1 and "--explain mm: no node or value has this name" in missing.output
    assert [each.name for each in tmp_path.iterdir()] == ["old.onnx"]
