"""The wheel: what is in it, that it works in clean environments without torch, that the sdist builds it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from twinop import __version__
from twinop.libraries.library import read_library

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {
    "libcustom_ops.so", "libcustom_relu.so", "libtwinop_torch.so", "libtwinop_ort.a",
    "exports.map", "twinop-build.cmake",
}  # fmt: skip
MODULES = {"TwinopCuda", "TwinopFlags", "TwinopOp", "TwinopTargets", "twinop-config", "twinop-config-version"}
SMALL = ["-Ccmake.define.TWINOP_WITH_CUDA=OFF", "-Ccmake.define.TWINOP_OPS=gelu"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def run(*command: str | Path, cwd: Path | None = None, path: str = "") -> str:
    inherited = ("HOME", "LANG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
    env = {name: os.environ[name] for name in inherited if name in os.environ}
    env |= {"PATH": f"{path}:{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build_wheel(source: Path, folder: Path, *options: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    run(*pip, "--wheel-dir", folder, *options, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel without what CMake installs, whose build/ the other tests use meanwhile."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"), "-Cwheel.cmake=false")


@pytest.fixture(scope="module")
def small_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel for the CPU with few ops, built from the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    build = "from scikit_build_core.build import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", build, folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return build_wheel(folder / f"twinop-{__version__}", folder / "dist", *SMALL)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_contents(wheel: Path, tmp_path: Path) -> None:
    """Everything that an installation needs, and nothing else."""
    if not (ROOT / "build/libcustom_ops.so").exists():
        pytest.skip("./build.sh has not run")
    run("cmake", "--install", ROOT / "build", "--prefix", tmp_path)
    installed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = contents(wheel) | installed
    assert not contents(wheel) & installed
    assert {name.partition("/")[0] for name in names} == {"twinop", f"twinop-{__version__}.dist-info"}
    inside = {name.removeprefix("twinop/") for name in names if name.startswith("twinop/")}
    assert {name for name in inside if name.startswith("lib/")} == {f"lib/{name}" for name in LIBRARIES}
    assert {name for name in inside if name.startswith("cmake/")} == {f"cmake/{n}.cmake" for n in MODULES}
    headers = {path.relative_to(ROOT) for path in ROOT.glob("kernels/**/*.*h")}
    assert {name for name in inside if name.startswith("include/")} == {
        f"include/twinop/{header.relative_to('kernels')}" for header in headers
    }
    folders = [
        ("", ROOT / "twinop"),
        *((f"{p.name}/", p) for p in (ROOT / "twinop").iterdir() if p.is_symlink()),
    ]
    code = {
        f"{prefix}{path.relative_to(folder)}" for prefix, folder in folders for path in folder.rglob("*.py")
    }
    assert {name for name in inside if name.endswith(".py")} == code
    others = {Path(name).suffix for name in inside if not name.startswith(("lib/", "cmake/", "include/"))}
    assert others <= {".py", ".j2", ".txt", ".h", ".toml", ".typed"}


def test_it_needs_neither_torch_nor_a_runtime(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"twinop-{__version__}.dist-info/METADATA").decode().splitlines()
    lines = [line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" not in line]
    needed = {line.split()[1] for line in lines if "python_version" not in line}
    assert {re.split("[<>]", name)[0] for name in needed} == {
        "numpy", "ml_dtypes", "onnx", "onnx-ir", "onnxscript", "rich", "typer",
    }  # fmt: skip
    extras = [line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" in line]
    assert not any("onnxruntime" in line or (" torch" in line and "triton" not in line) for line in extras)
    assert "Requires-Python: >=3.10" in metadata


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_source_archive_builds(small_wheel: Path) -> None:
    assert small_wheel.name.startswith(f"twinop-{__version__}-py3-none-linux_")
    assert {f"twinop/lib/{name}" for name in LIBRARIES} <= contents(small_wheel)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_cmake_project_of_its_own(small_wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site with ä"
    with zipfile.ZipFile(small_wheel) as archive:
        archive.extractall(installed)
    project = tmp_path / "cube"
    project.mkdir()
    shutil.copy(ROOT / "tests/ops/cube.h", project)
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(cube LANGUAGES CXX)\n"
        f"find_package(twinop {__version__[:3]} REQUIRED)\ntwinop_add_library(cube DOMAIN my.cube cube.h)\n"
    )
    options = [f"-Dtwinop_DIR={installed}/twinop/cmake", "-DTWINOP_WITH_CUDA=OFF"]
    run("cmake", "-S", project, "-B", project / "build", "-GNinja", *options)
    run("cmake", "--build", project / "build", "--target", "cube")
    library = read_library(project / "build/libcube.so")
    assert (library.domain, library.version) == ("my.cube", __version__)
    assert set(library.records) == {"cube", "cube_backward"}
    program = "import sys; from twinop import torch_op; import torch; cube = torch_op.load(sys.argv[1]); "
    program += "print(cube.cube(torch.full((3,), 2.0)).tolist())"
    assert run(sys.executable, "-c", program, library.path).strip() == "[8.0, 8.0, 8.0]"


def interpreter(version: str) -> Path:
    candidates = list(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if on_path := shutil.which(f"python{version}"):
        candidates.insert(0, Path(on_path))
    for candidate in candidates:
        said = subprocess.run([candidate, "-V"], capture_output=True, text=True).stdout
        if said.startswith(f"Python {version}."):
            return Path(candidate)
    pytest.skip(f"no Python {version} on this machine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "custom_relu.onnx"
    run(sys.executable, "-m", "twinop", "export", "--output", path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", PYTHONS)
def test_without_torch(version: str, small_wheel: Path, model: Path, tmp_path: Path) -> None:
    """The same wheel runs and checks models in an environment without torch and without a checkout."""
    folder = tmp_path / "an empty folder ä"
    folder.mkdir()
    run(interpreter(version), "-m", "venv", folder / "venv")
    binaries = folder / "venv/bin"
    quiet = "--quiet", "--disable-pip-version-check"
    pip: list[str | Path] = [binaries / "python", "-m", "pip", "install", *quiet]
    run(*pip, small_wheel, "onnxruntime")
    shutil.copy(model, folder)

    def twinop(*arguments: str) -> str:
        return run(binaries / "twinop", *arguments, cwd=folder, path=str(binaries))

    run(binaries / "python", "-c", "import twinop, sys; assert not {'torch', 'onnx'} & {*sys.modules}")
    assert "CustomGelu" in twinop("ops")
    assert "CustomRelu" in twinop("run", "custom_relu.onnx")  # with the library of the wheel
    said = twinop("optimize", "custom_relu.onnx", "-o", "fast.onnx")
    assert "same outputs" in said and "defect" not in said
    plain = "import onnxruntime as ort; ort.InferenceSession('custom_relu.onnx')"
    run(binaries / "python", "-c", plain, cwd=folder)  # without a library, through the function body
    refused = subprocess.run(
        [binaries / "twinop", "check", "custom_relu.onnx"], capture_output=True, text=True, cwd=folder
    )
    assert refused.returncode == 1 and "pip install 'twinop[serve]'" in " ".join(refused.stderr.split())
    run(*pip, f"twinop[serve] @ {small_wheel.as_uri()}")
    assert "custom_relu" in twinop("check", "custom_relu.onnx")
