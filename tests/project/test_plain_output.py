"""In a pipe, commands print whole words and paths, without escape codes and spinners."""

import os
from pathlib import Path

import onnx
import pytest
import warm_python
from models import make_model

FOLDER = "a folder whose name is longer than the lines of a narrow terminal"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["Usage: twinop"]),
        (["ops", "{library}"], ["{library} (domain", "relu(Tensor x) -> Tensor"]),
        (["new", "mish"], ["next: cd mish && twinop build && twinop test"]),
        (["doctor", "{model}", "{library}"], ["OK: model: {model}: ai.onnx"]),
        (["check", "{model}", "--library", "{library}"], ["relu version 1 can be served", "from {library}"]),
        (["run", "{model}.none"], ["error: {model}.none: no such file"]),
        pytest.param(
            ["run", "{model}", "--library", "{library}"],
            ["{model}: registered {library}", "CustomRelu"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["bench", "--ops", "relu", "--compare", "{model}"],
            ["error: {model}: not a file of measurements"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[0] if value[0].isalpha() else None,
)
def test_output_in_a_pipe(
    tmp_path: Path, libraries: dict[str, Path], arguments: list[str], expected: list[str]
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
    assert done.returncode == int(any(each.startswith("error") for each in expected)), said
    assert "\x1b" not in said and "\r" not in said
    for text in expected:
        assert text.format(**names) in said
