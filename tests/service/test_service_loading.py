"""A version is loaded: library, checks, first runs; and everything that keeps one from being served."""

import hashlib
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models
from models import node
from onnx import TensorProto, helper
from service_loads import CPU, X, loaded, only_these, other_machine, where

from twinop.deploy.create_session import open_session
from twinop.deploy.errors import ModelError
from twinop.deploy.service.folders import scan
from twinop.deploy.service.instance import Instance
from twinop.deploy.service.loading import load
from twinop.deploy.service.settings import ModelSettings, ServerSettings, Settings, SettingsError
from twinop.comparison import difference
from twinop.errors import LibraryError, TwinopError
from twinop.library import needed_libraries

# -------------------------------------------------------------------------------------- what is loaded


def test_all_that_is_known_of_a_loaded_model(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(tmp_path, service_models.mlp(8, 16, 16, 4), max_batch_size=4, instances=2)
    assert (model.name, model.version, model.device, model.reason) == ("m", 1, "cpu", "asked for")
    assert model.library is not None and model.library.path.name == "libcustom_relu.so"
    assert model.custom_nodes == ("CustomRelu x2",) and model.body_nodes == () and model.fallback is None
    assert model.difference is not None and "not compared" not in model.difference
    assert len(model.instances) == 2 and model.load_seconds > 0
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


@pytest.mark.parametrize("spinning", [False, True])
def test_threads_spin_only_where_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spinning: bool
) -> None:
    given = []

    def opened(*arguments: Any, options: Any, **more: Any) -> Any:
        given.append(options)
        return open_session(*arguments, options=options, **more)

    monkeypatch.setattr("twinop.deploy.service.loading.open_session", opened)
    loaded(tmp_path, service_models.identity("FP32"), intra_op_spinning=spinning, intra_op_threads=2)
    name = "session.intra_op.allow_spinning"
    assert given[0].intra_op_num_threads == 2
    if spinning:
        with pytest.raises(RuntimeError, match=name):  # ONNX Runtime's default
            given[0].get_session_config_entry(name)
    else:
        assert given[0].get_session_config_entry(name) == "0"


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


def test_a_named_library(libraries: dict[str, Path], tmp_path: Path) -> None:
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
    with pytest.raises(
        LibraryError, match=r"liblink\.so: a symbolic link to .*libx\.so, out of the folder. It"
    ):
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
        "libtorch.so": (libraries["twinop_torch"].read_bytes(), "without twinop records"),
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
    command = "twinop_add_library(my_ops DOMAIN custom_domain OPS twinop_op_pad_affine twinop_op_silu)"
    assert command in str(error.value)
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


@pytest.mark.parametrize(
    ("model", "steady"),
    [
        (service_models.relu(), True),
        (service_models.relu("BF16"), True),
        (service_models.gather(), False),
        (service_models.expand(), False),
        (service_models.strings(), False),
        (service_models.slow(), False),
    ],
    ids=["relu", "relu BF16", "gather", "expand", "strings", "a loop"],
)
def test_values_that_may_decide_how_long_a_run_takes(
    libraries: dict[str, Path], tmp_path: Path, model: onnx.ModelProto, steady: bool
) -> None:
    """Only runs of other models may be made on the event loop's thread."""
    assert loaded(tmp_path, model).steady is steady


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
