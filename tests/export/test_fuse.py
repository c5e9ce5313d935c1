"""Tests that a sum and the norm after it become one node without a change of bits, where this is allowed."""

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from export_models import CPU, each_exporter, node_types
from models import model, node, value

from twinop import deploy, torch_op
from twinop.export import attach_bodies, export, fuse_sums

RECORDS = torch_op.records()
SHAPE = (3, 4, 16)
NORMS = {"CustomLayerNorm": "CustomAddLayerNorm", "CustomRmsNorm": "CustomAddRmsNorm"}
each_norm = pytest.mark.parametrize("norm", NORMS)


def graph(
    norm: str,
    *,
    dtype: str = "float32",
    residual: Any = SHAPE,
    x: Any = SHAPE,
    inputs: tuple[str, ...] = ("sum", "weight"),
    weight: Any = (16,),
    outputs: tuple[str, ...] = ("y",),
    add: onnx.NodeProto | None = None,
    more: tuple[onnx.NodeProto, ...] = (),
    **attributes: Any,
) -> ir.Model:
    """Makes a model of sum = x + residual and y = norm(sum, weight), with the changes that a case needs."""
    addition = add or node("Add", ["x", "residual"], ["sum"], "add", domain="")
    nodes = [addition, *more, node(norm, inputs, ["y"], "norm", **attributes)]
    declared = {"x": x, "residual": residual, "weight": weight, "bias": weight}
    names = dict.fromkeys(["x", "residual", *inputs[1:]])
    proto = model(
        nodes,
        [value(name, dtype, declared[name]) for name in names if name],
        [value(name, dtype, None) for name in outputs],
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def run(found: ir.Model, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return deploy.session(ir.to_proto(found), CPU).run(feeds)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@each_norm
def test_no_bit_changes(norm: str, dtype: str) -> None:
    # ONNX Runtime has no bfloat16 Add on the CPU.
    for domain in ("custom_domain",) if dtype == "bfloat16" else ("", "custom_domain"):
        check_no_bit_changes(norm, domain, dtype, CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@each_norm
def test_no_bit_changes_on_cuda(norm: str, dtype: str) -> None:
    check_no_bit_changes(norm, "", dtype, ["CUDAExecutionProvider"])


def check_no_bit_changes(norm: str, domain: str, dtype: str, providers: list[str]) -> None:
    add = node("CustomAdd" if domain else "Add", ["x", "residual"], ["sum"], "add", domain=domain)
    inputs = ("sum", "weight", "bias") if norm == "CustomLayerNorm" else ("sum", "weight")

    def build() -> ir.Model:
        found = graph(norm, dtype=dtype, add=add, inputs=inputs, outputs=("y", "sum"), eps=1e-3)
        for name in ("y", "sum"):  # shape inference does not know our ops
            next(v for v in found.graph.outputs if v.name == name).shape = ir.Shape(SHAPE)
        return found

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    feeds = {name: torch.randn(SHAPE, dtype=torch.float64).to(kind) for name in ("x", "residual")}
    feeds |= {name: torch.randn(16, dtype=torch.float64).to(kind) for name in inputs[1:]}
    apart, fused = build(), build()
    assert fuse_sums(fused, RECORDS) == {NORMS[norm]: 1}
    assert node_types(fused) == {NORMS[norm]: 1}
    device = "cuda" if providers[0].startswith("CUDA") else "cpu"
    feeds = {name: tensor.to(device) for name, tensor in feeds.items()}
    expected, found = (deploy.session(ir.to_proto(each), providers).run(feeds) for each in (apart, fused))
    assert list(found) == ["y", "sum"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@each_norm
def test_a_sum_that_nothing_reads_is_not_written(norm: str) -> None:
    """The node and its function omit it, unless another node of the op needs it."""
    feeds = {"x": torch.randn(SHAPE), "residual": torch.randn(SHAPE), "weight": torch.randn(16)}
    expected = deploy.session(ir.to_proto(graph(norm)), CPU).run(feeds)["y"]
    for read in (False, True):
        found = graph(norm, outputs=("y", "sum") if read else ("y",))
        found.graph.outputs[0].shape = ir.Shape(SHAPE)
        fuse_sums(found, RECORDS)
        proto = ir.to_proto(attach_bodies(found))
        assert [len(each.output) for each in (proto.graph.node[0], proto.functions[0])] == [1 + read] * 2
        for session in (deploy.session(proto, CPU), deploy.session(proto, CPU, library=False)):
            torch.testing.assert_close(session.run(feeds)["y"], expected, atol=1e-5, rtol=1e-5)


@each_norm
def test_other_readers_of_the_sum(norm: str) -> None:
    """A node before the norm, a second norm and the graph read the sum; a weight is made between the two."""
    more = (
        node("Neg", ["sum"], ["negative"], "neg", domain=""),
        node("Abs", ["raw"], ["weight"], "abs", domain=""),
        node(norm, ["sum", "weight"], ["second"], "second_norm"),
    )
    nodes = [node("Add", ["x", "residual"], ["sum"], "add", domain=""), *more]
    nodes.append(node(norm, ["sum", "weight"], ["y"], "norm"))
    outputs = ["negative", "y", "second", "sum"]
    proto = model(
        nodes,
        [value("x", shape=SHAPE), value("residual", shape=SHAPE), value("raw", shape=(16,))],
        [value(name, shape=SHAPE) for name in outputs],
    )
    feeds = {"x": torch.randn(SHAPE), "residual": torch.randn(SHAPE), "raw": torch.randn(16)}
    expected = deploy.session(proto, CPU).run(feeds)
    fused = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert fuse_sums(fused, RECORDS) == {NORMS[norm]: 1}  # the sum is made once
    assert node_types(fused) == {"Neg": 1, "Abs": 1, norm: 1, NORMS[norm]: 1}
    found = run(fused, feeds)
    assert list(found) == outputs
    assert all(torch.equal(found[name], expected[name]) for name in outputs)
    onnx.checker.check_model(ir.to_proto(attach_bodies(fused)), full_check=True)


APART: dict[str, dict[str, Any]] = {
    "a bias": {"residual": (16,)},
    "a wider residual": {"x": (1, 4, 16)},
    "unknown sizes": {"x": (None, 4, 16), "residual": (None, 4, 16)},
    "unknown rank": {"x": None, "residual": None},
    "no weight": {"inputs": ("sum",)},
    "not the last dimension alone": {"axis": 1, "weight": (4, 16)},
    "not a sum": {"add": node("Mul", ["x", "residual"], ["sum"], "mul", domain="")},
}


@pytest.mark.parametrize("case", APART.values(), ids=list(APART))
@each_norm
def test_what_stays_apart(norm: str, case: dict[str, Any]) -> None:
    found = graph(norm, **case)
    before = node_types(found)
    assert fuse_sums(found, RECORDS) == {}
    assert node_types(found) == before


@pytest.mark.parametrize(
    "case",
    [
        {"x": ("N", 4, 16), "residual": ("N", 4, 16)},
        {"axis": 2},
        {"axis": -1},
        {"eps": 0.5},
    ],
    ids=str,
)
@each_norm
def test_what_is_fused(norm: str, case: dict[str, Any]) -> None:
    found = graph(norm, **case)
    assert fuse_sums(found, RECORDS) == {NORMS[norm]: 1}
    [fused] = found.graph
    assert fused.attributes.keys() == case.keys() & {"eps"}


def test_mixed_types() -> None:
    """The fused op takes a float32 weight with float16 rows, as the norm does."""
    proto = model(
        [
            node("Add", ["x", "residual"], ["sum"], "add", domain=""),
            node("CustomRmsNorm", ["sum", "weight"], ["y"], "norm", offset=1),
        ],
        [
            value("x", "float16", SHAPE),
            value("residual", "float16", SHAPE),
            value("weight", "float32", (16,)),
        ],
        [value("y", "float16", SHAPE)],
    )
    fused = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert fuse_sums(fused, RECORDS) == {"CustomAddRmsNorm": 1}
    feeds = {"x": torch.randn(SHAPE).half(), "residual": torch.randn(SHAPE).half(), "weight": torch.randn(16)}
    assert torch.equal(run(fused, feeds)["y"], deploy.session(proto, CPU).run(feeds)["y"])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch_op.CustomLayerNorm(16)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(torch_op.add(x, residual)) + residual


@each_exporter
@pytest.mark.parametrize("fuse", [True, False])
def test_export_fuses_unless_told_not_to(exporter: str, fuse: bool, tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    args = (torch.randn(2, 16), torch.randn(2, 16))
    report = export(
        Block(), args, path, exporter=exporter, dynamic={"x": {0: "N"}, "residual": {0: "N"}}, fuse=fuse
    )
    expected = {"CustomAddLayerNorm"} if fuse else {"CustomAdd", "CustomLayerNorm"}
    assert set(report.custom_ops) == expected
    assert report.fused == ({"CustomAddLayerNorm": 1} if fuse else {})
    assert report.parity is not None and report.without_library is not None
