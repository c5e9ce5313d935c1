"""`twinop` and `python -m twinop.bench`: help without packages, errors as one message, pipes."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import warm_python
from models import make_model


def twinop(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    start = f"{code}\nimport sys; from twinop.cli import app; app(sys.argv[1:], prog_name='twinop')"
    env = os.environ | {"COLUMNS": "300"} | environment
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)


WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, *rest):
        if name in {missing}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Finder())
"""


def test_help_needs_neither_packages_nor_libraries() -> None:
    """The help works without torch and before the first build."""
    missing = ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "tritonclient", "matplotlib")
    code = WITHOUT.format(missing=missing)
    done = twinop("bench", "--help", code=code, TWINOP_LIBRARY_DIR="/nowhere")
    assert done.returncode == 0 and done.stderr == "" and "Usage: twinop" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "package", "install"),
    [
        (["bench"], "torch", "torch"),
        (["serve", "models"], "grpc", "'twinop[serve]'"),  # pip knows it by another name
    ],
)
def test_a_package_that_is_missing(tmp_path: Path, arguments: list[str], package: str, install: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "relu.onnx").write_bytes(b"")
    arguments = [str(tmp_path / each) if each == "models" else each for each in arguments]
    done = twinop(*arguments, code=WITHOUT.format(missing=(package,)))
    assert done.returncode == 1 and done.stdout == ""
    expected = f"error: this command needs the package {package}, which is not installed here: pip install"
    *said, error = done.stderr.splitlines()  # a report first prints how long it takes
    command = "./build.sh serve" if "serve" in install else "./build.sh"
    assert error.startswith(f"{expected} {install}. In a checkout {command} installs it")
    assert len(said) == (arguments[0] == "bench")


FOLDER = "a folder whose name is longer than the lines of a narrow terminal"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ops", "{library}"], ["{library} (domain", "relu(Tensor x) -> Tensor"]),
        (["new", "mish"], ["next: cd mish && twinop build && twinop test"]),
        (["doctor", "{model}", "{library}"], ["OK: model: {model}: ai.onnx"]),
        (["check", "{model}", "--library", "{library}"], ["relu version 1 can be served", "from {library}"]),
        (["run", "{model}.none"], ["error: {model}.none: no such file"]),
    ],
    ids=lambda value: value[0] if value[0].isalpha() else None,
)
def test_in_a_pipe(
    tmp_path: Path, libraries: dict[str, Path], arguments: list[str], words: list[str]
) -> None:
    model = tmp_path / FOLDER / "relu.onnx"
    model.parent.mkdir()
    onnx.save(make_model("CustomRelu"), model)
    names = {"model": model, "library": libraries["custom_relu"]}
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    done = warm_python.run(
        ["-m", "twinop", *(each.format(**names) for each in arguments)],
        cwd=tmp_path,
        env=env | {"COLUMNS": "40", "TERM": "xterm-256color"},
    )
    said = done.stdout + done.stderr
    assert done.returncode == int(any(each.startswith("error") for each in words)), said
    assert "\x1b" not in said and "\r" not in said
    for text in words:
        assert text.format(**names) in said
