"""examples/cpp: a program in C++ runs a model with a custom-op library."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from record_driver import ROOT, compiler

from twinop.library import find_library, read_library
from twinop.testing.one_node import one_node_model

EXAMPLE = ROOT / "examples/cpp"


def ort_headers() -> Path:
    """Returns the folder of ONNX Runtime's headers that the libraries were built with."""
    commands = json.loads((ROOT / "build/compile_commands.json").read_text())
    [line] = [each["command"] for each in commands if each["file"].endswith("ort_customop/register.cpp")]
    folders = map(Path, re.findall(r"-(?:isystem|I) ?(\S+)", line))
    return next(folder for folder in folders if (folder / "onnxruntime_cxx_api.h").is_file())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled as the README says."""
    folder = tmp_path_factory.mktemp("cpp")
    shutil.copy(EXAMPLE / "run_model.cpp", folder)
    (runtime,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (folder / "libonnxruntime.so.1").symlink_to(runtime)
    [line] = re.findall(r"^g\+\+ .+$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    env = os.environ | {
        "ORT_INCLUDE": str(ort_headers()),
        "ORT_LIBRARY": str(folder / "libonnxruntime.so.1"),
    }
    line = line.replace("g++", compiler(), 1) + " -Wall -Wextra -Werror"
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "run_model"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LD_LIBRARY_PATH": str(program.parent)}
    return subprocess.run([program, *map(str, arguments)], env=env, capture_output=True, text=True)


def test_it_runs_a_model(program: Path, tmp_path: Path) -> None:
    library = find_library("custom_relu")
    record = read_library(library).records["relu"]
    model = tmp_path / "model.onnx"
    onnx.save(one_node_model(record, {"x": "float32", "y": "float32"}, [True], {}), model)
    done = run(program, model, library)
    assert done.returncode == 0, done.stderr
    values = np.array(done.stdout.split(), np.float32)
    assert values.size and not values.any()  # relu(-1)


def test_mistakes_are_said(program: Path, tmp_path: Path) -> None:
    done = run(program, tmp_path / "none.onnx", tmp_path / "none.so")
    assert done.returncode == 1 and "none.so" in done.stderr
    assert run(program).stderr.startswith("usage: run_model")
