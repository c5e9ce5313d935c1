"""CUDA or not, and for which architectures: what cmake/TwinopCuda.cmake decides, configured on its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(TwinopCuda)
message(STATUS "result: cuda=${{TWINOP_CUDA}} archs=${{TWINOP_CUDA_ARCH_LIST}}")
"""


def configure(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TWINOP_CUDA")}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment)


def fake_nvcc(folder: Path, *archs: str) -> Path:
    path = folder / "nvcc"
    path.write_text("#!/bin/sh\n" + "".join(f"echo compute_{arch}\n" for arch in archs))
    path.chmod(0o755)
    return path


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_an_architecture_that_nvcc_does_not_know(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "75", "80", "90")
    result = configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={nvcc}", TWINOP_CUDA_ARCHS="120")
    assert result.returncode != 0
    assert (
        f"TWINOP_CUDA_ARCHS=120: this nvcc ({nvcc}) does not know architecture 120; it knows 75 80 90. "
        "Choose one of these, or install a newer CUDA toolkit and set CUDACXX to its nvcc."
    ) in one_line(result.stderr)


def test_nonsense_architectures(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "90")
    result = configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={nvcc}", TWINOP_CUDA_ARCHS="hopper")
    assert result.returncode != 0 and "does not know architecture hopper" in one_line(result.stderr)


def test_without_nvcc_the_cpu_part_is_built_and_said(tmp_path: Path) -> None:
    tools = tmp_path / "tools"  # a PATH with a compiler and cmake, but no nvcc
    tools.mkdir()
    for name in [
        "cmake",
        "c++",
        "g++",
        "cc",
        "gcc",
        "as",
        "ld",
        "ar",
        "ranlib",
        "ninja",
        "make",
        "sh",
        "uname",
    ]:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    result = configure(tmp_path, PATH=str(tools), CUDACXX="", CUDA_PATH="/nowhere")
    if "result: cuda=ON" in result.stdout:
        pytest.skip("CMake finds nvcc outside PATH on this machine")
    assert "no nvcc found (PATH, CUDACXX): building the CPU part only" in result.stdout, result.stderr
    assert "result: cuda=OFF archs=none" in result.stdout


def test_cuda_can_be_left_out(tmp_path: Path) -> None:
    assert "result: cuda=OFF archs=none" in configure(tmp_path, "-DTWINOP_WITH_CUDA=OFF").stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    ("wanted", "archs"),
    [("native", None), ("80,90", "80,90"), ("90-real", "90-real"), ("all", "75-real,")],
)
def test_architectures_with_the_nvcc_at_hand(wanted: str, archs: str | None, tmp_path: Path) -> None:
    result = configure(tmp_path, TWINOP_CUDA_ARCHS=wanted)
    line = next(line for line in result.stdout.splitlines() if "result: cuda=ON" in line)
    if archs is None:
        no_gpu = shutil.which("nvidia-smi") is None
        assert not no_gpu or line.endswith("archs=90")
    else:
        assert f"archs={archs}" in line
    if wanted == "all":  # every architecture's code, and PTX of the newest for GPUs to come
        listed = line.split("archs=")[1].split(",")
        assert len(listed) >= 4 and listed[-1].endswith("-virtual") and listed[-2].endswith("-real")
        assert listed[-1].split("-")[0] == listed[-2].split("-")[0]
