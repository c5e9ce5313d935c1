"""The library that a model needs: found, refused when it cannot be used; and under plain onnxruntime."""

import ctypes
import gc
import itertools
import shutil
from collections.abc import Callable, Mapping
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


def test_two_libraries(libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stem in ("custom_relu", "test_ops"):
        shutil.copy(libraries[stem], tmp_path)
    only_these(monkeypatch, tmp_path)
    with pytest.raises(LibraryError) as error:
        session(two_library_model())
    text = str(error.value)
    assert "CustomPadAffine is in libtest_ops.so; CustomRelu is in libcustom_relu.so" in text
    assert "takes one library per domain" in text
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


class Heap(ctypes.Structure):
    """What mallinfo2 returns, in its order; `used` are the bytes that are allocated."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped", *"ef", "used", *"gh")]


def left_behind(call: Callable[[], object], times: int) -> float:
    """The bytes of the heap that a call keeps: in the best of four rounds, as other threads allocate, too."""
    libc, heap = ctypes.CDLL(None), list[int]()
    libc.mallinfo2.restype = Heap
    gc.freeze()  # what other tests have left need not be looked at
    for _ in range(5):
        for _ in range(times):
            call()
        gc.collect()
        now = libc.mallinfo2()
        heap.append(now.used + now.mapped)
    return min(b - a for a, b in itertools.pairwise(heap)) / times


def test_failures_keep_no_memory(libraries: dict[str, Path]) -> None:
    """Statuses are released, kernels destroyed, and then the library works."""
    inputs = [value("x", shape=None), value("w", shape=None)]
    graph = model([node("CustomPadAffine", ["x", "w"])], inputs, [value("y", shape=None)])
    opened = plain(graph, libraries["test_ops"])

    def refused_run() -> None:
        with pytest.raises(Exception, match="weight and bias"):
            opened.run(None, {"x": X, "w": np.ones(3, np.float32)})

    gelu, relu = make_model("CustomGelu", approximate="fast"), make_model("CustomRelu")
    assert left_behind(refused_run, 100) < 50
    assert left_behind(lambda: failure(gelu, libraries["custom_ops"]), 8) < 200
    assert left_behind(lambda: plain(relu, libraries["custom_relu"]), 8) < 200
    good = opened.run(None, {"x": X, "w": np.ones(4, np.float32)})[0]
    np.testing.assert_allclose(good[:, :4], 0.1 * X, rtol=1e-6)
