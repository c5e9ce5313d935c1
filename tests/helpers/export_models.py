"""What the tests of the export share: the exporters, and small ONNX models without types or bodies."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import onnx
import op_bodies  # noqa: F401 (the test ops)
import pytest
import torch
from onnx import helper

from twinop.export import export
from twinop.record.op_spec import DOMAIN

EXPORTERS = ("dynamo", "torchscript")
each_exporter = pytest.mark.parametrize("exporter", EXPORTERS)
CPU = ["CPUExecutionProvider"]
plain = partial(export, optimize=False)


class Numbers(torch.nn.Module):
    """Computes a function."""

    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.dropout = torch.nn.Dropout()

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x)


def model_of(nodes: list[str], inputs: str, opset: int = 20) -> onnx.ModelProto:
    """Parses a model from ONNX's text form; the types of intermediate values stay unknown."""
    text = f'''<ir_version: 10, opset_import: ["": {opset}, "{DOMAIN}": 1]>
        g ({inputs}) => () {{ {chr(10).join(nodes)} }}'''
    model = onnx.parser.parse_model(text)
    for node in list(model.graph.node):
        if node.domain == DOMAIN:
            model.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in node.output if n)
    return model


def each_by_one_exporter(name: str, kinds: Iterable[Any], left_out: Any = ()) -> pytest.MarkDecorator:
    """Parametrizes by kind and exporter. In CI each kind meets one or is left out; slow tests have both."""
    return pytest.mark.parametrize(
        (name, "exporter"),
        [
            pytest.param(
                kind, exporter, marks=() if (i + j) % 2 == 0 and kind not in left_out else pytest.mark.slow
            )
            for i, kind in enumerate(kinds)
            for j, exporter in enumerate(EXPORTERS)
        ],
    )
