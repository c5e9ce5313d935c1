"""The library that a model needs: found, refused when it cannot be used; and under plain onnxruntime."""

import shutil
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

import twinop
from twinop.deploy import ModelError, RunError, check_model, session
from twinop.errors import LibraryError


def two_library_model() -> onnx.ModelProto:
    nodes = [node("CustomRelu", ["x"], ["a"]), node("CustomPadAffine", ["a"], ["y"], "pad")]
    return model(nodes, [value("x")], [value("y", shape=None)])


def only_these(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr("twinop.libraries.find.library_folders", lambda: list(folders))


def test_the_smallest_library_that_has_all_ops_is_taken(libraries: dict[str, Path]) -> None:
    def chosen(graph: onnx.ModelProto) -> str:
        (library,) = check_model(graph)
        return library.path.name

    assert chosen(make_model("CustomRelu")) == "libcustom_relu.so"
    assert chosen(make_model("CustomPadAffine")) == "libtest_ops.so"


def test_a_library_beside_the_model_needs_permission(libraries: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(make_model("CustomRelu").SerializeToString())
    foreign = onnxruntime.capi.onnxruntime_pybind11_state.__file__
    shutil.copy(foreign, tmp_path / "libsomething.so")  # skipped: twinop did not build it
    beside = tmp_path / "libmine.so"
    shutil.copy(libraries["custom_relu"], beside)
    for opens in (session, check_model, twinop.libraries_for):
        with pytest.raises(LibraryError) as error:
            opens(path)
        said = str(error.value)
        assert said.startswith(f"{beside} lies in the model's own folder.") and "no other one instead" in said
        assert f"library={beside}" in said and "allow_model_libraries=True, or " in said
    assert session(path, library=beside).library is not None
    opened = session(path, allow_model_libraries=True)
    assert opened.library is not None and opened.library.path == beside.resolve()
    assert check_model(path, allow_model_libraries=True)[0].path == beside.resolve()
    assert twinop.libraries_for(path, allow_model_libraries=True) == [str(beside.resolve())]
    np.testing.assert_array_equal(opened.run({"x": X})["y"], np.maximum(X, 0))


@pytest.mark.parametrize(("length", "cause"), [(5000, "the file is damaged"), (0, "not a shared library")])
def test_a_damaged_library(length: int, cause: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    """Though a sound one lies beside it, and in the build folder."""
    path = tmp_path / "model.onnx"
    path.write_bytes(make_model("CustomRelu").SerializeToString())
    shutil.copy(libraries["custom_relu"], tmp_path / "libbefore.so")
    beside = tmp_path / "libcustom_relu.so"
    beside.write_bytes(libraries["custom_relu"].read_bytes()[:length])
    for opened in (session, check_model):
        with pytest.raises(LibraryError, match="libbefore.so lies in the model's own folder"):
            opened(path)
        with pytest.raises(LibraryError) as error:
            opened(path, allow_model_libraries=True)
        assert str(error.value).startswith(f"{beside}: {cause}")
        assert "lies beside the model" in str(error.value) and "replace or remove it" in str(error.value)
    given = session(path, library=libraries["custom_relu"])
    np.testing.assert_array_equal(given.run({"x": X})["y"], np.maximum(X, 0))


def test_no_library_has_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError) as error:
        session(make_model("CustomNothing"))
    assert "no library has custom_domain::CustomNothing, and the model has no function" in str(error.value)
    assert "libcustom_relu.so (CustomRelu)" in str(error.value) and "name the library" in str(error.value)
    only_these(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=f"Found: no library. Searched: {tmp_path}. Build it"):
        session(make_model("CustomRelu"))


def test_a_library_that_was_passed_over_is_named(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcustom_relu.so").write_bytes(libraries["custom_relu"].read_bytes()[:5000])
    only_these(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="Skipped: .*libcustom_relu.so: the file is damaged or cut short"):
        session(make_model("CustomRelu"))


def test_two_libraries(libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stem in ("custom_relu", "test_ops"):
        shutil.copy(libraries[stem], tmp_path)
    only_these(monkeypatch, tmp_path)
    with pytest.raises(LibraryError) as error:
        session(two_library_model())
    text = str(error.value)
    assert "CustomPadAffine is in libtest_ops.so; CustomRelu is in libcustom_relu.so" in text
    assert "takes one library per domain" in text
    assert "twinop_add_library(my_ops DOMAIN custom_domain OPS twinop_op_pad_affine twinop_op_relu)" in text
    with pytest.raises(ModelError, match="'pad' .*the library has no such op"):
        session(two_library_model(), library=libraries["custom_relu"])


def test_a_library_without_the_adapter(libraries: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "libmine.so"
    data = libraries["custom_relu"].read_bytes()
    path.write_bytes(data.replace(b"RegisterCustomOps\0", b"RegisterCustomOpz\0"))
    with pytest.raises(LibraryError, match="does not export RegisterCustomOps.*Expected a library such as"):
        session(make_model("CustomRelu"), library=path)
    with pytest.raises(LibraryError, match="libtwinop_torch.so: .* without twinop records"):
        session(make_model("CustomRelu"), library=libraries["twinop_torch"])


def test_a_library_that_the_loader_refuses(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Records and symbol name in place, but a library that it links is not there."""
    path = tmp_path / "libcustom_relu.so"
    data = libraries["custom_relu"].read_bytes()
    path.write_bytes(data.replace(b"libstdc++.so.6\0", b"libmissing.so.\0"))
    with pytest.raises(LibraryError, match="libcustom_relu.so: ONNX Runtime cannot load it: .*libmissing.so"):
        session(make_model("CustomRelu"), library=path)


def test_true_is_no_library() -> None:
    with pytest.raises(LibraryError, match="library=True: pass a path, None to look"):
        session(make_model("CustomRelu"), library=True)


def test_session_options_that_have_a_library_already(libraries: dict[str, Path]) -> None:
    for first in ("custom_relu", "test_ops"):
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(str(libraries[first]))
        with pytest.raises(RunError) as error:
            session(make_model("CustomRelu"), session_options=options)
        assert "Session options that have a library already need library=False" in str(error.value)


def test_session_options_are_used_once(libraries: dict[str, Path]) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    opened = session(make_model("CustomRelu"), session_options=options)
    assert opened.ort.get_session_options().intra_op_num_threads == 1
    with pytest.raises(RunError, match="that have a library already need library=False"):
        session(make_model("CustomRelu"), session_options=options)

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(libraries["custom_relu"]))
    again = session(make_model("CustomRelu"), library=False, session_options=options)
    np.testing.assert_array_equal(again.run({"x": X})["y"], np.maximum(X, 0))


X = np.array([[-1, 2, -3, 4], [5, -6, 7, -8]], np.float32)


def plain(graph: onnx.ModelProto, library: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])


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
    assert "custom_domain::relu(x: float32[2, 4]): output y overlaps the memory of" in str(error.value)
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
