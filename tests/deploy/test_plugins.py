"""Execution providers that are plugins: in sessions, in `twinop check` and in `twinop doctor`."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import ort_versions
import pytest

from twinop import deploy
from twinop.deploy import cuda, plugins
from twinop.deploy.doctor.checks import check_providers, check_runtime
from twinop.deploy.doctor.facts import Environment, Runtime
from twinop.deploy.errors import ProviderError
from twinop.errors import TwinopWarning
from twinop.libraries.library import find_library

ROOT = Path(__file__).resolve().parents[2]
CPU = "CPUExecutionProvider"
MODEL = """
<ir_version: 8, opset_import: ["": 17, "custom_domain": 1]>
net (float[n, 4] x) => (float[n, 4] y) <float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}> {
    a = MatMul (x, w)
    b = custom_domain.CustomRelu (a)
    c = Exp (b)
    d = Add (c, c)
    y = MatMul (d, w)
}
"""
X = np.array([[-1, 0, 1, 2]], np.float32)
Y = 2 * np.exp(np.maximum(X, 0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    return path


def test_a_plugin_is_opened_by_its_devices_and_names_its_nodes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU provider is listed as a plugin's devices are, so it stands in for one."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", list)
    opened = deploy.session(model, [CPU], find_library("custom_relu"))
    np.testing.assert_allclose(opened.run({"x": X})["y"], Y, rtol=1e-6)
    assert sorted(op for _, op in opened.taken[CPU]) == ["Add", "CustomRelu", "Exp", "MatMul", "MatMul"]
    assert "CPUExecutionProvider takes 5 nodes: Add x1, CustomRelu x1" in plugins.taken_text(opened.taken)
    with pytest.raises(ProviderError, match=r"CPUExecutionProvider: device_id is 7; expected 0 to 0"):
        deploy.session(model, [(CPU, {"device_id": 7})], find_library("custom_relu"))


def test_nothing_is_recorded_without_a_plugin(model: Path) -> None:
    assert deploy.session(model, [CPU], find_library("custom_relu")).taken == {}


def test_a_plugin_that_is_not_installed_or_does_not_load(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "installed", dict)
    with pytest.raises(
        ProviderError, match=r"SomeExecutionProvider is not in .* such as onnxruntime-ep-openvino"
    ):
        deploy.session(model, ["SomeExecutionProvider"])
    broken = SimpleNamespace(get_library_path=lambda: str(tmp_path / "libsome.so"))
    monkeypatch.setattr(plugins, "installed", lambda: {"SomeExecutionProvider": broken})
    with pytest.raises(ProviderError, match=r"does not load its plugin .*libsome\.so: "):
        deploy.session(model, ["SomeExecutionProvider"])


def test_a_broken_plugin_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(metadata={"Name": "onnxruntime-ep-broken"})
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [broken])
    with pytest.warns(TwinopWarning, match="onnxruntime-ep-broken cannot be used: No module"):
        assert plugins.installed.__wrapped__() == {}


def test_doctor_names_plugins() -> None:
    runtime = Runtime(
        "1.32.0",
        providers={cuda.CUDA: "", "OpenVINOExecutionProvider": "", CPU: ""},
        cuda_plugin="1.0",
    )
    facts = Environment(runtime=runtime)
    [found] = check_runtime(facts)
    assert "CUDAExecutionProvider (a plugin, 1.0), OpenVINOExecutionProvider, CPU" in found.cause
    assert {each.cause for each in check_providers(facts) if each.subject != cuda.CUDA} == {"runs a node"}


@pytest.mark.parametrize(
    "info, version", [(", fp8-kv-cache=1, cuda-plugin-ep=0.3.1, build type=Release", "0.3.1"), ("", "")]
)
def test_the_cuda_provider_may_be_a_plugin(info: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_build_info", lambda: f"ORT Build Info: git-branch=HEAD{info}")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    assert cuda.plugin_version() == version
    assert cuda.runtime_has_cuda() == bool(version)


SCRIPT = """
import sys
import numpy as np
from twinop import deploy
from twinop.deploy.errors import ProviderError
try:
    opened = deploy.session(sys.argv[1], ["OpenVINOExecutionProvider", "CPUExecutionProvider"], sys.argv[2])
except ProviderError as error:
    sys.exit(f"SKIP {error}")
print(opened.run({"x": np.array([[-1, 0, 1, 2]], np.float32)})["y"].tolist(), opened.taken)
"""


@pytest.mark.slow
def test_openvino_shares_a_model_with_a_custom_op(model: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{ort_versions.openvino()}:{ROOT}", "TWINOP_NO_COLOR": "1"}
    library = str(find_library("custom_relu"))

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=env, timeout=250
        )
        if "no device of this machine" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])  # OpenVINO takes Intel's devices only
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    said = run("-c", SCRIPT, str(model), library)
    values, taken = said.split("]] ", 1)
    numbers = np.array([float(each) for each in re.findall(r"[\d.]+", values)], np.float32)
    np.testing.assert_allclose(numbers, Y[0], rtol=3e-2)  # its default is bf16 where the CPU has it
    assert "'OpenVINOExecutionProvider': [" in taken and "'CPUExecutionProvider': [" in taken
    assert "CustomRelu" in taken.partition("'CPUExecutionProvider'")[2].partition("]")[0]
    settings = ("--library", library, "--provider", "OpenVINOExecutionProvider")
    checked = run("-m", "twinop", "check", str(model), *settings)
    assert (
        "OpenVINOExecutionProvider takes" in checked
        and "CPUExecutionProvider takes 1 nodes: CustomRelu" in checked
    )
