"""A comparison with torch copies no weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from models import make_model
from onnx import TensorProto

from twinop.deploy import node_parity
from twinop.deploy.run_onnx import _Values


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
