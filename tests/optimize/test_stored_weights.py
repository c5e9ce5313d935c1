"""Tests that large weights stay in their files when a model is read, and are streamed when it is written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto
from optimizing import parsed, weights

from twinop.errors import ExportError
from twinop.model import files
from twinop.model import weights as lazy
from twinop.model.weights import Recipe, Stored
from twinop.optimize.load import FILES, load

TEXT = "(float[N, 40] x) => (float[N, 30] y) { a = MatMul (x, w) y = Add (a, b) }"
GIVEN = {"w": weights(40, 30), "b": weights(30)}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix counts as large, the bias does not."""
    monkeypatch.setattr("twinop.model.weights.LARGE", 1000)
    monkeypatch.setattr("twinop.deploy.wire.LARGE", 1000)
    monkeypatch.setattr(lazy, "_STRIP", 512)


def _initializers(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    found = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("place", ["raw", "typed", "external", "subgraph"])
def test_large_weights_stay_in_their_file(place: str, tmp_path: Path) -> None:
    path, proto = tmp_path / "old.onnx", parsed(TEXT, **GIVEN)
    if place == "typed":
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.float_data.extend(GIVEN["w"].reshape(-1).tolist())
    if place == "subgraph":
        inner = proto.graph.initializer[0]
        proto = parsed("(bool c, float[N, 40] x) => (float[N, 30] y) { z = Identity (x) y = If (c) }")
        then = onnx.parser.parse_graph("t () => (float[N, 30] a) { a = MatMul (x, w) }")
        then.initializer.append(inner)
        other = onnx.parser.parse_graph("e () => (float[N, 30] e) { e = MatMul (z, w) }")
        other.initializer.append(inner)
        node = proto.graph.node[1]
        node.attribute.append(onnx.helper.make_attribute("then_branch", then))
        node.attribute.append(onnx.helper.make_attribute("else_branch", other))
    onnx.save(proto, path, save_as_external_data=place == "external", location="old.data", size_threshold=0)
    model = load(path)
    graph = [*model.graphs()][-1] if place == "subgraph" else model.graph
    found = graph.initializers["w"].const_value
    assert isinstance(found, Stored)
    assert found.path.name == ("old.data" if place == "external" else "old.onnx")
    np.testing.assert_array_equal(found.numpy(), GIVEN["w"])
    assert not found.numpy().flags.owndata
    assert model.meta[FILES] == ({tmp_path / "old.data"} if place == "external" else set())
    if place != "subgraph":
        assert isinstance(_initializers(model)["b"], ir.Tensor | ir.serde.TensorProtoTensor)
        np.testing.assert_array_equal(_initializers(model)["b"].numpy(), GIVEN["b"])
    files.save(model, tmp_path / "new.onnx", 10**9)
    again = [*load(tmp_path / "new.onnx").graphs()][-1 if place == "subgraph" else 0]
    assert lazy.same(again.initializers["w"].const_value, found)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_recipes_are_computed_in_strips(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(parsed(TEXT, **GIVEN), tmp_path / "old.onnx")
    model = load(tmp_path / "old.onnx")
    value = model.graph.initializers["w"]
    stored = value.const_value
    assert stored is not None
    narrowed = lazy.cast(lazy.transpose(stored), ir.DataType.FLOAT16)
    value.const_value, value.shape = narrowed, ir.Shape(lazy.sizes(narrowed))
    value.type = ir.TensorType(narrowed.dtype)
    largest, read = list[int](), Recipe.read

    def counted(recipe: Recipe, window: lazy.Window) -> np.ndarray:
        found = read(recipe, window)
        largest.append(found.nbytes)
        return found

    monkeypatch.setattr(Recipe, "numpy", None)
    monkeypatch.setattr(Recipe, "read", counted)
    written = files.save(model, tmp_path / "new.onnx", limit, checks=False)
    assert value.const_value is narrowed
    assert len(largest) > 2 and max(largest) <= 512
    [found, bias] = onnx.load(tmp_path / "new.onnx").graph.initializer
    assert found.data_type == TensorProto.FLOAT16
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(found), GIVEN["w"].T.astype(np.float16))
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(bias), GIVEN["b"])
    assert [each.suffix for each in written] == ([".onnx"] if limit else [".data", ".onnx"])
    if not limit:
        proto = onnx.load(tmp_path / "new.onnx", load_external_data=False)
        assert [each.value for each in proto.graph.initializer[0].external_data][1:] == ["0", "2400"]


def test_large_weights_start_where_pages_do(tmp_path: Path) -> None:
    onnx.save(parsed(TEXT, **GIVEN, unused=weights(300), last=weights(300)), tmp_path / "old.onnx")
    _, path = files.save(load(tmp_path / "old.onnx"), tmp_path / "new.onnx", 0)
    proto = onnx.load(path, load_external_data=False)
    entries = [(each.name, entry) for each in proto.graph.initializer for entry in each.external_data]
    rests = {name: int(e.value) % 4096 for name, e in entries if e.key == "offset" and name != "b"}
    assert rests == {"w": 0, "unused": 0, "last": 0}
    for each in onnx.load(path).graph.initializer:
        expected = _initializers(load(tmp_path / "old.onnx"))[each.name].numpy()
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(each), expected)


def test_a_full_disk_is_seen_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(parsed(TEXT, **GIVEN), tmp_path / "old.onnx")
    model = load(tmp_path / "old.onnx")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=4000))
    for limit in (0, 10**9):
        with pytest.raises(ExportError, match="cannot be written: it takes 4.92e-06 GB, and 4e-06 GB"):
            files.save(model, tmp_path / "new.onnx", limit)
    assert os.listdir(tmp_path) == ["old.onnx"]


Damage = Callable[[onnx.ModelProto, Path], None]


def _claim(proto: onnx.ModelProto, data: Path) -> None:
    proto.graph.initializer[0].external_data[2].value = "100"


def _say_nothing(proto: onnx.ModelProto, data: Path) -> None:
    data.write_bytes(data.read_bytes()[:-8])
    for tensor in proto.graph.initializer:
        del tensor.external_data[2]


def _half(proto: onnx.ModelProto, data: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((9, 9), np.float16), "half")
    weight.raw_data = weight.raw_data[:-3]
    proto.graph.initializer.append(weight)


def _constant(proto: onnx.ModelProto, data: Path) -> None:
    value = onnx.TensorProto(name="half", data_type=onnx.TensorProto.FLOAT16, dims=[9], raw_data=b"\0" * 7)
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["unread"], value=value))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_constant, "half has 18 bytes, and its raw_data has 7 for it"),
        (_half, "half has 162 bytes, and its raw_data has 159 for it. Copy the file again, or export"),
        (_claim, "w has 4800 bytes, and old.data has 100 for it. Copy the file again, or export"),
        (_say_nothing, "b has 120 bytes, and old.data has 112 for it. Copy the file again, or export"),
    ],
)
def test_wrong_data_is_refused(damage: Damage, said: str, tmp_path: Path) -> None:
    path, data = tmp_path / "old.onnx", tmp_path / "old.data"
    onnx.save(parsed(TEXT, **GIVEN), path, save_as_external_data=True, location=data.name, size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    damage(proto, data)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ExportError, match=said):
        load(path)
