"""Tests that transformers are recognised in the exports of both exporters, and compute the same."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from export_models import CPU
from optimizing import ATTENTION, ONE_LAYER, exported, nodes, optimized, types
from torch import nn

from lab.model_zoo import TINY, batch, encoder
from twinop import deploy
from twinop.export import export
from twinop.optimize import graph as g
from twinop.record.tolerance import difference

pytestmark = pytest.mark.usefixtures("one_thread")
MADE = {  # of one layer
    "bert": {
        "linear+bias": 5, "linear+bias+gelu": 1, "attention": 1, "embedding of known ids": 1,
        "embed_layer_norm": 1, "add_layer_norm": 2,
    },
    "llama": {
        "linear": 5, "linear+gate (silu)": 1, "attention": 1, "rms_norm": 1, "add_rms_norm": 2,
        "rotary embedding of q and k": 1,
    },
}  # fmt: skip
FILES = ("old", "fast")  # that `optimized` writes


@pytest.mark.parametrize("style", MADE)
def test_recognised(style: str, tmp_path: Path) -> None:
    """Whatever the exporter writes becomes the same nodes, and runs at other sizes than the export's."""
    report, model = optimized(exported(style, tmp_path), tmp_path)
    assert report.fused == MADE[style]
    assert not report.skipped
    assert not nodes(model, "MatMul", "Gemm", "Softmax", "Erf", "Sigmoid", "LayerNormalization", "ReduceMean")
    assert not nodes(model, "Transpose")
    assert [str(dim) for dim in model.graph.outputs[0].shape or ()] == ["batch", "length", str(TINY.width)]
    ids, mask = torch.randint(0, TINY.vocabulary, (3, 21)), torch.ones(3, 21, dtype=torch.int64)
    mask[1, :4] = 0  # padding on the left
    mask[2, 9:] = 0
    with torch.no_grad():
        expected = encoder(style, ONE_LAYER, attention=ATTENTION[style])(ids, mask)
    shown = mask.bool()  # torch's sdpa and the exporters differ at hidden tokens
    for library in (None, False):
        found = deploy.session(report.path, CPU, library).run({"ids": ids, "mask": mask})
        y = next(iter(found.values()))
        assert difference(expected[shown], y[shown]) < 1e-5


def test_bert_of_one_length_runs_in_a_cuda_graph(tmp_path: Path) -> None:
    """No node computes with shapes: ONNX Runtime runs such nodes on the CPU."""
    model, path = encoder("bert", ONE_LAYER, attention="sdpa"), tmp_path / "bert.onnx"
    open_batch = {name: {0: "batch"} for name in ("ids", "mask")}
    export(model, batch(TINY, padding=5), path, dynamic=open_batch, verify=False, optimize=False)
    kinds = {"CustomEmbedLayerNorm", "CustomAddLayerNorm", "CustomLinear", "MultiHeadAttention"}
    of_masks = {"right": {"Cast", "ReduceSum"}, None: {"Cast", "Where", "Unsqueeze", "Expand"}}
    for padding, of_mask in of_masks.items():
        _, made = optimized(path, tmp_path, padding=padding)
        assert set(types(made)) == kinds | of_mask


def test_sizes_that_the_inputs_do_not_share(tmp_path: Path) -> None:
    """As torch.onnx.export names them for dynamic_axes={"ids": [0, 1], "mask": [0, 1]}."""
    proto = onnx.load(exported("llama", tmp_path))
    del proto.graph.value_info[:]
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim[:2]):
            size.dim_param = f"{value.name}_dynamic_axes_{axis + 1}"
    report, _ = optimized(proto, tmp_path)
    assert report.fused == MADE["llama"] and not report.skipped
    ids, mask = batch(TINY, padding=5)
    found = [deploy.session(tmp_path / f"{name}.onnx", CPU).run({"ids": ids, "mask": mask}) for name in FILES]
    for expected, y in zip(*(each.values() for each in found), strict=True):
        assert difference(expected, y) < 1e-5


@pytest.mark.parametrize("style", MADE)
def test_padding_on_the_right(style: str, tmp_path: Path) -> None:
    """Its mask becomes lengths, or goes where attention is causal, and the file says so."""
    report, model = optimized(exported(style, tmp_path), tmp_path, padding="right")
    [node] = nodes(model, "MultiHeadAttention")
    if style == "llama":
        assert len(node.inputs) == 3 and node.attributes["unidirectional"].as_int() == 1
    else:
        assert [value is not None for value in node.inputs] == [True, True, True, False, True]
        assert g.rank(node.inputs[4]) == 1 and "unidirectional" not in node.attributes
    assert model.metadata_props["twinop.right_padded"] == "mask"
    assert "promised" in str(report)
    ids, mask = batch(TINY, padding=5)
    with torch.no_grad():
        expected = encoder(style, ONE_LAYER)(ids, mask)
    [found] = deploy.session(report.path, CPU).run({"ids": ids, "mask": mask}).values()
    shown = mask.bool()
    assert difference(expected[shown], found[shown]) < 1e-5


@pytest.mark.parametrize(("style", "dtype"), [("llama", "float16"), ("bert", "bfloat16")])
def test_conversion(style: str, dtype: str, tmp_path: Path) -> None:
    path = exported(style, tmp_path)
    report, model = optimized(path, tmp_path, dtype=dtype)
    kinds = {value.dtype.name.lower() for node in model.graph for value in node.outputs if value.dtype}
    assert dtype in kinds
    assert model.graph.outputs[0].dtype is not None and model.graph.outputs[0].dtype.name.lower() == dtype
    wide = {node.op_type for node in model.graph for v in node.outputs if v.dtype and v.dtype.name == "FLOAT"}
    of_tables = {"Mul", "Concat", "Cos", "Sin", "Reshape", "Unsqueeze", "Slice", "Squeeze", "ReduceMax"}
    assert wide <= {"Cast"} | of_tables
    if dtype == "float16":
        assert report.own_error is not None and report.error < 2e-3
    else:
        assert "compared in its fp32 form" in str(report) and "the CPU does not run the file" in str(report)


def test_for_the_cpu(tmp_path: Path) -> None:
    """Products stay ONNX Runtime's."""
    report, model = optimized(exported("bert", tmp_path), tmp_path, device="cpu")
    fused = {name: count for name, count in MADE["bert"].items() if "linear" not in name}
    assert report.fused == fused
    assert types(model)["MatMul"] == 6 and "CustomLinear" not in types(model)


class VisionBlock(nn.Module):
    """A block of a vision transformer: q, k and v packed, positions, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.mlp = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        x = self.norm(x + self.out(y))
        return x + self.mlp(x)


def test_packed_products(tmp_path: Path) -> None:
    """q, k and v of one product become three, without a transpose between them and attention."""
    path = tmp_path / "vit.onnx"
    options: dict[str, Any] = {"exporter": "torchscript", "dynamic": {"x": {0: "batch"}}}
    export(VisionBlock(), torch.randn(2, 5, 32), path, **options, verify=False, optimize=False)
    report, model = optimized(path, tmp_path)
    assert report.fused["attention"] == 1
    assert types(model)["CustomLinear"] == 6
    assert not nodes(model, "Transpose", "Split", "Gather")
