"""docs/from-a-pytorch-extension.md is true: its files are written to a folder, built, and its program run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_driver import ROOT
from test_guides import COMMANDS, PROGRAM, STEP

from twinop.libraries.library import read_library

PAGE = (ROOT / "docs/from-a-pytorch-extension.md").read_text()
STEPS = {step["file"]: step["text"] for step in STEP.finditer(PAGE)}


def build_and_run(folder: Path, **variables: str) -> Path:
    """Does what the page says, and returns the library."""
    for name, text in STEPS.items():
        if not name.startswith("before/"):
            (folder / name).write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"TWINOP_SOURCE": str(ROOT), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"} | variables
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    commands = [line.split() for block in COMMANDS.findall(PAGE) for line in block.splitlines()]
    programs = [text for text in PROGRAM.findall(PAGE) if text not in STEPS.values()]
    for command in [*commands, *([sys.executable, "-c", program] for program in programs)]:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "build" / "libmy_relu.so"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_on_the_cpu(tmp_path: Path) -> None:
    records = read_library(build_and_run(tmp_path, CUDACXX="/nowhere/nvcc")).records
    assert {name: record.devices for name, record in records.items()} == {
        "relu": ("cpu",),
        "relu_backward": ("cpu",),
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.timeout(900)
def test_the_recipe_with_cuda(tmp_path: Path) -> None:
    records = read_library(build_and_run(tmp_path, TWINOP_CUDA_ARCHS="90")).records
    assert all(record.devices == ("cpu", "cuda") for record in records.values())
