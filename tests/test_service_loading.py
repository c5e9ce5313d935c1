"""A version is loaded: library, checks, first runs; and everything that keeps one from being served."""

import hashlib
import logging
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models
from models import node
from onnx import TensorProto, helper, numpy_helper

from twinop.deploy.errors import ModelError, ProviderError
from twinop.deploy.service.errors import INVALID, OUT_OF_MEMORY, RUN_FAILED, ServiceError
from twinop.deploy.service.folders import VersionFolder, scan
from twinop.deploy.service.instance import Instance, without_paths
from twinop.deploy.service.loading import LoadedModel, load
from twinop.deploy.service.settings import ModelSettings, ServerSettings, Settings, SettingsError
from twinop.deploy.tolerance import difference
from twinop.errors import LibraryError, TwinopError
from twinop.library import needed_libraries

X = np.array([[-1, 2, -3, 4]], np.float32)
CPU = {"provider": "cpu"}


def where(path: Path, model: onnx.ModelProto | None = None, **place: Any) -> VersionFolder:
    """The version folder of a model that is written to <path>/m/1/model.onnx."""
    if model is not None:
        service_models.place(path, "m", model, **place)
    return scan(path)["m"].versions[1]


def loaded(
    path: Path, model: onnx.ModelProto, server: ServerSettings | None = None, **given: Any
) -> LoadedModel:
    return load(where(path, model), ModelSettings(**(CPU | given)), server or ServerSettings())


