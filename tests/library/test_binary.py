"""The built libraries have the right exports, dependencies and sizes. Several work in one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elf import Elf

from twinop.libraries.library import find_library, read_library
from twinop.testing.one_node import make_session, one_node_model

LIBRARIES = ("custom_relu", "custom_ops", "test_ops", "test_abi")
PLATFORM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"}
PLATFORM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1"}


def elf(stem: str) -> Elf:
    return Elf(find_library(stem))


@pytest.mark.parametrize("stem", LIBRARIES)
def test_libraries_stand_alone(stem: str) -> None:
    """Libraries export one function for each runtime. They need no runtime and no CUDA runtime."""
    assert elf(stem).exports == {"RegisterCustomOps", "twinop_library"}
    assert elf(stem).needed <= PLATFORM


def test_the_torch_adapter_needs_torch_only_and_has_no_kernel() -> None:
    adapter = elf("twinop_torch")
    assert adapter.exports == {"twinop_torch_register"}
    assert adapter.needed - PLATFORM == {"libtorch.so", "libtorch_cpu.so"}
    assert adapter.section(".nv_fatbin") == b""
    assert find_library("twinop_torch").stat().st_size < 2**20


@pytest.mark.parametrize("stem", (*LIBRARIES, "twinop_torch"))
def test_no_symbol_is_unique_in_the_process(stem: str) -> None:
    """A GNU-unique symbol would be shared by two libraries of one process, whatever their visibility."""
    symbols = elf(stem).dynamic_symbols + elf(stem).symbols
    assert {symbol["st_info"]["bind"] for symbol in symbols} <= {"STB_LOCAL", "STB_GLOBAL", "STB_WEAK"}


def test_two_ort_libraries_in_one_process() -> None:
    """Each session runs the kernels of its own library; a third one holds other ops."""
    record = read_library(find_library("custom_relu")).records["relu"]
    model = one_node_model(record, record.combinations[0], [True], {})
    x = np.array([-1, 2, np.nan, -0.0], np.float32)
    sessions = [make_session(model, find_library(stem), "cpu") for stem in ("custom_relu", "custom_ops")]
    with pytest.raises(Exception, match="CustomRelu"):
        make_session(model, find_library("test_ops"), "cpu")
    for session in sessions * 2:
        (y,) = session.run(None, {"x": x})
        assert y.tobytes() == np.array([0, 2, np.nan, -0.0], np.float32).tobytes()
    mapped = Path("/proc/self/maps").read_text()
    assert "/libcustom_relu.so" in mapped and "/libcustom_ops.so" in mapped


ONE_PROCESS = """
import sys
import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[2])
session = ort.InferenceSession(sys.argv[1], options)
x = np.linspace(-3, 3, 100_001, dtype=np.float32)
before = session.run(None, {"x": x})[0]

import torch
from twinop.testing.one_node import make_session, one_node_model
from twinop import torch_op

middle = torch_op.relu(torch.from_numpy(x)).numpy()
after = session.run(None, {"x": x})[0]
assert before.tobytes() == middle.tobytes() == after.tobytes() == np.maximum(x, 0).tobytes()
maps = open("/proc/self/maps").read()
assert "/libcustom_relu.so" in maps and "/libtwinop_torch.so" in maps
"""


def test_the_torch_library_beside_a_running_session(tmp_path: Path) -> None:
    """The torch library loads beside a session. Other tests cover the other order."""
    record = read_library(find_library("custom_relu")).records["relu"]
    model = tmp_path / "relu.onnx"
    model.write_bytes(one_node_model(record, record.combinations[0], [True], {}).SerializeToString())
    command = [sys.executable, "-c", ONE_PROCESS, str(model), str(find_library("custom_relu"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
