"""A second `twinop build` of a Python file: what is as it was stays, what changed is traced again."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_python
from record_driver import ROOT

pytest.importorskip("triton", reason="kernels in Python need it")

_OP = """
import pathlib, torch, triton, triton.language as tl, twinop
from factors import FACTOR
(file := pathlib.Path(__file__).with_name("gone.py")).touch()
import gone  # the build passes over a module without a file
file.unlink()

@triton.jit
def kernel(x, y, n, FACTOR: tl.constexpr):
    offsets = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(y + offsets, FACTOR * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)

@twinop.triton_op("again(Tensor x) -> Tensor", body=lambda op, x: op.Add(x, x), dtypes=("float32",))
def again(x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), FACTOR)
    return y
"""


def _build(folder: Path, *options: str, fresh: bool = False) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TWINOP_CACHE": str(folder / "cache"), "PYTHONPATH": path}
    command = ["-m", "twinop", "build", "again.py", *(options or ("--archs", "90"))]
    if fresh:  # with another seed of hashes
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    else:
        done = warm_python.run(command, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, a module that it imports, and its library."""
    folder = tmp_path_factory.mktemp("again")
    (folder / "again.py").write_text(_OP)
    (folder / "factors.py").write_text("FACTOR = 2\n")
    assert "3 steps" in _build(folder)
    return folder


def test_what_is_as_it_was_is_not_traced_again(folder: Path) -> None:
    library = folder / "build" / "libagain.so"
    before = library.stat().st_mtime_ns
    os.utime(folder / "again.py")
    assert "nothing to do" in _build(folder, fresh=True)
    assert library.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "factors.py").write_text("FACTOR = 3\n"),
        lambda folder: next((folder / "build/again.generated.cpp.files").glob("*.cubin")).unlink(),
    ],
    ids=["an imported module", "a compiled kernel"],
)
def test_what_changed_is_traced_again(folder: Path, change: Callable[[Path], object]) -> None:
    change(folder)
    assert "step" in _build(folder)
