"""Tests that standard operators become twinop's nodes where both compute the same, and only there."""

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from export_models import CPU, each_exporter, node_types
from models import model, node, value
from torch import nn

from twinop import deploy, torch_op
from twinop.errors import ExportError
from twinop.export import attach_bodies, export, replace_nodes
from twinop.export.standard_nodes import standard_node

OURS = set(torch_op.records())  # before other tests load theirs
RECORDS = {name: record for name, record in torch_op.records().items() if not record.is_backward}
STANDARD = {name: found for name, record in RECORDS.items() if (found := standard_node(record))}


def graph(op_type: str, inputs: int, dtype: str = "float32", **attributes: Any) -> ir.Model:
    names = ["a", "b"][:inputs]
    shapes = {"a": (3, 1, 5), "b": (4, 1)}
    proto = model(
        [node(op_type, names, ["y"], "n", domain="", **attributes)],
        [value(name, dtype, shapes[name]) for name in names],
        [value("y", dtype, (3, 4, 5) if inputs == 2 else (3, 1, 5))],
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def test_the_standard_operators_are_read_off_the_bodies() -> None:
    names = {op: standard.op_type for op, standard in STANDARD.items() if op in OURS}
    assert names == {
        "add": "Add", "mul": "Mul", "pow": "Pow", "softmax": "Softmax", "gelu": "Gelu",
        "sigmoid": "Sigmoid", "tanh": "Tanh", "softplus": "Softplus", "exp": "Exp", "log": "Log",
    }  # fmt: skip


@pytest.mark.parametrize("op", sorted(STANDARD))
def test_each_operator_computes_the_same(op: str) -> None:
    op_type, inputs = STANDARD[op].op_type, len(RECORDS[op].inputs)
    special: dict[str, dict[str, Any]] = {"softmax": {"axis": 0}, "gelu": {"approximate": "tanh"}}
    torch.manual_seed(0)
    feeds = {"a": torch.rand(3, 1, 5) + 0.5, "b": torch.rand(4, 1)}
    feeds = dict(list(feeds.items())[:inputs])
    found = graph(op_type, inputs, **special.get(op, {}))
    expected = deploy.session(ir.to_proto(found), CPU).run(feeds)["y"]
    onnx_name = RECORDS[op].onnx_name
    assert replace_nodes(found, [op]) == {onnx_name: 1}
    assert node_types(found) == {onnx_name: 1}
    torch.testing.assert_close(deploy.session(ir.to_proto(found), CPU).run(feeds)["y"], expected)
    without = deploy.session(ir.to_proto(attach_bodies(found)), CPU, library=False).run(feeds)["y"]
    torch.testing.assert_close(without, expected)


def test_what_is_not_asked_for_stays() -> None:
    found = graph("Relu", 1)
    assert replace_nodes(found, ["add"]) == {}
    assert node_types(found) == {"Relu": 1}


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_integer_sums_stay(dtype: str) -> None:
    found = graph("Add", 2, dtype)
    assert replace_nodes(found, ["add"]) == {}


def test_an_input_of_unknown_dtype_stays() -> None:
    found = graph("Add", 2)
    found.graph.inputs[0].type = None
    assert replace_nodes(found, ["add"]) == {}


def test_sums_of_constants_stay() -> None:
    found = graph("Add", 2)
    for each in found.graph.inputs:
        each.const_value = ir.tensor([1.0])
    assert replace_nodes(found, ["add"]) == {}


@pytest.mark.parametrize("op", ["relu", "silu", "layer_norm", "nothing"])
def test_an_op_without_a_standard_operator_is_refused(op: str) -> None:
    with pytest.raises(
        ExportError, match=f"no standard operator is replaced by an op '{op}'; there are: add"
    ):
        replace_nodes(graph("Add", 2), [op])


class Attention(nn.Module):
    """Calls sums and a softmax as functions: there is no module to replace."""

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores + mask, -1) + 1


@each_exporter
def test_export_replaces_functions_and_the_report_says_so(exporter: str, tmp_path: Path) -> None:
    args = (torch.randn(2, 3, 4, 4), torch.randn(2, 1, 1, 4))
    report = export(
        Attention(), args, tmp_path / "a.onnx", exporter=exporter, dynamic={"scores": [0], "mask": [0]},
        replace=("add", "softmax"),
    )  # fmt: skip
    assert report.replaced == {"CustomAdd": 2, "CustomSoftmax": 1}
    assert report.parity is not None and report.without_library is not None
    assert report.nodes["custom_domain.CustomSoftmax"] == 1


def test_a_replaced_sum_is_fused_with_the_norm_behind_it(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch_op.CustomLayerNorm(8)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self.norm(x + residual)

    args = (torch.randn(2, 8), torch.randn(2, 8))
    report = export(Block(), args, tmp_path / "b.onnx", replace=["add"])
    assert report.fused == {"CustomAddLayerNorm": 1}
    assert "custom_domain.CustomAdd" not in report.nodes
