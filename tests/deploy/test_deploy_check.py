"""What a model's custom nodes may get wrong: found before ONNX Runtime sees them, and said clearly."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import ORT_VERSION, chain, exported_by, function, make_model, model, node, relu_body, value
from onnx import TensorProto, helper

from twinop.deploy import ModelError, RunError, check_model, create_session, session
from twinop.errors import LibraryError
from twinop.libraries.library import read_library

RELU = {"op_type": "CustomRelu"}
GELU = {"op_type": "CustomGelu"}
PAD = {"op_type": "CustomPadAffine"}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "attribute name": (GELU | {"aproximate": "tanh"}, "unknown attribute aproximate; did you mean"),
    "attribute type": (GELU | {"approximate": 3}, "attribute approximate is INT, expected STRING (str)"),
    "int for a float": (PAD | {"scale": 2}, "attribute scale is INT, expected FLOAT (float)"),
    "attribute value": (GELU | {"approximate": "fast"}, "attribute approximate is 'fast', expected one of"),
    "attribute below its limit": ({"op_type": "CustomLayerNorm", "eps": -1.0}, "attribute eps is -1"),
    "attribute of other numbers": ({"op_type": "CustomRmsNorm", "offset": 2}, "attribute offset is 2"),
    "too many inputs": (RELU | {"inputs": ["x", "x"]}, "2 inputs; it takes 1 (x)"),
    "required input empty": (PAD | {"inputs": ["", "w"]}, "input x is absent; it takes x, weight?, bias?"),
    "dtype": (RELU | {"dtype": "int32"}, "no kernel for these dtypes: x is int32. It takes: float32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_node_that_does_not_fit_is_refused_with_its_name(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(ModelError) as error:
        session(make_model(**arguments))
    assert f"node 'node' ({arguments['op_type']}): {message}" in str(error.value)


def test_all_problems_are_listed_at_once() -> None:
    wrong = node("CustomGelu", ["x"], ["a"], "first", approximate=1)
    nodes = [wrong, node("CustomRelu", ["a"], ["y"], "", depth=1)]
    with pytest.raises(ModelError) as error:
        session(model(nodes, [value("x")], [value("y")]))
    assert "node 'first' (CustomGelu): attribute approximate" in str(error.value)
    assert "node 1 (CustomRelu): unknown attribute depth" in str(error.value)


def test_outputs_must_all_be_named() -> None:
    for outputs in (["y"], ["", "y"], ["y", "b", "c"]):
        graph = model([node("CustomDoubleAndSum", ["x"], outputs)], [value("x")], [value("y", shape=None)])
        with pytest.raises(ModelError, match="the node must name all of: doubled, total"):
            session(graph)


def test_mixed_dtypes_are_checked_together() -> None:
    def pad(x: str, weight: str) -> onnx.ModelProto:
        values = [value("x", x), value("w", weight, (4,))]
        return model([node("CustomPadAffine", ["x", "w"])], values, [value("y", x, None)])

    check_model(pad("float16", "float32"))
    with pytest.raises(ModelError, match="x is float32, weight is float16"):
        check_model(pad("float32", "float16"))


def test_dtypes_are_inferred_through_other_nodes_and_custom_ones() -> None:
    """x -> Cast to int32 and back -> CustomRelu -> CustomRelu -> Cast to int64 -> CustomRelu."""
    nodes = [
        node("Cast", ["x"], ["a"], "cast", "", to=TensorProto.FLOAT16),
        node("CustomRelu", ["a"], ["b"], "good"),
        node("Neg", ["b"], ["c"], "neg", ""),
        node("CustomRelu", ["c"], ["d"], "good too"),
        node("Cast", ["d"], ["e"], "cast2", "", to=TensorProto.INT64),
        node("CustomRelu", ["e"], ["y"], "bad"),
    ]
    with pytest.raises(ModelError) as error:
        session(model(nodes, [value("x")], [value("y", "int64")]))
    assert "'bad' (CustomRelu): no kernel for these dtypes: x is int64" in str(error.value)
    assert "good" not in str(error.value)


def test_weights_count_as_typed_values() -> None:
    nodes = [node("CustomRelu", ["w"], ["y"])]
    with pytest.raises(ModelError, match="x is int64"):
        session(model(nodes, [], [value("y", "int64", (2,))], initializers={"w": np.array([1, 2])}))


def branches(inner: onnx.NodeProto) -> onnx.ModelProto:
    """If(c): relu of x, of the outer scope; else: the node given, inside another If."""
    other = helper.make_graph([node("CustomRelu", ["x"], ["t"])], "then", [], [value("t")])
    nested = helper.make_graph([inner], "nested", [], [value("u")])
    same = helper.make_graph([node("CustomRelu", ["x"], ["v"])], "same", [], [value("v")])
    choice = node("If", ["c"], ["e"], "inner if", "", then_branch=nested, else_branch=same)
    wrong = helper.make_graph([choice], "else", [], [value("e")])
    top = node("If", ["c"], ["y"], "outer if", "", then_branch=other, else_branch=wrong)
    return model([top], [value("x"), value("c", "bool", ())], [value("y")])


def test_nodes_in_subgraphs_are_checked() -> None:
    with pytest.raises(ModelError) as error:
        session(branches(node("CustomRelu", ["x"], ["u"], "deep", wariant="auto")))
    assert (
        "node 'deep' (CustomRelu) in then_branch of node 'inner if' (If) in else_branch of node 'outer if' "
        "(If): unknown attribute wariant" in str(error.value)
    )


def test_nodes_in_subgraphs_see_the_outer_types() -> None:
    fine = branches(node("CustomRelu", ["x"], ["u"], "deep"))
    x, off = -np.ones((2, 4), np.float32), np.array(False)
    np.testing.assert_array_equal(session(fine).run({"x": x, "c": off})["y"], 0 * x)
    fine.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32
    with pytest.raises(ModelError, match="'deep' .*: no kernel for these dtypes: x is int32"):
        session(fine)


def test_nodes_in_functions_are_checked() -> None:
    def calling(inner: onnx.NodeProto) -> onnx.ModelProto:
        call = node("Twice", ["x"], ["y"], "call", "mine")
        body = function("Twice", [node("CustomRelu", ["x"], ["a"], "first"), inner], domain="mine")
        body.value_info.append(value("a"))
        return model([call], [value("x")], [value("y")], functions=[body], domains=["mine"])

    with pytest.raises(ModelError) as error:
        session(calling(node("CustomRelu", ["a"], ["y"], "second", mode="no")))
    assert "node 'second' (CustomRelu) in function mine::Twice: unknown attribute mode" in str(error.value)
    x = np.array([[-1, 2, -3, 4]], np.float32)
    opened = session(calling(node("CustomRelu", ["a"], ["y"], "second")), profile=True)
    np.testing.assert_array_equal(opened.run({"x": x})["y"], np.maximum(x, 0))
    assert len(opened.executed_on()) == 2


def test_an_attribute_that_a_function_passes_on_is_checked_by_type() -> None:
    def passing(kind: Any) -> onnx.ModelProto:
        inner = node("CustomGelu", ["x"], ["y"], "inner")
        inner.attribute.append(onnx.AttributeProto(name="approximate", ref_attr_name="how", type=kind))
        body = function("Any", [inner], domain="mine", attributes=["how"])
        call = node("Any", ["x"], ["y"], "call", "mine", how="tanh")
        return model([call], [value("x")], [value("y")], functions=[body], domains=["mine"])

    check_model(passing(onnx.AttributeProto.STRING))
    with pytest.raises(ModelError, match="attribute approximate is INT, expected STRING"):
        check_model(passing(onnx.AttributeProto.INT))


def test_schema_hash(libraries: dict[str, Path]) -> None:
    record = read_library(libraries["custom_relu"]).records["relu"]
    check_model(make_model("CustomRelu", metadata=exported_by(record)))
    stale = exported_by(record, "0.0.9") | {"twinop.schema.CustomRelu": "0123456789abcdef"}
    with pytest.raises(ModelError) as error:
        session(make_model("CustomRelu", metadata=stale))
    text = str(error.value)
    assert "CustomRelu was exported by twinop 0.0.9 with schema 0123456789abcdef" in text
    assert f"has schema {record.schema_hash}: {record.schema}" in text and "Export the model again" in text


def test_the_domain_version_must_be_the_librarys() -> None:
    graph = chain("CustomRelu", 1)
    graph.opset_import[1].version = 2
    with pytest.raises(ModelError, match="imports custom_domain version 2; the library has version 1"):
        session(graph)


def test_an_op_that_a_given_library_lacks(libraries: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"CustomRelo\): the library has no such op; did you mean Custom"):
        session(make_model("CustomRelo"), library=libraries["custom_relu"])
    with pytest.raises(ModelError, match="the library has no such op; it has: CustomRelu"):
        session(make_model("CustomPadAffine"), library=libraries["custom_relu"])


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for name in ("none.onnx", "long" * 99):
        with pytest.raises(ModelError, match=f"{name}: no such file. Expected a model such as twinop export"):
            session(tmp_path / name)
        with pytest.raises(LibraryError, match=f"{name}: no such file. twinop build makes"):
            session(make_model("CustomRelu"), library=tmp_path / name)
    with pytest.raises(ModelError, match="a folder, not an .onnx file"):
        session(tmp_path)
    (file := tmp_path / "\udcff.onnx").touch()
    with pytest.raises(ModelError, match="opens paths of UTF-8 only. Rename the file or the folder"):
        session(file)


def test_external_data(tmp_path: Path) -> None:
    big = np.arange(1024, dtype=np.float32).reshape(256, 4)
    nodes = [node("Add", ["x", "w"], ["a"], "add", ""), node("CustomRelu", ["a"], ["y"])]
    graph = model(nodes, [value("x", shape=(256, 4))], [value("y", shape=(256, 4))], initializers={"w": big})
    path = tmp_path / "model.onnx"
    onnx.save(graph, path, save_as_external_data=True, location="model.data", size_threshold=0)
    x = np.zeros((256, 4), np.float32)
    np.testing.assert_array_equal(session(path).run({"x": x})["y"], big)
    if ORT_VERSION >= (1, 23):
        np.testing.assert_array_equal(session(path.read_bytes(), folder=tmp_path).run({"x": x})["y"], big)
    with pytest.raises(ModelError, match=r"keeps w in the file model.data: pass the model's path"):
        session(path.read_bytes())
    data = tmp_path / "model.data"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"model.data is cut short \(tensor w\)"):
        session(path)
    data.unlink()
    with pytest.raises(ModelError, match="model.data is missing"):
        session(path)


def test_a_model_that_onnx_runtime_refuses_for_its_own_reasons() -> None:
    with pytest.raises(RunError, match="ONNX Runtime refuses it: .*NoSuchOp"):
        session(model([node("NoSuchOp", domain="")], [value("x")], [value("y")]))
    values = [value("x", "bfloat16"), value("y", "bfloat16")]
    with pytest.raises(
        RunError, match="it has no CPU kernel for Relu with the types of node .* or convert a"
    ):
        session(model([node("Relu", domain="")], values[:1], values[1:]), ["CPUExecutionProvider"])


def test_a_model_without_custom_nodes_needs_no_library() -> None:
    graph = model([node("Relu", domain="")], [value("x")], [value("y")])
    opened = session(graph)
    assert opened.library is None and check_model(graph) == []
    assert opened.run({"x": np.full((1, 4), -1, np.float32)})["y"].sum() == 0


def test_a_body_alone_runs_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model([node("CustomRelu")], [value("x")], [value("y")], functions=[relu_body()])
    x = np.array([[-1, 2, -3, 4]], np.float32)
    assert session(graph).library is not None  # the library wins over the body
    monkeypatch.setattr("twinop.libraries.find.library_folders", lambda: [tmp_path])
    with pytest.warns(RuntimeWarning, match="no custom-op library found for custom_domain, so its"):
        opened = session(graph, profile=True)
    np.testing.assert_array_equal(opened.run({"x": x})["y"], np.maximum(x, 0))
    assert opened.library is None and not opened.executed_on()


def test_a_body_covers_what_the_library_lacks() -> None:
    nodes = [node("CustomRelu", ["x"], ["a"]), node("CustomOther", ["a"], ["y"], "other")]
    other = function("CustomOther", [node("Neg", domain="")])
    opened = session(model(nodes, [value("x")], [value("y")], functions=[other]))
    assert opened.library is not None
    np.testing.assert_array_equal(opened.run({"x": np.ones((1, 4), np.float32)})["y"], -np.ones((1, 4)))


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight is a hole of its data file; on the CPU, it is widened."""
    rows, columns, dtype = 1 << 17, 1 << 12, TensorProto.FLOAT16
    shape, where = (rows, columns), TensorProto.EXTERNAL
    weight = TensorProto(name="w", data_type=dtype, dims=shape, data_location=where)
    weight.external_data.add(key="location", value="m.data")
    nodes, x = [node("CustomLinear", ["x", "w"])], value("x", "float16", ("B", rows))
    made = model(nodes, [x], [value("y", "float16", ("B", columns))])
    made.graph.initializer.append(weight)
    (path := tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(2 * rows * columns)
    monkeypatch.setattr(create_session, "free_bytes", lambda: 10**9)
    said = r"m.onnx takes about 2.15 GB of memory on the CPU, .* and 1 GB are free.*twinop optimize"
    with pytest.raises(ModelError, match=said):
        session(path, ["CPUExecutionProvider"])
