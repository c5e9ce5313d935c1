"""cmake/TwinopCuda.cmake on its own: whether CUDA is built, and for which architectures."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_files import program
from ort_versions import CMAKE, environment

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(TwinopCuda)
message(STATUS "result: cuda=${{TWINOP_CUDA}} archs=${{TWINOP_CUDA_ARCH_LIST}}")
"""


def configure(
    folder: Path, *options: str, more: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT) + more)
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-G", "Ninja", *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TWINOP_CUDA")}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | variables)


def configure_twinop(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configures this tree with the CMake of the version that CMakeLists.txt requires."""
    cmake = environment(CMAKE).with_name("cmake")
    version = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    required = re.search(r"cmake_minimum_required\(VERSION (.*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert required is not None and f"cmake version {required[1]}." in version
    command: list[str | Path] = [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("DOMAIN ai.onnx", "this domain belongs to ONNX, ONNX Runtime or PyTorch; choose another one"),
        ("DOMAIN 9lives", "expected a domain such as mish or my.ops: letters, digits and _, with dots"),
    ],
)
def test_domains_that_no_library_can_have(arguments: str, message: str, tmp_path: Path) -> None:
    call = f"include(TwinopOp)\ntwinop_add_library(mish {arguments} mish.h)\n"
    result = configure(tmp_path, "-DTWINOP_WITH_CUDA=OFF", more=call)
    assert result.returncode != 0 and message in one_line(result.stderr)


def fake_nvcc(folder: Path, *archs: str, version: str = "12.4.99") -> Path:
    words = (f"V{version}", *(f"compute_{arch}" for arch in archs))
    return program(folder / "nvcc", *(f"echo {word}" for word in words))


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_an_architecture_that_nvcc_does_not_know(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "75", "80", "90")
    result = configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={nvcc}", TWINOP_CUDA_ARCHS="120")
    assert result.returncode != 0
    assert (
        f"TWINOP_CUDA_ARCHS=120: this nvcc ({nvcc}) does not know architecture 120; it knows 80 90. "
        "Choose one of these, or install a newer CUDA toolkit and set CUDACXX to its nvcc."
    ) in one_line(result.stderr)


@pytest.mark.parametrize(
    ("wanted", "gpus", "refused"),
    [
        ("75", (), "75"),
        ("75:90", (), "75"),
        ("native", ("7.5",), "75"),
        ("native", ("7.5", "8.6"), None),
    ],
)
def test_a_gpu_too_old(wanted: str, gpus: tuple[str, ...], refused: str | None, tmp_path: Path) -> None:
    """One that is new enough stands beside an old one: the kernels are built for it."""
    nvcc = fake_nvcc(tmp_path, "75", "80", "86", "90", "103")
    smi = program(tmp_path / "nvidia-smi", *(f"echo {gpu}" for gpu in gpus))
    options = (f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DTWINOP_NVIDIA_SMI={smi}")
    said = one_line(configure(tmp_path, *options, TWINOP_CUDA_ARCHS=wanted).stderr)
    message = (
        f"TWINOP_CUDA_ARCHS={wanted}: compute capability {refused} is too old; twinop's CUDA kernels need 80 "
        "(8.0) or later. Build for the CPU (./build.sh build --cpu, twinop build --cpu, "
        "-DTWINOP_WITH_CUDA=OFF), or for another GPU."
    )
    assert (message in said) == (refused is not None) and ("too old" in said) == (refused is not None)
    assert "does not know" not in said


@pytest.mark.parametrize(("version", "refused"), [("11.8.89", True), ("12.3.107", True), ("12.4.99", False)])
def test_an_nvcc_that_is_too_old(version: str, refused: bool, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "90", version=version)
    said = one_line(configure(tmp_path, f"-DCMAKE_CUDA_COMPILER={nvcc}", TWINOP_CUDA_ARCHS="90").stderr)
    message = f"{nvcc} is of CUDA {version}; twinop's kernels need CUDA 12.4 or later. Install a newer CUDA"
    assert (message in said) == refused


def test_without_torch(tmp_path: Path) -> None:
    """pip builds in an isolated environment, where torch is missing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = f"-DPython_EXECUTABLE={tmp_path}/bare/bin/python"
    result = configure_twinop(tmp_path / "build", "-DTWINOP_WITH_CUDA=OFF", python)
    said = one_line(result.stderr)
    assert result.returncode != 0 and f"PyTorch is not installed for {tmp_path}/bare/bin/python" in said
    assert "`pip install torch scikit-build-core ninja`, then `pip install --no-build-isolation .`" in said


@pytest.mark.skipif(Path("/usr/local/cuda/bin/nvcc").exists(), reason="nvcc is where it is found")
def test_without_nvcc_the_cpu_part_is_built_and_said(tmp_path: Path) -> None:
    tools = tmp_path / "tools"  # a PATH with cmake and without nvcc
    tools.mkdir()
    for name in ("cmake", "ninja"):
        (tools / name).symlink_to(str(shutil.which(name)))
    result = configure(tmp_path, PATH=str(tools), CUDACXX="", CUDA_HOME="/nowhere", CUDA_PATH="/nowhere")
    assert "no nvcc found (PATH, CUDACXX): building the CPU part only" in result.stdout, result.stderr
    assert "result: cuda=OFF archs=none" in result.stdout


def test_cuda_that_is_left_out_is_not_called_missing(tmp_path: Path) -> None:
    result = configure(tmp_path, "-DTWINOP_WITH_CUDA=OFF")
    assert "CUDA: TWINOP_WITH_CUDA is off: building the CPU part only" in result.stdout, result.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to configure in repeatedly: CMake examines nvcc only the first time."""
    return tmp_path_factory.mktemp("project")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    ("wanted", "archs", "codes"),
    [
        ("90,80", "80-real,90", ["sm_80", "sm_90a", "compute_90"]),
        ("80:90", "80:90", ["sm_90"]),
        ("native", None, None),
        ("all", None, None),
    ],
)
def test_architectures(wanted: str, archs: str | None, codes: list[str] | None, project: Path) -> None:
    """`linear` has sm_90a's instead of sm_90's code, and PTX for newer GPUs.

    Kernels and choices of 8.0 may come in machine code of 9.0; the library says both, and has no other code.
    """
    options = ("-DTWINOP_OPS=linear", f"-DPython_EXECUTABLE={sys.executable}")
    configured = configure_twinop(project, f"-DTWINOP_CUDA_ARCHS={wanted}", *options)
    assert configured.returncode == 0, configured.stderr
    [said] = re.findall(r"CUDA: nvcc .*, architectures (.*)", configured.stdout)
    if wanted == "native":
        assert shutil.which("nvidia-smi") or said == "90-real"
    if wanted == "all":  # every architecture's code, and PTX of the newest for GPUs to come
        *others, last, newest = said.split(",")
        assert others[0] == "80-real" and len(others) >= 2
        assert (last, newest) == (newest.replace("-virtual", "-real"), f"{last.split('-')[0]}-virtual")
    if codes is None:
        return
    commands = json.loads((project / "compile_commands.json").read_text())
    (command,) = (each["command"] for each in commands if each["file"].endswith("linear.0.cu"))
    assert said == archs and re.findall(r",code=\[?(\w+)", command) == codes
    assert ("-DTWINOP_SM90A" in command) == ("sm_90a" in codes)
    assert (f'-DTWINOP_CUDA_ARCHS=\\"{archs}\\"') in command
    assert ("arch=compute_80,code=sm_90" in command) == (wanted == "80:90")
