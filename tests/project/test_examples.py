"""The projects in examples/ are built as a user builds them, outside this tree, and their own tests pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python
from record_driver import ROOT

from twinop import torch_op
from twinop.installation import version_numbers
from twinop.libraries.built import mark
from twinop.libraries.library import read_library

EXAMPLES = sorted(
    path.parent for path in (ROOT / "examples").glob("*/CMakeLists.txt") if path.parent.name != "numba"
)
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


def build(example: Path, folder: Path, *options: str) -> Path:
    """Builds a copy of the project. Returns the library."""
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("build", "__pycache__"))
    configure = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-G", "Ninja", *options]
    configure += [f"-Dtwinop_DIR={ROOT}/cmake"]
    for command in (configure, ["cmake", "--build", str(folder / "build")]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (library,) = (folder / "build").glob("lib*.so")
    assert mark(library).is_file()  # or no command would load it unasked
    return library


def run_tests(folder: Path, **more: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | more
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = warm_python.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."], cwd=folder, env=env)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]


@pytest.mark.slow
@each_example
@pytest.mark.timeout(600)
def test_an_example_on_the_cpu(example: Path, tmp_path: Path) -> None:
    folder = tmp_path / example.name
    library = read_library(build(example, folder, "-DTWINOP_WITH_CUDA=OFF"))
    assert f"lib{library.domain}.so" == library.path.name
    assert all(record.devices == ("cpu",) for record in library.records.values())
    run_tests(folder, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@each_example
@pytest.mark.timeout(900)
def test_an_example_with_cuda(example: Path, tmp_path: Path) -> None:
    """A project that names no language, flag or architecture of CUDA gets the kernels of both devices."""
    folder = tmp_path / example.name
    library = read_library(build(example, folder, "-DTWINOP_CUDA_ARCHS=90"))
    assert all(record.devices == ("cpu", "cuda") for record in library.records.values())
    assert library.cuda_archs == "90"
    run_tests(folder)


@pytest.mark.slow
def test_the_example_of_numba(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="./build.sh test --all installs it")
    options = "-DTWINOP_WITH_CUDA=OFF", f"-DPython3_EXECUTABLE={sys.executable}"
    path = build(ROOT / "examples/numba", tmp_path / "numba", *options)
    library = read_library(path)
    assert library.records["numba_square"].devices == ("cuda",) and library.cuda_archs == "80-real,90-real"
    if torch.cuda.is_available():
        x = torch.randn(3, 1000, device="cuda")
        assert torch.equal(torch_op.load(path).functions["numba_square"](x), x * x)


IN_TRITON = sorted((ROOT / "examples/triton").glob("*.py"))


@pytest.mark.slow  # up to four minutes each; tests/journeys has the same way for an op of its own
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", IN_TRITON, ids=lambda path: path.stem)
def test_it_is_built_and_passes_the_matrix(example: Path, tmp_path: Path) -> None:
    if example.stem == "helion_softmax":
        pytest.importorskip("helion", exc_type=ImportError)
        if version_numbers(torch.__version__) < (2, 13):
            pytest.skip("this Helion needs a later torch")
    shutil.copy(example, tmp_path)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TWINOP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": path}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST")}
    for command in ("build", "test"):
        done = warm_python.run(["-m", "twinop", command, example.name], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert ("no GPU here: no kernel of " in done.stderr) == (not torch.cuda.is_available())
    library = read_library(tmp_path / f"build/lib{example.stem}.so")
    assert {record.devices for record in library.by_onnx_name.values()} == {("cpu", "cuda")}