def only_these(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """The folders that stand for the installed libraries."""
    for module in ("twinop.deploy.service.library", "twinop.deploy.libraries"):
        monkeypatch.setattr(f"{module}.library_folders", lambda: list(folders))


def other_machine(library: Path) -> bytes:
    data = bytearray(library.read_bytes())
    struct.pack_into("<H", data, 18, 243)  # e_machine: RISC-V
    return bytes(data)


# -------------------------------------------------------------------------------------- what is loaded


def test_all_that_is_known_of_a_loaded_model(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(tmp_path, service_models.mlp(8, 16, 16, 4), max_batch_size=4, instances=2)
    assert (model.name, model.version, model.device, model.reason) == ("m", 1, "cpu", "asked for")
    assert model.library is not None and model.library.path.name == "libcustom_relu.so"
    assert model.custom_nodes == ("CustomRelu x2",) and model.body_nodes == () and model.fallback is None
    assert model.difference is not None and "not compared" not in model.difference
    assert len(model.instances) == 2 and 0 < model.load_seconds < 30
    described = model.describe()
    assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert described["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    parameters = described["parameters"]
    assert parameters["custom_nodes"] == "CustomRelu x2" and parameters["library"] == "libcustom_relu.so"
    assert parameters["device_reason"] == "asked for" and parameters["fallback"] == ""
    assert all(isinstance(value, str | int | float) for value in parameters.values())
    model.close()


def test_auto_says_which_provider_it_took(
    libraries: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: None)
    with caplog.at_level(logging.INFO):
        model = loaded(tmp_path, service_models.relu(), provider="auto", cuda_graph=True)
    assert model.device == "cpu" and "no NVIDIA driver" in model.reason
    assert "runs on cpu (no NVIDIA driver" in caplog.text and "custom nodes: CustomRelu x1" in caplog.text
    assert "cuda_graph has no effect on the CPU" in caplog.text


def test_no_torch_on_the_cpu(libraries: dict[str, Path], tmp_path: Path) -> None:
    """It would take seconds to import."""
    import subprocess

    place = where(tmp_path, service_models.relu())
    code = (
        "import sys; from pathlib import Path; from twinop.deploy.service.folders import scan; "
        "from twinop.deploy.service.loading import load; from twinop.deploy.service.settings import *; "
        f"where = scan(Path({str(tmp_path)!r}))['m'].versions[1]; "
        "load(where, ModelSettings(provider='cpu'), ServerSettings()); assert 'torch' not in sys.modules"
    )
    assert place.path.is_file()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("datatype", service_models.ELEMENTS)
def test_every_datatype_runs(tmp_path: Path, datatype: str) -> None:
    model = loaded(tmp_path, service_models.identity(datatype))
    dtype = service_models.NUMPY[datatype]
    first = np.array([["a", "é"]], object) if datatype == "BYTES" else np.array([[0, 1]]).astype(dtype)
    second = first[:, ::-1]
    joined = model.instances[0].run([{"x": first}, {"x": second}], ["y"])["y"]
    assert joined.dtype == dtype
    np.testing.assert_array_equal(joined, np.concatenate([first, second]))


def test_warm_up_at_the_shapes_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path]
) -> None:
    seen = []
    run = Instance.run

    def recorded(self: Instance, parts: Any, outputs: Any) -> Any:
        seen.append([{name: array.shape for name, array in part.items()} for part in parts])
        return run(self, parts, outputs)

    monkeypatch.setattr(Instance, "run", recorded)
    loaded(tmp_path, service_models.add(), warm_up={"a": (3, 4)}, max_batch_size=5)
    # b has the same dimension N; the second run is at the largest batch.
    assert seen == [[{"a": (3, 4), "b": (3, 4)}], [{"a": (5, 4), "b": (5, 4)}]]


def test_warm_up_that_does_not_fit(tmp_path: Path, libraries: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="warm_up names 'z'; the model's inputs: x"):
        loaded(tmp_path, service_models.relu(), warm_up={"z": (1,)})
    with pytest.raises(SettingsError, match=r"warm_up: input x is float32\[1, 5\].* must be 4, not 5"):
        loaded(tmp_path, service_models.relu(), warm_up={"x": (1, 5)})


def test_a_first_run_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = service_models._model(  # x must have 8 elements
        [node("Reshape", ["x", "shape"], domain="")],
        [service_models._value("x", "FP32", ("N",))],
        [service_models._value("y", "FP32", (2, 4))],
        weights={"shape": np.array([2, 4], np.int64)},
    )
    with caplog.at_level(logging.WARNING):
        served = loaded(tmp_path, model)  # nobody said that N may be 1
    assert "was not warmed up, set warm_up: at x [1] it says" in caplog.text
    assert served.instances[0].run([{"x": np.ones(8, np.float32)}], ["y"])["y"].shape == (2, 4)
    assert loaded(tmp_path, model, warm_up={"x": (8,)})
    with pytest.raises(ModelError, match=r"its first run, at x \[9\], failed"):
        loaded(tmp_path, model, warm_up={"x": (9,)})


def test_an_input_of_unknown_rank(
    tmp_path: Path, libraries: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, service_models.relu(shape=None))
    assert "not warmed up: the rank of an input is unknown" in caplog.text
    assert model.describe()["inputs"][0]["shape"] == [-1]
    assert loaded(tmp_path, service_models.relu(shape=None), warm_up={"x": (2, 2)}).difference == "none"


def test_a_default_may_be_left_out(tmp_path: Path) -> None:
    model = loaded(tmp_path, service_models.optional_scale())
    assert [spec.name for spec in model.required] == ["x"] and list(model.inputs) == ["x", "scale"]
    batched = loaded(tmp_path, service_models.optional_scale(), max_batch_size=4)  # scale has no rows
    assert list(batched.inputs) == ["x"]


def test_a_profile_is_written(tmp_path: Path, libraries: dict[str, Path]) -> None:
    folder = tmp_path / "profiles" / "here"
    model = loaded(tmp_path, service_models.relu(), ServerSettings(profile=folder))
    model.close()
    (profile,) = folder.iterdir()
    assert profile.name.startswith("m-1-0_") and "CustomRelu" in profile.read_text()


# ----------------------------------------------------------------------------------------- the library


def test_a_library_beside_the_versions(libraries: dict[str, Path], tmp_path: Path) -> None:
    place = where(tmp_path, service_models.relu())
    mine = tmp_path / "m" / "libmine.so"
    shutil.copy(libraries["custom_relu"], mine)
    model = load(place, ModelSettings(provider="cpu"), ServerSettings())
    assert model.library is not None and model.library.path == mine
    beside = place.folder / "libmine.so"
    shutil.copy(mine, beside)
    model = load(place, ModelSettings(provider="cpu"), ServerSettings())
    assert model.library is not None and model.library.path == beside


def test_a_named_library(libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = libraries["custom_ops"]
    for name in (ops, Path(ops.name)):
        model = loaded(tmp_path, service_models.relu(), library=name)
        assert model.library is not None and model.library.path == ops
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ops, elsewhere / "libx.so")
    with pytest.raises(LibraryError, match=r"loaded only from the model's own folder and configured ones"):
        loaded(tmp_path, service_models.relu(), library=elsewhere / "libx.so")
    allowed = ServerSettings(library_folders=(elsewhere,))
    model = loaded(tmp_path, service_models.relu(), allowed, library=Path("libx.so"))
    assert model.library is not None and model.library.path == elsewhere / "libx.so"
    (tmp_path / "m" / "liblink.so").symlink_to(elsewhere / "libx.so")
    with pytest.raises(LibraryError, match=f"configured ones .* and this one is in {elsewhere}"):
        loaded(tmp_path, service_models.relu(), library=Path("liblink.so"))
    only_these(monkeypatch)
    with pytest.raises(ModelError, match=r"Passed over: .*liblink\.so: a symbolic link to .*libx\.so"):
        loaded(tmp_path, service_models.relu())


def test_settings_beside_a_model_allow_no_folder(libraries: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(libraries["custom_ops"], elsewhere / "libx.so")
    models = tmp_path / "models"
    service_models.place(models, "m", service_models.relu(), settings='library = "../../elsewhere/libx.so"')
    folder = scan(models)["m"]
    settings = Settings().for_model("m", *folder.layers)
    with pytest.raises(LibraryError, match="configured ones"):
        load(folder.versions[1], settings, ServerSettings())


def test_a_library_of_the_triton_config(libraries: dict[str, Path], tmp_path: Path) -> None:
    service_models.place(
        tmp_path,
        "m",
        service_models.relu(),
        config='max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 4 } '
        'model_operations { op_library_filename: "/in/the/container/libcustom_ops.so" }',
    )
    folder = scan(tmp_path)["m"]
    model = load(folder.versions[1], Settings().for_model("m", CPU, *folder.layers), ServerSettings())
    assert model.library is not None and model.library.path == libraries["custom_ops"]
    assert model.settings.max_batch_size == 4
    service_models.place(tmp_path, "m", service_models.relu("FP64"))
    with pytest.raises(SettingsError, match="the model is another one:\n  - data_type of input x: FP32"):
        load(folder.versions[1], Settings().for_model("m", CPU, *folder.layers), ServerSettings())


def test_checksum(libraries: dict[str, Path], tmp_path: Path) -> None:
    right = hashlib.sha256(libraries["custom_relu"].read_bytes()).hexdigest()
    assert loaded(tmp_path, service_models.relu(), library_sha256=right.upper()).library is not None
    with pytest.raises(LibraryError, match=f"its SHA-256 is {right}, library_sha256 says {'0' * 64}"):
        loaded(tmp_path, service_models.relu(), library_sha256="0" * 64)


def test_another_schema(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = service_models.relu(metadata={"twinop.schema.CustomRelu": "0123456789abcdef"})
    with pytest.raises(ModelError, match=r"exported by twinop .* with schema 0123456789abcdef"):
        loaded(tmp_path, model)


def test_libraries_that_cannot_be_used(libraries: dict[str, Path], tmp_path: Path) -> None:
    folder = where(tmp_path, service_models.relu()).folder
    whole = libraries["custom_relu"].read_bytes()
    cases = {
        "libmissing.so": (None, "no such library"),
        "libtext.so": (b"#!/bin/sh\n", "not a shared library"),
        "libcut.so": (whole[:5000], "cut short"),
        "libother.so": (other_machine(libraries["custom_relu"]), "built for riscv64, this machine is"),
        "libtorch.so": (libraries["twinop_torch"].read_bytes(), "does not export RegisterCustomOps"),
        "libpython.so": (Path(sys.executable).read_bytes(), "without twinop records"),
        "libtest.so": (libraries["test_ops"].read_bytes(), "has no CustomRelu, which would run on"),
    }
    for name, (data, message) in cases.items():
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(TwinopError, match=message) as error:
            loaded(tmp_path, service_models.relu(), library=Path(name))
        assert name in str(error.value)
        assert str(error.value).endswith("more slowly: allow_fallback permits it")


def test_fallback_only_if_allowed(
    libraries: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    only_these(monkeypatch, tmp_path / "none")
    with pytest.raises(ModelError, match=r"no library has custom_domain::CustomRelu.*allow_fallback permits"):
        loaded(tmp_path, service_models.relu())
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, service_models.relu(), allow_fallback=True)
    assert model.fallback is not None and "no library has custom_domain::CustomRelu" in model.fallback
    assert "runs on its function bodies, the library cannot be used" in caplog.text
    assert model.library is None and model.custom_nodes == () and model.body_nodes == ("CustomRelu x1",)
    np.testing.assert_array_equal(model.instances[0].run([{"x": X}], ["y"])["y"], np.maximum(X, 0))
    assert str(tmp_path) not in str(model.describe()["parameters"]["fallback"])
    with pytest.raises(ModelError, match="has no function body for it") as error:
        loaded(tmp_path, service_models.relu(body=False), allow_fallback=True)
    assert "allow_fallback" not in str(error.value)


def test_a_library_that_does_not_load(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Its records are right, but a library that it needs is missing."""
    folder = where(tmp_path, service_models.relu()).folder
    data = libraries["custom_relu"].read_bytes()
    needed = next(name for name in needed_libraries(libraries["custom_relu"]) if name.startswith("libstdc"))
    (folder / "libbad.so").write_bytes(data.replace(needed.encode(), b"X" * len(needed)))
    with pytest.raises(LibraryError, match=r"libbad\.so: ONNX Runtime cannot load it.*allow_fallback"):
        loaded(tmp_path, service_models.relu(), library=Path("libbad.so"))
    model = loaded(tmp_path, service_models.relu(), library=Path("libbad.so"), allow_fallback=True)
    assert model.fallback is not None and "cannot load it" in model.fallback


def test_ops_of_two_libraries(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "libs"
    folder.mkdir()
    for name in ("custom_ops", "test_ops"):
        shutil.copy(libraries[name], folder)
    only_these(monkeypatch, folder)
    with pytest.raises(LibraryError) as error:
        loaded(tmp_path, service_models.several_libraries())
    assert "CustomPadAffine is in libtest_ops.so; CustomSilu is in libcustom_ops.so" in str(error.value)
    assert "twinop_add_ort_library(my_ops OPS twinop_op_pad_affine twinop_op_silu)" in str(error.value)
    first = loaded(tmp_path, service_models.relu())
    second = loaded(
        tmp_path / "other", service_models.relu(), library=Path("libtest_ops.so"), allow_fallback=True
    )
    assert first.library is not None and second.fallback is not None


def test_two_models_with_two_libraries(libraries: dict[str, Path], tmp_path: Path) -> None:
    relu = loaded(tmp_path / "a", service_models.relu())
    pad = service_models._model(
        [node("CustomPadAffine", scale=2.0, pads=[0, 0])],
        [service_models._value("x", "FP32", ("N", 4))],
        [service_models._value("y", "FP32", None)],
    )
    other = loaded(tmp_path / "b", pad)
    assert relu.library is not None and other.library is not None and relu.library.path != other.library.path
    np.testing.assert_array_equal(relu.instances[0].run([{"x": X}], ["y"])["y"], np.maximum(X, 0))
    np.testing.assert_array_equal(other.instances[0].run([{"x": X}], ["y"])["y"], 2 * X)
    assert other.difference is None  # it carries no function body


# ------------------------------------------------------------------------------------- function bodies


def test_kernels_and_bodies_that_disagree(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = service_models.relu(body=False)
    model.functions.append(service_models.wrong_body())
    with pytest.raises(ModelError, match=r"kernels and the model's function bodies disagree in output y"):
        loaded(tmp_path, model)
    assert loaded(tmp_path, model, compare_bodies=False).difference is None


def test_bodies_that_no_kernel_runs(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = service_models.relu("FP16", body=False)
    body = service_models.relu_body("FP16")
    body.node[0].attribute[0].i = TensorProto.BFLOAT16
    body.node[1].attribute[0].t.CopyFrom(helper.make_tensor("zero", TensorProto.BFLOAT16, [], [0.0]))
    model.functions.append(body)
    found = loaded(tmp_path, model).difference
    assert found == "not compared: ONNX Runtime has no kernel for Less"


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_bodies_of_all_dtypes_are_compared(libraries: dict[str, Path], tmp_path: Path, datatype: str) -> None:
    assert loaded(tmp_path, service_models.relu(datatype)).difference == "none"


def test_difference() -> None:
    a = np.array([1.0, np.nan, np.inf, 100], np.float32)
    assert difference(a, a) == 0.0
    assert difference(a, np.array([2.0, np.nan, np.inf, 100], np.float32)) == pytest.approx(0.01)
    for other in ([1, 1, np.inf, 100], [1, np.nan, -np.inf, 100], [1, np.nan, 5, 100]):
        assert difference(a, np.array(other, np.float32)) == float("inf")
    assert difference(a, a[:2]) == difference(a, a.astype(np.float64)) == float("inf")
    assert difference(np.array([1, 2]), np.array([1, 2])) == 0.0
    assert difference(np.array([1, 2]), np.array([1, 3])) == float("inf")
    assert difference(np.zeros(0), np.zeros(0)) == 0.0


# ------------------------------------------------------------------------------------------ bad models


def test_models_that_are_damaged(tmp_path: Path, libraries: dict[str, Path]) -> None:
    place = where(tmp_path, service_models.relu())
    whole = place.path.read_bytes()
    for data, message in (
        (b"", "it has no graph"),
        (b"not a model", "not a complete ONNX model"),
        (whole[: len(whole) // 2], "not a complete ONNX model"),
    ):
        place.path.write_bytes(data)
        with pytest.raises(ModelError, match=message):
            load(place, ModelSettings(provider="cpu"), ServerSettings())
    place.path.unlink()
    with pytest.raises(ModelError, match="no such file"):
        load(place, ModelSettings(provider="cpu"), ServerSettings())


def test_what_onnxruntime_refuses(tmp_path: Path) -> None:
    model = service_models.identity("FP32")
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(TwinopError, match="ONNX Runtime refuses it: .*NoSuchOperator"):
        loaded(tmp_path, model)


def external(tmp_path: Path) -> tuple[VersionFolder, Path]:
    """A model with its weights in a file, and that file."""
    place = where(tmp_path, service_models.relu())
    return place, service_models.save_external(service_models.mlp(4, 8, 2), place.path)


def test_external_data(tmp_path: Path, libraries: dict[str, Path]) -> None:
    place, data = external(tmp_path)
    cpu, server = ModelSettings(provider="cpu"), ServerSettings()
    assert load(place, cpu, server).instances[0].run([{"x": X}], ["y"])["y"].shape == (1, 2)
    whole = data.read_bytes()
    data.write_bytes(whole[:20])
    with pytest.raises(ModelError, match=r"weights\.bin is cut short \(tensor w"):
        load(place, cpu, server)
    data.unlink()
    with pytest.raises(ModelError, match=r"weights\.bin is missing"):
        load(place, cpu, server)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(whole)
    data.symlink_to(outside)
    with pytest.raises(ModelError, match=r"outside of its folder, in 'weights\.bin'"):
        load(place, cpu, server)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../../outside.bin", "outside of its folder"),
        ("/etc/passwd", "outside of its folder"),
        ("sub/../../outside.bin", "outside of its folder"),
        ("a\0b", "outside of its folder"),
        ("", "is missing"),
        ("*/_ORT_MEM_ADDR_/*", "is missing"),
    ],
)
def test_external_data_elsewhere(
    tmp_path: Path, libraries: dict[str, Path], location: str, message: str
) -> None:
    place, data = external(tmp_path)
    shutil.copy(data, tmp_path / "outside.bin")
    service_models.point_external(place.path, location)
    with pytest.raises(ModelError, match=message):
        load(place, ModelSettings(provider="cpu"), ServerSettings())


def test_external_data_in_the_folder_by_an_absolute_path(tmp_path: Path, libraries: dict[str, Path]) -> None:
    place, data = external(tmp_path)
    service_models.point_external(place.path, str(data))
    with pytest.raises(ModelError, match="by an absolute path"):
        load(place, ModelSettings(provider="cpu"), ServerSettings())


@pytest.mark.parametrize("kind", ["constant", "subgraph", "function", "sparse"])
def test_external_data_in_hidden_places(tmp_path: Path, kind: str) -> None:
    tensor = numpy_helper.from_array(np.ones(4, np.float32), "hidden")
    onnx.external_data_helper.set_external_data(tensor, "../../secret.bin", length=16)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    model = service_models.identity("FP32")
    if kind == "constant":
        model.graph.node.append(node("Constant", [], ["c"], "c", domain="", value=tensor))
    elif kind == "subgraph":
        branch = helper.make_graph([], "b", [], [], [tensor])
        model.graph.node.append(helper.make_node("If", ["x"], ["c"], then_branch=branch, else_branch=branch))
    elif kind == "function":
        body = service_models.relu_body()
        body.node[1].attribute[0].t.CopyFrom(tensor)
        model.functions.append(body)
    else:
        indices = numpy_helper.from_array(np.arange(4), "i")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [8]))
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    with pytest.raises(ModelError, match=r"outside of its folder, in '\.\./\.\./secret\.bin'"):
        loaded(tmp_path, model)


def test_a_damaged_place_of_external_data(tmp_path: Path, libraries: dict[str, Path]) -> None:
    place, _ = external(tmp_path)
    model = onnx.load(place.path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key="offset", value="many")
    place.path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="the place of its external data is damaged"):
        load(place, ModelSettings(provider="cpu"), ServerSettings())


def test_what_the_protocol_cannot_carry(tmp_path: Path) -> None:
    model = service_models._model(
        [node("SequenceConstruct", ["x"], ["y"], domain="")],
        [service_models._value("x", "FP32", (2,))],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
    )
    with pytest.raises(ModelError, match=r"output y is seq\(tensor\(float\)\), which the Open Inference"):
        loaded(tmp_path, model)
    model = service_models._model(
        [node("Cast", ["x"], ["y"], domain="", to=TensorProto.FLOAT)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT8E4M3FN, (2,))],
        [service_models._value("y", "FP32", (2,))],
    )
    with pytest.raises(ModelError, match=r"input x is tensor\(float8e4m3fn\), which the Open Inference"):
        loaded(tmp_path, model)


def test_batches_need_a_dynamic_first_dimension(tmp_path: Path, libraries: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"input x is float32\[2, 3\], and max_batch_size \(4\) needs"):
        loaded(tmp_path, service_models.fixed(2, 3), max_batch_size=4)
    with pytest.raises(ModelError, match=r"output y is float32\[4\], and max_batch_size"):
        loaded(tmp_path, service_models.total(), max_batch_size=4)
    scalar = service_models.identity("FP32", ())
    with pytest.raises(ModelError, match=r"input x is float32\[\], and max_batch_size"):
        loaded(tmp_path, scalar, max_batch_size=4)
    assert loaded(tmp_path, scalar).describe()["inputs"][0]["shape"] == []


def test_a_gpu_that_is_not_there(
    tmp_path: Path, libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: None)
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider was asked for .*\n  - no NVIDIA driver"):
        loaded(tmp_path, service_models.relu(), provider="cuda")
    with pytest.raises(ProviderError):  # a fallback is for libraries
        loaded(tmp_path, service_models.relu(), provider="cuda", allow_fallback=True)


def test_nothing_but_twinop_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("twinop.deploy.service.loading.open_session", broken)
    with pytest.raises(ModelError, match="cannot be loaded: out of luck"):
        loaded(tmp_path, service_models.identity("FP32"))


# -------------------------------------------------------------------------------------- runs that fail


def test_a_refused_request(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.gather()).instances[0]
    with pytest.raises(ServiceError, match="the model refuses the request: .*idx=77") as error:
        instance.run([{"index": np.array([1, 77])}], ["y"])
    assert error.value.failure is INVALID
    assert instance.run([{"index": np.array([1])}], ["y"])["y"][0, 0] == 4


def test_a_failed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance = loaded(tmp_path, service_models.add()).instances[0]
    feeds = {"a": np.ones((2, 4), np.float32), "b": np.ones((3, 4), np.float32)}
    with pytest.raises(ServiceError, match="the run failed: .*broadcast") as error:
        instance.run([feeds], ["total"])
    assert error.value.failure is RUN_FAILED
    assert "/" not in str(error.value)
    assert "a run failed" in caplog.text


def test_a_feed_that_does_not_fit(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.add()).instances[0]
    with pytest.raises(ServiceError, match="input missing: b") as error:
        instance.run([{"a": np.ones((2, 4), np.float32)}], ["total"])
    assert error.value.failure is INVALID


@pytest.mark.parametrize(
    "text",
    [
        "Failed to allocate memory for requested buffer of size 4000",
        "CUDA out of memory. Tried to allocate 2 GiB",
        "CUDA error: out of memory",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
        "std::bad_alloc",
    ],
)
def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    instance = loaded(tmp_path, service_models.identity("FP32")).instances[0]

    def fails(*_: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(instance._session, "run", fails)
    with pytest.raises(ServiceError, match="not enough memory for this request") as error:
        instance.run([{"x": X}], ["y"])
    assert error.value.failure is OUT_OF_MEMORY


def test_memory_that_onnxruntime_does_not_get(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.expand()).instances[0]
    x = np.ones(1, np.float32)
    with pytest.raises(ServiceError) as error:
        instance.run([{"x": x, "shape": np.array([1 << 45])}], ["y"])
    assert error.value.failure is OUT_OF_MEMORY
    assert instance.run([{"x": x, "shape": np.array([3])}], ["y"])["y"].shape == (3,)


def test_memory_that_numpy_does_not_get(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.identity("FP32")).instances[0]
    huge = np.broadcast_to(np.float32(0), (1 << 45, 4))  # no memory until it is joined
    with pytest.raises(ServiceError) as error:
        instance.run([{"x": huge}, {"x": huge}], ["y"])
    assert error.value.failure is OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/a/b/libx.so: no such file", "libx.so: no such file"),
        ("in /onnxruntime_src/core/x.h:583 of 1/2 and/or a/b", "in x.h:583 of 1/2 and/or a/b"),
        ("nothing here", "nothing here"),
    ],
)
def test_messages_without_paths(text: str, cleaned: str) -> None:
    assert without_paths(text) == cleaned
