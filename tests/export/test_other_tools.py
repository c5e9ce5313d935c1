"""Tests that tools of others read the files: onnx.inliner, ONNX Runtime's quantization and float16."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import onnxruntime as ort
import onnxscript.rewriter
import torch
from export_models import plain
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.optimizer import optimize_model

import twinop
from twinop import torch_op
from twinop.export import attach_bodies, export


class Call(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> Any:
        found = [getattr(torch_op, name)(*[x] * (2 if name == "swiglu" else 1)) for name in self.names]
        return tuple(found) if len(found) > 1 else found[0]


def test_the_inliner_and_a_conversion_to_float16(tmp_path: Path) -> None:
    """The inliner reads attributes at their defaults, and the bodies run in fp16."""
    x, path = torch.tensor([[-1.0, -2.0, 3.0, 0.5]]), tmp_path / "m.onnx"
    net = Call("rms_norm", "layer_norm", "softmax", "gelu", "relu", "swiglu")
    plain(net, (x,), path, exporter="torchscript")
    inlined = onnx.inliner.inline_local_functions(onnx.load(path))
    half = convert_float_to_float16(onnx.load(path), keep_io_types=True)
    for model, rtol, atol in ((inlined, 1e-5, 1e-6), (half, 4e-3, 2e-3)):
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for name, expected, found in zip(net.names, net(x), session.run(None, {"x": x.numpy()}), strict=True):
            np.testing.assert_allclose(found, expected.numpy(), rtol=rtol, atol=atol, err_msg=name)


def test_quantize_dynamic(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
    x, path = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), tmp_path / "m.onnx"
    export(torch_op.replace_modules(net), (x,), path, exporter="dynamo", device="cpu")
    weights = {weight.name for weight in onnx.load(path).graph.initializer}
    assert weights.isdisjoint(value.name for value in onnx.load(path).graph.value_info)
    quantize_dynamic(path, tmp_path / "int8.onnx")
    assert any("Integer" in node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node)


def test_absent_inputs_at_the_end_are_not_named(tmp_path: Path) -> None:
    """onnxslim removes the inputs that a body does not read, and leaves the nodes that name them."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch_op.layer_norm(x, weight)

    plain(Net(), (torch.randn(2, 16), torch.ones(16)), tmp_path / "m.onnx", exporter="torchscript")
    [node] = onnx.load(tmp_path / "m.onnx").graph.node
    assert node.op_type == "CustomLayerNorm" and len(node.input) == 2


def errors(model: onnx.ModelProto, inputs: dict[str, np.ndarray], expected: np.ndarray) -> list[float]:
    """Returns the largest error of the ops, and that of the function bodies."""
    found = []
    for libraries in (twinop.libraries_for(model), []):
        options = ort.SessionOptions()
        for path in libraries:
            options.register_custom_ops_library(path)
        session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        [result] = session.run(None, inputs)
        found.append(float(np.abs(result - expected).max()))
    return found


def version_20_to_21(path: Path) -> onnx.ModelProto:
    return attach_bodies(onnx.version_converter.convert_version(onnx.load(path), 21))


def preprocessed(path: Path) -> onnx.ModelProto:
    quant_pre_process(path, path.with_name("new.onnx"), skip_symbolic_shape=True, skip_optimization=True)
    return onnx.load(path.with_name("new.onnx"))


def transformers_optimizer(path: Path) -> onnx.ModelProto:
    return optimize_model(str(path), "bert", num_heads=2, hidden_size=16, opt_level=0).model


TOOLS = {
    "onnx.version_converter": version_20_to_21,
    "quant_pre_process": preprocessed,
    "onnxruntime.transformers": transformers_optimizer,
    "onnxscript.rewriter": lambda path: onnxscript.rewriter.rewrite(onnx.load(path)),
}


def test_tools_keep_ops_and_bodies(tmp_path: Path) -> None:
    x, net = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)), Call("gelu")
    plain(net, (x,), tmp_path / "m.onnx", exporter="torchscript")
    for name, tool in TOOLS.items():
        model = tool(tmp_path / "m.onnx")
        assert [node.op_type for node in model.graph.node] == ["CustomGelu"], name
        assert max(errors(model, {"x": x.numpy()}, net(x).numpy())) < 1e-5, name


def test_merged_models(tmp_path: Path) -> None:
    x, net = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)), Call("gelu")
    export(net, (x,), tmp_path / "m.onnx", exporter="torchscript", bodies=False)
    one = onnx.load(tmp_path / "m.onnx")
    through = [(one.graph.output[0].name, "x")]
    merged = attach_bodies(onnx.compose.merge_models(one, one, through, prefix1="a_", prefix2="b_"))
    assert max(errors(merged, {"a_x": x.numpy()}, net(net(x)).numpy())) < 1e-5
