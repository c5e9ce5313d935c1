"""`twinop tune`: what it measures, what builds make of it, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from ahead_kernels import gelu_kernel
from typer.testing import CliRunner, Result

from twinop.building.project import Project
from twinop.cli import app
from twinop.errors import BuildError
from twinop.triton.build import make_contents
from twinop.triton.tuning import Entry, Tuning, tuning_file

pytest.importorskip("triton", reason="kernels in Python need it")

FILE = """\
import torch
import triton
import triton.language as tl

import twinop

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 1024)]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def NAME_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, v * v, mask=offsets < n)


@twinop.triton_op("NAME(Tensor x) -> Tensor", body=torch.square, dtypes=("float32",))
def NAME(x):
    assert x.numel() <= 2**20, "too large"
    y = torch.empty_like(x)
    NAME_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y
"""


def op_file(folder: Path, name: str, text: str = FILE) -> Path:
    file = folder / f"{name}.py"
    file.write_text(text.replace("NAME", name))
    return file


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


SMALL, LARGE = (triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 1024))


def entry(
    n: int, config: Any, arch: int = 90, dtype: str = "torch.float32", kernel: str = "gelu_kernel"
) -> Entry:
    return Entry(kernel, arch, {"n": n}, [dtype, dtype], config.all_kwargs())


def test_a_build_chooses_what_was_measured(tmp_path: Path) -> None:
    """By size and by architecture; a GPU that was not measured takes the first configuration."""
    file = op_file(tmp_path, "tuned")
    measured = [entry(100, SMALL, kernel="tuned_kernel"), entry(10_000, LARGE, kernel="tuned_kernel")]
    Tuning(measured).write(tuning_file(file))
    contents, _ = make_contents(Project("tuned", "tuned", (), modules=(file,)), [80, 90], False)
    for n, arch, block in [(1000, 90, 64), (1001, 90, 1024), (2**20, 90, 1024), (2**20, 80, 64)]:
        plans = [plan for plan in contents.ops[0].plans if plan.ranks == (1,)]
        plan = next(plan for plan in plans if all(guard.evaluate([(n,)], (), arch) for guard in plan.guards))
        assert plan.steps[0].grid[0].evaluate([(n,)]) == -(-n // block)  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", ["0", "12,x", "-5"])
def test_sizes_that_are_none(sizes: str, tmp_path: Path) -> None:
    result = tune(op_file(tmp_path, "sizes"), f"--sizes={sizes}")
    assert result.exit_code == 1 and f"--sizes {sizes}: expected positive numbers" in result.stderr


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = tune(op_file(tmp_path, "without"))
    assert result.exit_code == 1 and "measures on an NVIDIA GPU, and torch finds none here" in result.stderr


@pytest.mark.cuda
def test_it_measures_on_this_gpu(tmp_path: Path) -> None:
    """Entries of other GPUs stay; a call that the launcher refuses is left out, with a note."""
    file = op_file(tmp_path, "measured")
    other = entry(64, SMALL, arch=1, kernel="measured_kernel")
    Tuning([other]).write(tuning_file(file))
    result = tune(file, "--sizes", "64,65536,2097152")
    assert result.exit_code == 0, result.output
    assert "measured, size 2097152: left out: AssertionError: too large" in result.stderr
    entries = json.loads(tuning_file(file).read_text())["entries"]
    assert [each["key"]["n"] for each in entries] == [64, 64, 65536] and entries[0]["arch"] == 1
    assert all(each["config"]["BLOCK"] in (64, 1024) for each in entries)
    assert "measured_kernel" in result.stdout and "3 entries" in result.stdout


class Tensor:
    dtype = "torch.float32"


def test_the_pruning_of_the_kernel_is_asked() -> None:
    prune = {"early_config_prune": lambda configs, *_, **__: configs[1:]}
    pruned = triton.autotune([SMALL, LARGE], key=["n"], prune_configs_by=prune)(gelu_kernel)
    pruned.nargs = {"x_ptr": Tensor(), "y_ptr": Tensor(), "n": 5}
    assert Tuning().choose(pruned, pruned.nargs, 90) is LARGE


@pytest.mark.parametrize("text", ["", "[]", '{"entries": [{"kernel": "x"}]}'])
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gelu.tune.json"
    file.write_text(text)
    with pytest.raises(BuildError, match=r"gelu.tune.json: it is not what `twinop tune` writes"):
        Tuning.read(file)


def test_measured_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = triton.autotune([SMALL, LARGE], key=["n"])(gelu_kernel)
    monkeypatch.setattr(type(tuned), "run", lambda autotuner, *args, **kwargs: None)
    tuning = Tuning([entry(64, SMALL), entry(5, SMALL)])
    tuned.best_config = LARGE
    with tuning.recording(90) as measured:
        tuned[(1,)](Tensor(), Tensor(), 64)
    assert tuning.entries == [entry(5, SMALL), entry(64, LARGE)]
    assert [each for each, _ in measured] == [entry(64, LARGE)]
