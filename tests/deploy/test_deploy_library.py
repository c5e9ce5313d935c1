"""The library that a model needs: found, refused when it cannot be used, and one per session."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from models import make_model, model, node, value

import twinop
from twinop.deploy import ModelError, RunError, check_model, session
from twinop.errors import LibraryError

X = np.array([[-1, 2, -3, 4]], np.float32)


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
    shutil.copy(foreign_library(), tmp_path / "libsomething.so")  # skipped
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


@pytest.mark.parametrize(
    ("length", "cause"),
    [(5000, "the file is damaged or cut short"), (0, "not a shared library (ELF file)")],
)
def test_a_damaged_library_beside_the_model_is_an_error(
    length: int, cause: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
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
    assert "no library has custom_domain::CustomNothing, and the model has no function body" in str(
        error.value
    )
    assert "libcustom_relu.so (CustomRelu)" in str(error.value) and "name the library (library=)" in str(
        error.value
    )
    only_these(monkeypatch, tmp_path)
    with pytest.raises(
        ModelError, match=f"Found: no library. Searched: {tmp_path}. Build it with ./build.sh"
    ):
        session(make_model("CustomRelu"))


def test_a_library_that_was_passed_over_is_named(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcustom_relu.so").write_bytes(libraries["custom_relu"].read_bytes()[:5000])
    only_these(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="Skipped: .*libcustom_relu.so: the file is damaged or cut short"):
        session(make_model("CustomRelu"))


def test_a_model_that_needs_two_libraries(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# ------------------------------------------------------------------------------------------- unusable ones


def foreign_library() -> Path:
    """A sound library that twinop did not build."""
    spec = importlib.util.find_spec("onnxruntime.capi.onnxruntime_pybind11_state")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


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
    path.write_bytes(
        libraries["custom_relu"].read_bytes().replace(b"libstdc++.so.6\0", b"libmissing.so.6"[:14] + b"\0")
    )
    with pytest.raises(LibraryError, match="libcustom_relu.so: ONNX Runtime cannot load it: .*libmissing.so"):
        session(make_model("CustomRelu"), library=path)


def test_true_is_no_library() -> None:
    with pytest.raises(LibraryError, match="library=True: pass a path, None to look"):
        session(make_model("CustomRelu"), library=True)


# ------------------------------------------------------------------------------------------- twice


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
