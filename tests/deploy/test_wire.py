"""twinop/deploy/wire.py: a file of one protobuf message is written and read without its weights in memory."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from twinop.deploy import wire
from twinop.deploy.custom_nodes import load_model
from twinop.model.files import save

ROWS = 600  # 600 x 512 floats are 1.2 MB


def numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((512, ROWS)).astype(np.float32)


def made(weight: np.ndarray, constant: np.ndarray) -> ir.Model:
    """(x @ weight) @ constant, where the constant is a node's attribute."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(constant)),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "c"], ["y"]),
    ]
    element = helper.np_dtype_to_tensor_dtype(weight.dtype)
    inputs = [helper.make_tensor_value_info("x", element, ["n", weight.shape[0]])]
    outputs = [helper.make_tensor_value_info("y", element, ["n", constant.shape[1]])]
    tensors = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.arange(3), "unused")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 20)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_a_file_is_what_onnx_would_write(dtype: Any, tmp_path: Path) -> None:
    weight, constant = numbers().astype(dtype), np.ones((ROWS, 3), dtype)
    weight = np.concatenate([weight, weight], 1)[:, ::2]  # not in C order
    model = made(weight, constant)
    model.graph.initializers["w"].const_value = ir.tensor(weight, name="w")
    [path] = save(model, tmp_path / "model.onnx", 1 << 40, checks=False)
    wanted, found = ir.to_proto(model), onnx.load(path)
    for each in (wanted, found):
        del each.graph.value_info[:]
    assert found == wanted


def test_weights_stay_in_the_file(tmp_path: Path) -> None:
    weight, constant = numbers(), numbers().T.copy()
    [path] = save(made(weight, constant), tmp_path / "model.onnx", 1 << 40)
    stub = wire.read(path)
    assert stub.ByteSize() < 4096
    whole = path.read_bytes()
    for tensor, array in ((stub.graph.initializer[0], weight), (stub.graph.node[0].attribute[0].t, constant)):
        assert tensor.data_location == TensorProto.EXTERNAL and not tensor.HasField("raw_data")
        place = {entry.key: entry.value for entry in tensor.external_data}
        start, size = int(place["offset"]), int(place["length"])
        assert place["location"] == "model.onnx" and whole[start : start + size] == array.tobytes()
    assert numpy_helper.to_array(stub.graph.initializer[1]).tolist() == [0, 1, 2]


def test_a_view_computes_the_same(tmp_path: Path) -> None:
    [path] = save(made(numbers(), np.ones((ROWS, 3), np.float32)), tmp_path / "model.onnx", 1 << 40)
    view = wire.view(path)
    assert view != path and view.stat().st_size < 16384
    x, cpu = {"x": np.ones((2, 512), np.float32)}, ["CPUExecutionProvider"]
    runs = [ort.InferenceSession(str(each), providers=cpu).run(None, x)[0] for each in (path, view)]
    assert np.array_equal(*runs)
    assert wire.view(view) == view, "it has no weights of its own"


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_a_file_that_ends_too_early(share: float, tmp_path: Path) -> None:
    [path] = save(made(numbers(), numbers().T.copy()), tmp_path / "model.onnx", 1 << 40)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DecodeError):
        wire.read(path)


def test_a_model_is_checked_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = save(made(numbers(), numbers().T.copy()), tmp_path / "model.onnx", 1 << 40)
    monkeypatch.setattr("twinop.deploy.custom_nodes.read_regular", None)
    assert load_model(path).proto.ByteSize() < 4096
