"""Models that cannot be served, and runs that fail, each with its message."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import service_models
from models import node
from onnx import TensorProto, helper, numpy_helper
from service_loads import loaded, where

from twinop.deploy.errors import ModelError, ProviderError
from twinop.deploy.service import loading
from twinop.deploy.service.errors import INVALID, OUT_OF_MEMORY, RUN_FAILED, ServiceError
from twinop.deploy.service.folders import VersionFolder
from twinop.deploy.service.instance import without_paths
from twinop.deploy.service.loading import load
from twinop.deploy.service.settings import ModelSettings, ServerSettings
from twinop.errors import TwinopError


def external(tmp_path: Path) -> tuple[VersionFolder, Path]:
    """Place a model with its weights in a file; return its folder and that file."""
    place = where(tmp_path, service_models.relu())
    return place, service_models.save_external(service_models.mlp(4, 8, 2), place.path)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../../outside.bin", "outside of its folder"),
        ("/etc/passwd", "outside of its folder"),
        ("sub/../../outside.bin", "outside of its folder"),
        ("a\0b", "outside of its folder"),
        ("", "is missing"),
        ("*/_ORT_MEM_ADDR_/*", "could read memory of the process"),
        ("FOLDER/m/1/weights.bin", "by an absolute path"),
    ],
)
def test_external_data_elsewhere(tmp_path: Path, location: str, message: str) -> None:
    place, data = external(tmp_path)
    shutil.copy(data, tmp_path / "outside.bin")
    service_models.point_external(place.path, location.replace("FOLDER", str(tmp_path)))
    with pytest.raises(ModelError, match=message):
        load(place, ModelSettings(provider="cpu"), ServerSettings())


def test_a_link_that_comes_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, data = external(tmp_path)
    libraries_for = loading.libraries_for

    def changed(*arguments: Any) -> Any:
        data.symlink_to(data.rename(tmp_path / "outside.bin"))
        return libraries_for(*arguments)

    monkeypatch.setattr(loading, "libraries_for", changed)
    with pytest.raises(TwinopError, match="ONNX Runtime refuses it: .*escapes model directory"):
        load(place, ModelSettings(provider="cpu"), ServerSettings())
    monkeypatch.undo()
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    with pytest.raises(ProviderError, match="1.26.0 follows links out of a model's folder: install 1.27"):
        load(external(tmp_path / "old")[0], ModelSettings(provider="cpu"), ServerSettings())
    load(where(tmp_path / "one file", service_models.relu()), ModelSettings(provider="cpu"), ServerSettings())


@pytest.mark.parametrize("kind", ["constant", "subgraph", "function", "attribute of a function", "sparse"])
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
    elif "function" in kind:
        body = service_models.relu_body()
        if kind == "function":
            body.node[1].attribute[0].t.CopyFrom(tensor)
        else:
            body.attribute_proto.append(helper.make_attribute("value", tensor))
        model.functions.append(body)
    else:
        indices = numpy_helper.from_array(np.arange(4), "i")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [8]))
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    with pytest.raises(ModelError, match=r"outside of its folder, in '\.\./\.\./secret\.bin'"):
        loaded(tmp_path, model)


def test_what_the_protocol_cannot_carry(tmp_path: Path) -> None:
    model = service_models.parsed("(float[2] x) => (seq(float) y) { y = SequenceConstruct(x) }")
    with pytest.raises(ModelError, match=r"output y is seq\(tensor\(float\)\), .* Put a Cast or an operator"):
        loaded(tmp_path, model)
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model = service_models.make(
        [node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        [service_models.info("x", "FP32", (None, 2))],
        [helper.make_value_info("y", helper.make_sequence_type_proto(maps))],
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(ModelError, match=r"output y is seq\(map\(int64,tensor\(float\)\)\).*zipmap=False"):
        loaded(tmp_path, model)
    model = service_models.parsed("(float8e4m3fn[2] x) => (float[2] y) { y = Cast <to = 1> (x) }")
    with pytest.raises(ModelError, match=r"input x is tensor\(float8e4m3fn\), which the Open Inference"):
        loaded(tmp_path, model)


def test_batches_need_a_dynamic_first_dimension(tmp_path: Path, libraries: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"input x is FP32\[2, 3\], and max_batch_size needs"):
        loaded(tmp_path, service_models.fixed(2, 3), max_batch_size=4)
    with pytest.raises(ModelError, match=r"output y is FP32\[4\], and max_batch_size"):
        loaded(tmp_path, service_models.total(), max_batch_size=4)
    scalar = service_models.identity("FP32", ())
    with pytest.raises(ModelError, match=r"input x is FP32\[\], and max_batch_size"):
        loaded(tmp_path, scalar, max_batch_size=4)
    assert loaded(tmp_path, scalar).describe()["inputs"][0]["shape"] == []


def test_nothing_but_twinop_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("twinop.deploy.service.loading.open_session", broken)
    with pytest.raises(ModelError, match="cannot be loaded: out of luck"):
        loaded(tmp_path, service_models.identity("FP32"))


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


def test_memory_that_numpy_does_not_get(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.identity("FP32")).instances[0]
    huge = np.broadcast_to(np.float32(0), (1 << 45, 4))  # takes memory only when it is joined
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
