"""One .so file on every supported onnxruntime release, each in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import onnx
import pytest
from linear_calls import linear_node, model_of, random
from ort_cases import all_cases
from ort_versions import SUPPORTED, TOO_OLD, environment
from slow_cases import often

from twinop.libraries.library import find_library
from twinop.model.attach import attach_bodies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    cases = all_cases()
    names = [case["name"] for case in cases.cases]
    assert len(names) == len(set(names)) > 100
    cases.write(folder)
    return folder


@pytest.mark.parametrize("version", often(SUPPORTED, SUPPORTED[0], SUPPORTED[-1]))
def test_every_case(version: str, folder: Path) -> None:
    script = Path(__file__).with_name("ort_matrix.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment(version), script, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    first, *lines = map(json.loads, done.stdout.splitlines())
    assert first == {"onnxruntime": version}
    assert done.returncode == 0, f"ended with {done.returncode} in {lines[-1]}: {done.stderr[-2000:]}"
    results = {line["case"]: line["wrong"] for line in lines if "wrong" in line}
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    assert list(results) == [case["name"] for case in cases]
    wrong = [f"{name}: {text}" for name, text in results.items() if text is not None]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(results)} cases:", *wrong])


REFUSAL = """
import sys
import onnxruntime
options = onnxruntime.SessionOptions()
try:
    options.register_custom_ops_library(sys.argv[1])
except Exception as error:
    print(onnxruntime.__version__, error)
"""


@pytest.mark.parametrize("stem", ["custom_relu", "custom_ops"])
def test_an_older_onnxruntime_is_refused(stem: str) -> None:
    command = [str(environment(TOO_OLD)), "-c", REFUSAL, str(find_library(stem))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(TOO_OLD)
    assert f"needs ONNX Runtime 1.18 or newer; this is {TOO_OLD}. Upgrade with: pip install" in done.stdout


OPSETS = {"1.31.1": (24, 25, 26), "1.32.0": (24, 25, 27, 28)}
RUN = """
import sys
import numpy as np
import onnxruntime
for path in sys.argv[2:]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(sys.argv[1])
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    print(session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist())
"""


@pytest.mark.parametrize("version", [pytest.param("1.31.1", marks=pytest.mark.slow), pytest.param("1.32.0")])
def test_the_newest_opsets(version: str, tmp_path: Path) -> None:
    """A custom node in files of each opset that a release has, up to the newest one."""
    paths = []
    for opset in OPSETS[version]:
        model = onnx.parser.parse_model(
            f"""<ir_version: 11, opset_import: ["": {opset}, "custom_domain": 1]>
            net (float[n] x) => (float[n] y) {{ a = custom_domain.CustomRelu (x) y = Add (a, a) }}"""
        )
        paths.append(tmp_path / f"net{opset}.onnx")
        onnx.save(model, paths[-1])
    command = [str(environment(version)), "-c", RUN, str(find_library("custom_relu")), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.0, 4.0]"] * len(paths)


BODIES = """
import sys
import onnxruntime
try:
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    print("runs")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("with_residual", [False, True])
def test_overloads_are_read_or_refused(with_residual: bool, tmp_path: Path) -> None:
    """Before 1.27, ONNX Runtime takes one overload for all nodes: it has to refuse, whichever comes first."""
    inputs = [["x", "w"], ["a", "w"]]
    inputs[not with_residual] += ["", "x"]
    nodes = [linear_node(inputs[0], "a"), linear_node(inputs[1], "y")]
    onnx.save(attach_bodies(model_of(nodes, ["n", 4], {"w": random(4, 4)})), tmp_path / "model.onnx")
    for version, said in ((SUPPORTED[0], "INVALID_GRAPH"), (SUPPORTED[-1], "runs")):
        command = [str(environment(version)), "-c", BODIES, str(tmp_path / "model.onnx")]
        assert said in subprocess.run(command, capture_output=True, text=True).stdout, version
