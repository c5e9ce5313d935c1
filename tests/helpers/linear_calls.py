"""Activations, random tensors and models for the tests of linear."""

from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from torch.nn import functional as F

from twinop.record.dtypes import ELEMENT_TYPES

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def model_of(
    nodes: list[Any], x: list[Any], constants: dict[str, torch.Tensor], kind: int | None = None
) -> onnx.ModelProto:
    """A model of a chain of nodes from x to y, of ONNX's type `kind` or that of the first constant."""
    kind = kind or ELEMENT_TYPES[str(next(iter(constants.values())).dtype).removeprefix("torch.")]
    inputs = [helper.make_tensor_value_info("x", kind, x)]
    outputs = [helper.make_tensor_value_info("y", kind, None)]
    values = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in constants.items()]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("custom_domain", 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, values)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def linear_node(inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("CustomLinear", inputs, [output], output, domain="custom_domain", **attributes)
