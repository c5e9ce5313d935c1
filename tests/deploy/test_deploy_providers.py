"""Which provider a session gets, and what is said when CUDA cannot be used; the probes are faked."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from models import make_model

from twinop.deploy import ProviderError, cuda, session
from twinop.libraries.library import Library, read_library

MODEL = make_model("CustomRelu")
X = np.array([[-1, 2, -3, 4]], np.float32)
Machine = Callable[..., None]
WORKING: dict[str, Any] = {  # what the probes in cuda.py answer
    "driver_version": 13010,
    "device_count": (1, ""),
    "runtime_has_cuda": True,
    "missing_libraries": [],
    "compute_capability": 90,
    "import_torch": None,
    "preload": None,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends to be a machine: by default one where CUDA works, with ONNX Runtime built for CUDA 13.0."""

    def pretend(archs: str = "90", **facts: Any) -> None:
        if facts.get("driver_version", 1) is None:
            facts["device_count"] = (0, "")
        for name, answer in (WORKING | facts).items():
            monkeypatch.setattr(cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(onnxruntime, "cuda_version", "13.0", raising=False)

        def with_archs(path: Any, copy: Any) -> Library:
            library = read_library(path, copy)
            return Library(path, library.version, archs, "13.0", library.records, library.exports_ort)

        monkeypatch.setattr("twinop.deploy.registration.read_library", with_archs)

    return pretend


NO_CUDA: dict[str, Any] = {"runtime_has_cuda": False}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no driver": ({"driver_version": None}, ["no NVIDIA driver: libcuda.so.1 cannot be loaded. "]),
    "no GPU": ({"device_count": (0, "")}, ["no NVIDIA GPU"]),
    "driver too old": ({"driver_version": 12040}, ["the NVIDIA driver is too old: it serves CUDA 12.4, "]),
    "driver broken": (
        {"device_count": (0, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")},
        ["the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH. Check with nvidia-smi"],
    ),
    "CPU wheel": (NO_CUDA, ["pip uninstall onnxruntime onnxruntime-gpu, then pip install"]),
    "missing libraries": (
        {"missing_libraries": ["libcublasLt.so.13", "libcurand.so.10"]},
        [
            "ONNX Runtime's CUDA provider lacks libcublasLt.so.13, libcurand.so.10. pip install "
            f"'onnxruntime-gpu[cuda,cudnn]=={onnxruntime.__version__}'"
        ],
    ),
    "library without CUDA": ({"archs": "none"}, ["libcustom_relu.so was built without CUDA: its nodes"]),
    "library for another GPU": (
        {"archs": "100"},
        ["has GPU code for 100, and device 0 has compute capability 90. Build it with TWINOP_CUDA_ARCHS=90"],
    ),
    "everything": (
        NO_CUDA | {"driver_version": None, "archs": "none"},
        ["no NVIDIA driver", "has no CUDA provider", "was built without CUDA"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cuda_that_cannot_be_used(case: str, machine: Machine) -> None:
    """Asked for, it is an error; otherwise the CPU is taken, which is said."""
    facts, messages = CASES[case]
    machine(**facts)
    with pytest.raises(ProviderError) as error:
        session(MODEL, providers=["CUDAExecutionProvider"])
    assert "cannot be used here (the CPU was not used instead)" in str(error.value)
    for message in messages:
        assert message in str(error.value)
    assert str(error.value).count("\n  - ") == len(messages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = session(MODEL)
    assert opened.device == "cpu" and messages[0] in opened.reason
    np.testing.assert_array_equal(opened.run({"x": X})["y"], np.maximum(X, 0))
    said = [str(each.message) for each in caught if "the CPU is used, not the GPU" in str(each.message)]
    assert len(said) == (cuda.device_count()[0] > 0), "a warning exactly where a GPU stays unused"


def test_cuda_that_onnx_runtime_drops_silently_is_an_error(machine: Machine) -> None:
    """This wheel has no CUDA: ONNX Runtime warns, runs on the CPU and says nothing more."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    machine()
    for providers in (["CUDAExecutionProvider"], [("CUDAExecutionProvider", {"device_id": 0})]):
        with pytest.raises(ProviderError) as error, pytest.warns(UserWarning):
            session(MODEL, providers=providers)
        assert "could not start it" in str(error.value)
        assert "would use CPUExecutionProvider instead. Nothing was run" in str(error.value)
    with pytest.warns(RuntimeWarning, match="the CPU is used, not the GPU: ONNX Runtime could not start"):
        opened = session(MODEL)
    assert opened.device == "cpu" and opened.stream is None and "could not start CUDA" in opened.reason


def test_device_numbers(machine: Machine) -> None:
    machine(device_count=(2, ""))
    with pytest.raises(ProviderError, match="no CUDA device 5: this process sees 2, numbered from 0"):
        session(MODEL, providers=[("CUDAExecutionProvider", {"device_id": "5"})])


def test_hidden_gpus_are_mentioned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(device_count=(0, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ProviderError, match=r"no NVIDIA GPU \(CUDA_VISIBLE_DEVICES is '-1'\)"):
        session(MODEL, providers=["CUDAExecutionProvider"])


@pytest.mark.parametrize(
    "archs, capability, served",
    [
        ("90", 90, True),
        ("90", 100, True),  # a plain number has PTX too
        ("90", 89, False),
        ("80-real", 86, True),
        ("80-real", 90, False),
        ("75-virtual", 90, True),
        ("75-real;80-real;90-real;90-virtual", 120, True),
        ("90a", 90, True),
        ("90a", 100, False),
        ("100f", 103, True),
        ("80:90", 90, True),
        ("80:90", 100, False),
    ],
)
def test_which_gpu_a_library_has_code_for(archs: str, capability: int, served: bool) -> None:
    assert cuda.has_code_for(archs, capability) == served


def test_cuda_graphs_need_cuda(machine: Machine) -> None:
    machine(driver_version=None)
    with pytest.raises(ProviderError, match="enable_cuda_graph needs CUDA, .*: no NVIDIA driver"):
        session(MODEL, enable_cuda_graph=True)


def test_other_providers() -> None:
    opened = session(MODEL, providers=["CPUExecutionProvider"])
    assert opened.reason == "asked for" and opened.providers == ["CPUExecutionProvider"]
    with pytest.raises(ProviderError, match="NoSuchProvider is not in this ONNX Runtime; it has: .*CPU"):
        session(MODEL, providers=["NoSuchProvider"])


def test_onnx_runtime_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    with pytest.raises(ProviderError, match="onnxruntime 1.19.2 is too old: .* needs 1.20 or newer"):
        session(MODEL)


def test_onnx_runtime_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for providers in (None, ["CPUExecutionProvider"]):
        with pytest.raises(ProviderError, match="ONNX Runtime cannot be imported.*pip install onnxruntime"):
            session(MODEL, providers=providers)


@pytest.mark.parametrize("info, has_cuda", [(", cuda-plugin-ep=0.3.1, build", True), ("", False)])
def test_the_provider_may_be_a_plugin(info: str, has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_build_info", lambda: f"ORT Build Info: git-branch=HEAD{info}")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert cuda.runtime_has_cuda() == has_cuda


def test_missing_libraries_are_found_by_name(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for libonnxruntime_providers_cuda.so, which needs a library that is nowhere."""
    provider = tmp_path / "capi" / "libonnxruntime_providers_cuda.so"
    provider.parent.mkdir()
    data = libraries["custom_relu"].read_bytes()
    assert b"libstdc++.so.6\0" in data
    provider.write_bytes(data.replace(b"libstdc++.so.6\0", b"libcublas.so.9\0"))
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    assert cuda.missing_libraries() == ["libcublas.so.9"]
    provider.unlink()
    assert cuda.missing_libraries() == []


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_without_torch(tmp_path: Path) -> None:
    """Installed, it is not imported for work on the CPU."""
    (tmp_path / "model.onnx").write_bytes(MODEL.SerializeToString())
    work = """
import numpy as np
from twinop import deploy
opened = deploy.session("model.onnx", providers=["CPUExecutionProvider"], profile=True)
assert opened.run({"x": np.full((2, 4), -1, np.float32)})["y"].sum() == 0
assert [run.provider for run in opened.executed_on()] == ["CPUExecutionProvider"]
"""
    free = python(work + "import sys\nassert 'torch' not in sys.modules", tmp_path)
    assert free.returncode == 0, free.stderr


def test_importing_the_folder_is_refused() -> None:
    root = Path(__file__).parents[2]
    result = python(f"import sys\nsys.path.insert(0, {str(root)!r})\nfrom deploy import session", root)
    assert result.returncode == 1
    assert "ImportError: import twinop.deploy, not deploy: put the repository root" in result.stderr
