"""twinop doctor on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from build_files import program
from models import make_model

from twinop.deploy.doctor.checks import Finding


def doctor(
    *arguments: str | Path, cwd: Path, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{before}\nfrom twinop.cli import app\napp()"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_this_machine(libraries: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(make_model("CustomRelu").SerializeToString())
    result = doctor("model.onnx", libraries["custom_relu"], "--json", cwd=tmp_path)
    found = [Finding(**each) for each in json.loads(result.stdout)]
    assert Finding("OK", "CPUExecutionProvider", "runs a node") in found
    assert result.returncode == any(each.level == "error" for each in found)
    about_model = [each for each in found if each.subject == "model"]
    assert {each.level for each in about_model} == {"OK"}, about_model
    assert about_model[-1].cause == f"its nodes of custom_domain fit {libraries['custom_relu']}"


def test_named_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("text")
    (tmp_path / "libx.so").write_text("text")
    result = doctor("model.onnx", "libx.so", cwd=tmp_path)
    lines = [line for line in result.stdout.splitlines() if line.startswith("error")]
    assert result.returncode == 1
    assert any("model.onnx: not a complete ONNX model" in line for line in lines), lines
    assert any("libx.so: not a shared library" in line for line in lines), lines


def test_without_torch_and_onnxruntime(tmp_path: Path) -> None:
    before = "sys.modules['torch'] = sys.modules['onnxruntime'] = None"
    result = doctor(cwd=tmp_path, before=before, CUDA_VISIBLE_DEVICES="")
    assert "OK: torch: not installed" in result.stdout, result.stderr
    assert "warning: onnxruntime: not installed" in result.stdout
    assert "Traceback" not in result.stderr


def test_onnxruntime_that_crashes(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    result = doctor(cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert (
        "error: onnxruntime: it cannot be imported: the process ended with signal 11 | pip" in result.stdout
    )


def test_a_library_alone_on_a_terminal(libraries: dict[str, Path], tmp_path: Path) -> None:
    result = doctor(libraries["custom_relu"], cwd=tmp_path, FORCE_COLOR="1", COLUMNS="600")
    lines = [line for line in result.stdout.splitlines() if str(libraries["custom_relu"]) in line]
    assert any("│" in line and "domain custom_domain 1" in line for line in lines), result.stdout


def test_a_machine_with_a_new_gpu_and_an_old_toolkit(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Programs in place of nvidia-smi and nvcc."""
    program(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA GeForce RTX 5090, 12.0'")
    nvcc = program(
        tmp_path / "cuda" / "bin" / "nvcc",
        'case "$1" in',
        "--version) echo 'Cuda compilation tools, release 12.4, V12.4.131' ;;",
        "--list-gpu-arch) echo compute_80; echo compute_90 ;;",
        "esac",
    )
    (tmp_path / "cuda/lib64").mkdir()
    (tmp_path / "cuda/lib64/libcudart_static.a").touch()
    result = doctor(
        libraries["custom_relu"],
        cwd=tmp_path,
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        CUDACXX=str(nvcc),
        CXX="g++",
        TWINOP_CACHE=str(tmp_path / "cache"),
        TWINOP_LIBRARY_DIR=str(tmp_path),
    )
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if line.startswith("error")]
    assert any("unsupported gpu architecture 'compute_120' | install a newer CUDA" in line for line in errors)
    assert not (tmp_path / "cache").exists()
