"""The libraries under plain onnxruntime, without our checks: every failure is a message, none a crash."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from models import make_model, model, node, value

X = np.array([[-1, 2, -3, 4], [5, -6, 7, -8]], np.float32)


def plain(graph: onnx.ModelProto, library: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(
        graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def failure(graph: onnx.ModelProto, library: Path, feeds: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(Exception) as error:
        plain(graph, library).run(None, feeds if feeds is not None else {"x": X})
    return str(error.value)


def test_inputs(libraries: dict[str, Path]) -> None:
    """ONNX Runtime checks counts and dtypes itself, with the node's name."""
    relu, pad = libraries["custom_relu"], libraries["test_ops"]
    for graph, library in (
        (make_model("CustomRelu", inputs=["x", "x"]), relu),
        (make_model("CustomRelu", inputs=[]), relu),
        (make_model("CustomRelu", "int32"), relu),
        (make_model("CustomPadAffine", inputs=["", "w"]), pad),
    ):
        text = failure(graph, library)
        assert "node" in text and "Custom" in text


@pytest.mark.skipif(np.__version__ < "2", reason="this numpy has no arrays of 40 dimensions")
def test_too_many_dimensions(libraries: dict[str, Path]) -> None:
    graph = make_model("CustomRelu", shape=None)
    text = failure(graph, libraries["custom_relu"], {"x": np.ones([1] * 40, np.float32)})
    assert "CustomRelu node 'node' (CPU)" in text and "40 dimensions" in text


@pytest.mark.parametrize("offset", [4, 16, -16, 28])
def test_overlapping_buffers(offset: int, libraries: dict[str, Path]) -> None:
    opened = plain(make_model("CustomRelu"), libraries["custom_relu"])
    memory = np.ones(64, np.float32)
    address = memory.ctypes.data + 64
    binding = opened.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, [2, 4], address)
    binding.bind_output("y", "cpu", 0, np.float32, [2, 4], address + offset)
    with pytest.raises(Exception) as error:
        opened.run_with_iobinding(binding)
    assert "custom_domain::relu(x: float32[2, 4]): output y overlaps the memory of input x" in str(
        error.value
    )
    assert "CustomRelu node 'node' (CPU)" in str(error.value) and memory.sum() == 64, "nothing was written"


def test_the_same_buffer_for_input_and_output_is_in_place(libraries: dict[str, Path]) -> None:
    opened = plain(make_model("CustomRelu"), libraries["custom_relu"])
    memory = X.copy()
    binding = opened.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, [2, 4], memory.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, [2, 4], memory.ctypes.data)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(memory, np.maximum(X, 0))


def test_the_runtime_goes_on_after_failures(libraries: dict[str, Path]) -> None:
    """Statuses are released, kernels destroyed: after hundreds of failures the library works."""
    inputs = [value("x", shape=None), value("w", shape=None)]
    graph = model([node("CustomPadAffine", ["x", "w"])], inputs, [value("y", shape=None)])
    opened = plain(graph, libraries["test_ops"])
    for _ in range(500):
        with pytest.raises(Exception, match="weight and bias"):
            opened.run(None, {"x": X, "w": np.ones(3, np.float32)})
    for _ in range(50):
        failure(make_model("CustomGelu", approximate="fast"), libraries["custom_ops"])
    good = opened.run(None, {"x": X, "w": np.ones(4, np.float32)})[0]
    np.testing.assert_allclose(good[:, :4], 0.1 * X, rtol=1e-6)


VERSIONS = """
import ctypes, glob, os, sys
import onnxruntime

class Base(ctypes.Structure):
    _fields_ = [("get", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
                ("version", ctypes.CFUNCTYPE(ctypes.c_char_p))]

[file] = glob.glob(os.path.dirname(onnxruntime.__file__) + "/capi/libonnxruntime.so.*")
get_base = ctypes.CDLL(file).OrtGetApiBase
get_base.restype = ctypes.POINTER(Base)
base, asked = get_base().contents, []
types = dict(Base._fields_)
other = Base(types["get"](lambda number: asked.append(number) or base.get(number)),
             types["version"](lambda: sys.argv[2].encode()))
made = ctypes.c_void_p()  # of CreateSessionOptions, the 11th function
functions = ctypes.cast(base.get(18), ctypes.POINTER(ctypes.c_void_p))
ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(functions[10])(ctypes.byref(made))
register = ctypes.CDLL(sys.argv[1]).RegisterCustomOps
register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.POINTER(Base)]
print(register(made, ctypes.byref(other)), 24 in asked)
"""


@pytest.mark.parametrize(("version", "is_new"), [("1.23.2", False), ("1.24.0", True), ("2.0.0", True)])
def test_a_later_major_version_is_newer(version: str, is_new: bool, libraries: dict[str, Path]) -> None:
    command = [sys.executable, "-c", VERSIONS, str(libraries["custom_relu"]), version]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["None", str(is_new)], done.stderr
