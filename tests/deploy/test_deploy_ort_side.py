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
from models import chain, make_model, model, node, value

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


def test_attributes(libraries: dict[str, Path]) -> None:
    ops, pad = libraries["custom_ops"], libraries["test_ops"]
    start = "CustomGelu node 'node' (CPU): "
    text = failure(make_model("CustomGelu", approximate=3), ops)
    assert f"{start}attribute approximate is an int, expected a string" in text
    text = failure(make_model("CustomGelu", approximate=[1, 2]), ops)
    assert f"{start}attribute approximate is a list of ints, expected a string" in text
    text = failure(make_model("CustomGelu", approximate="fast"), ops)
    assert "attribute approximate is 'fast', expected one of none | tanh" in text and start in text
    text = failure(make_model("CustomPadAffine", scale=2), pad)
    assert "attribute scale is an int, expected a float" in text
    text = failure(make_model("CustomPadAffine", pads=3), pad)
    assert "attribute pads is an int, expected a list of ints" in text
    text = failure(make_model("CustomPadAffine", pads=[1] * 99), pad)
    assert "attribute pads has 99 entries" in text


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


def test_shapes(libraries: dict[str, Path]) -> None:
    inputs = [value("x", shape=None), value("w", shape=None)]
    graph = model([node("CustomPadAffine", ["x", "w"])], inputs, [value("y", shape=None)])
    text = failure(graph, libraries["test_ops"], {"x": X, "w": np.ones(3, np.float32)})
    assert "CustomPadAffine node 'node' (CPU)" in text
    assert "custom_domain::pad_affine(x: float32[2, 4], weight: float32[3], bias: absent)" in text
    assert "weight and bias must have one dimension, as long as the last one of x" in text

    graph = make_model("CustomDoubleAndSum", shape=None)
    text = failure(graph, libraries["test_ops"], {"x": np.array(1, np.float32)})
    assert "CustomDoubleAndSum node 'node' (CPU)" in text and "x: float32[]" in text

    text = failure(make_model("CustomPadAffine", pads=[-9, 2]), libraries["test_ops"])
    assert "CustomPadAffine node 'node' (CPU)" in text and "x: float32[2, 4]" in text


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


PEAK = """
import sys
import numpy as np
import onnxruntime

model, library, name = sys.argv[1:]

def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

options = onnxruntime.SessionOptions()
options.register_custom_ops_library(library)
options.enable_cpu_mem_arena = False
opened = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
x, y = np.ones((16, 1 << 20), np.float32), np.ones((16, 1 << 20), np.float32)
binding = opened.io_binding()
binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
before = peak()
opened.run_with_iobinding(binding)
assert y.any(), name
print(peak() - before)
"""


@pytest.mark.parametrize("op_type, buffers", [("CustomRelu", 1), ("CustomPadAffine", 2)])
def test_a_chain_runs_in_place(
    op_type: str, buffers: int, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """x -> t1 -> t2 -> y: relu's record lets t2 take t1's memory; pad_affine's does not, so there are two."""
    path = tmp_path / "model.onnx"
    graph = chain(op_type, 3, shape=(16, 1 << 20))
    for each in graph.graph.node:
        if op_type == "CustomPadAffine":
            each.attribute.append(onnx.helper.make_attribute("pads", [0, 0]))
    onnx.save(graph, path)
    library = libraries["custom_relu" if op_type == "CustomRelu" else "test_ops"]
    command = [sys.executable, "-c", PEAK, str(path), str(library), op_type]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert buffers * 64 - 8 <= int(result.stdout) <= buffers * 64 + 24, result.stdout


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
