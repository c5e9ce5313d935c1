"""What twinop doctor says of broken set-ups, and of this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from build_files import twinop
from models import make_model

from twinop.building.toolchain import Gpu, Nvcc
from twinop.deploy import diagnosis
from twinop.errors import BuildError

H200 = Gpu("NVIDIA H200", 90)
NVCC = Nvcc("/usr/local/cuda/bin/nvcc", "13.0.88", ("75", "80", "86", "89", "90", "100", "120"))


def refused(message: str) -> Any:
    def find() -> None:
        raise BuildError(message)

    return find


# set-up: (what stands in for the doctor's own functions, level, words)
BROKEN: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the driver does not answer": (
        {"find_gpus": lambda: ((), "NVIDIA-SMI has failed because\nit couldn't communicate")},
        "error",
        ["nvidia-smi fails: NVIDIA-SMI has failed because it couldn't communicate", "--gpus all"],
    ),
    "no compiler": ({"find_compiler": refused("no C++ compiler")}, "warning", ["no C++ compiler"]),
    "no nvcc": ({"find_nvcc": lambda: None}, "warning", ["no nvcc found", "Install the CUDA toolkit"]),
    "CUDACXX is wrong": ({"find_nvcc": refused("CUDACXX=/x: no such program")}, "error", ["CUDACXX=/x: no"]),
    "torch is too old": ({"torch": ("2.9.1+cu128", "12.8")}, "error", ["torch 2.9.1+cu128 is too old", "-U"]),
    "torch without CUDA beside a GPU": (
        {"torch": ("2.13.0+cpu", "")},
        "warning",
        ["torch 2.13.0+cpu is a build for the CPU", "pip uninstall -y torch && pip install torch"],
    ),
}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(diagnosis, "find_gpus", lambda: ((H200,), ""))
    monkeypatch.setattr(diagnosis, "find_nvcc", lambda: NVCC)
    monkeypatch.setattr(diagnosis, "find_compiler", lambda: "c++ is GCC 13.2")
    monkeypatch.setattr(diagnosis, "_runtime", lambda *_: ())
    monkeypatch.setattr(diagnosis, "library_folders", list)
    install(monkeypatch, tmp_path, ("2.11.0+cu130", "13.0"))
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, torch: tuple[str, str]) -> None:
    """Puts a torch without code where it is searched."""
    package = folder / "site/torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '{}'\ncuda: str = '{}'\n".format(*torch))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_a_healthy_set_up(healthy: Path) -> None:
    assert {each.level for each in diagnosis.examine(None, None)} == {"OK"}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_set_up(case: str, healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, level, words = BROKEN[case]
    for name, change in changes.items():
        if name == "torch":
            install(monkeypatch, healthy, change)
        else:
            monkeypatch.setattr(diagnosis, name, change)
    [found] = [each for each in diagnosis.examine(None, None) if each.level != "OK"]
    assert found.level == level and all(each in found.text for each in words), found
    assert "\n" not in found.text


def test_this_machine(libraries: dict[str, Path], tmp_path: Path) -> None:
    """In a folder with a copy of a library that was not whole."""
    (tmp_path / "model.onnx").write_bytes(make_model("CustomRelu").SerializeToString())
    result = twinop("doctor", "model.onnx", libraries["custom_relu"], "--json", cwd=tmp_path)
    found = [diagnosis.Finding(**each) for each in json.loads(result.stdout)]
    assert diagnosis.Finding("OK", "CPUExecutionProvider", "runs a node") in found
    assert result.returncode == any(each.level == "error" for each in found)
    about_model = [each for each in found if each.subject == "model"]
    assert {each.level for each in about_model} == {"OK"}, about_model
    assert about_model[-2].text == f"its nodes of custom_domain fit {libraries['custom_relu']}"
    assert about_model[-1].text == "ONNX Runtime opens it on cpu"


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (
            '(float[N, 4] x, float[4] w) => (float[N, 4] y) { y = LayerNormalization (x, w, "") }',
            "error",
            "crashes on this",
        ),
        ("(bfloat16[N, 4] x) => (bfloat16[N, 4] y) { y = Conv (x, x) }", "error", "ONNX Runtime refuses it"),
        (
            "(float16[N, M, 4] x, float16[4, 4] w) => (float16[M, N, 4] y) "
            "{ t = Transpose <perm = [1, 0, 2]> (x) y = MatMul (t, w) }",
            "OK",
            "opens it on cpu",
        ),
        (
            "(int32[N, M, 4] x, float[4, 4] w) => (float[M, N, 4] y) { t = Transpose <perm = [1, 0, 2]> (x) "
            'y = l.f (t, w) } <domain: "l", opset_import: ["": 17]> f (a, b) => (z) '
            "{ c = CastLike (a, b) z = MatMul (c, b) }",
            "OK",
            "opens it on cpu",
        ),
    ],
)
def test_a_model_that_onnxruntime_refuses(text: str, level: str, words: str, tmp_path: Path) -> None:
    """Or crashes on, or would, with its own optimizations."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "l": 1]> g {text}'), path)
    [*_, found] = diagnosis._model(path, None, False)
    assert found.level == level and words in found.text, found


def test_a_model_that_does_not_fit(libraries: dict[str, Path], tmp_path: Path) -> None:
    model, library = tmp_path / "model.onnx", libraries["custom_relu"]
    for op, words in (("CustomGelu", "did you mean"), ("CustomMisch", "has no such op")):
        model.write_bytes(make_model(op).SerializeToString())
        [found] = [each for each in diagnosis._model(model, library, False) if each.level != "OK"]
        assert found.level == "error" and (words in found.text or "no library has" in found.text), found


def test_named_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("text")
    (tmp_path / "libx.so").write_text("text")
    result = twinop("doctor", "model.onnx", "libx.so", cwd=tmp_path)
    lines = [line for line in result.stdout.splitlines() if line.startswith("error")]
    assert result.returncode == 1
    assert any("model.onnx: not a complete ONNX model" in line for line in lines), lines
    assert any("libx.so: not a shared library" in line for line in lines), lines


def test_without_torch_and_onnxruntime(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("torch", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    found = {(each.level, each.subject, each.text[:13]) for each in diagnosis.examine(None, None)}
    assert {("OK", "torch", "not installed"), ("warning", "onnxruntime", "not installed")} <= found


def test_onnxruntime_that_crashes(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    result = twinop("doctor", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "error: onnxruntime: it cannot be imported: ONNX Runtime crashes" in result.stdout
    assert "(SIGSEGV)" in result.stdout
