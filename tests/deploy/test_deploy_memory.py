"""What a model takes on the CPU is known before a session is opened."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from models import make_model
from onnx import TensorProto, helper

from twinop import deploy
from twinop.deploy import create_session, node_parity
from twinop.deploy.custom_nodes import load_model
from twinop.deploy.errors import ModelError
from twinop.deploy.run_onnx import _Values

_ROWS, _COLUMNS = 1 << 17, 1 << 12


def stored(folder: Path, op: str, domain: str, dtype: int, *shape: int) -> Path:
    """Writes a model of one matmul whose weight is a hole of its data file."""
    weight = TensorProto(name="w", data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="m.data")
    kind = TensorProto.FLOAT16
    table = helper.make_node("Gather", ["w", "ids"], ["rows"])
    nodes = [helper.make_node(op, ["x", "w"], ["y"], domain=domain)]
    graph = helper.make_graph(
        [table] if op == "Gather" else nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["B", _ROWS])],
        [helper.make_tensor_value_info("y", kind, ["B", _COLUMNS])],
        [weight],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("custom_domain", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "m.onnx")
    with (folder / "m.data").open("wb") as file:
        file.truncate(2 * _ROWS * _COLUMNS)
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("op", "dtype", "times"),
    [
        ("CustomLinear", TensorProto.FLOAT16, 4), ("CustomLinear", TensorProto.BFLOAT16, 4),
        ("CustomLinearQ", TensorProto.UINT8, 1), ("MatMul", TensorProto.FLOAT, 4),
        ("Gather", TensorProto.FLOAT16, 0), ("MatMul", 99, 0),
    ],
)  # fmt: skip
def test_copies_of_weights(op: str, dtype: int, times: int, tmp_path: Path) -> None:
    domain = "custom_domain" if op.startswith("Custom") else ""
    model = load_model(stored(tmp_path, op, domain, dtype, _ROWS // 2, _COLUMNS))
    assert create_session.cpu_bytes(model) == times * _ROWS * _COLUMNS // 2


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, "CustomLinear", "custom_domain", TensorProto.FLOAT16, _ROWS, _COLUMNS)
    monkeypatch.setattr(create_session, "free_bytes", lambda: 10**9)
    said = (
        r"m.onnx takes about 2.15 GB of memory on the CPU, .* and 1 GB are free.*twinop optimize --device cpu"
    )
    with pytest.raises(ModelError, match=said):
        deploy.session(path, ["CPUExecutionProvider"])


def test_a_comparison_with_torch_copies_no_weights() -> None:
    model = make_model("CustomLinear", inputs=("x", "w"))
    model.graph.initializer.add(name=model.graph.input.pop().name, data_type=TensorProto.FLOAT, dims=[4, 4])
    assert [each.name for each in node_parity.observed(model).graph.output] == ["y", "x"]


@pytest.mark.parametrize("length", [{}, {"length": "8"}])
def test_a_comparison_with_torch_reads_data_behind_links(length: dict[str, str], tmp_path: Path) -> None:
    """ONNX Runtime takes a data file with a second name, which onnx takes for an attack."""
    (tmp_path / "m.data").write_bytes(b"skip" + np.array([1, 2], np.float32).tobytes())
    (tmp_path / "other.data").hardlink_to(tmp_path / "m.data")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": "m.data", "offset": "4"} | length).items():
        weight.external_data.add(key=key, value=value)
    values = _Values({}, onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight])), tmp_path, "cpu")
    assert values["w"].tolist() == [1, 2]
