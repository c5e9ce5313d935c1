"""Outputs whose sizes come from the data, in both runtimes. tests/ops/counted.h has the ops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from abi_files import CPU, FLOAT, INT64, model
from onnx import helper
from torch._dynamo import config

from twinop import deploy, export, torch_op
from twinop.errors import RecordError
from twinop.libraries.library import find_library, read_library

X = torch.tensor([[1.0, -2.0, 3.0, 0.0], [-1.0, 5.0, -6.0, 7.0]])
KEEP = torch.tensor([True, False])


@pytest.fixture(scope="module")
def library() -> Path:
    return find_library("test_counted")


@pytest.fixture(scope="module")
def ops(library: Path) -> Any:
    return torch_op.load(library)


@pytest.mark.parametrize("x", [X, -X, X.abs() + 1, -X.abs(), X[:0], X[0, 0]], ids=range(6))
def test_count_and_write(x: torch.Tensor, ops: Any) -> None:
    """Write finds in the scratch memory what Count left there."""
    y, index, total = ops.positive(x)
    (expected,) = (x.reshape(-1) > 0).nonzero(as_tuple=True)
    assert torch.equal(y, x.reshape(-1)[expected]) and torch.equal(index, expected[None])
    assert y.is_contiguous() and total.tolist() == [len(expected)]


def test_a_size_without_a_bound(ops: Any) -> None:
    x = torch.arange(4.0)
    for times in ([1, 0, 3, 2], [0] * 4, [1000] * 4):
        assert torch.equal(ops.repeated(x, torch.tensor(times)), x.repeat_interleave(torch.tensor(times)))


@pytest.mark.parametrize("keep", [[1, 0, 1], [0, 0, 0], [1, 1, 1], []], ids=str)
@pytest.mark.parametrize("width", [5, 0])
def test_one_launcher(keep: list[int], width: int, ops: Any) -> None:
    x, mask = torch.randn(len(keep), width), torch.tensor(keep, dtype=torch.bool)
    for found, expected in zip(ops.split_rows(x, mask), (x[mask], x[~mask]), strict=True):
        assert torch.equal(found, expected) and found.untyped_storage().nbytes() == 4 * found.numel()


DEFECTS: list[tuple[str, dict[str, torch.Tensor], int, str]] = [
    ("positive", {"x": X}, 5, r"counted n = 9, expected 0 to numel\(x\) = 8"),
    ("positive", {"x": X}, -5, r"counted n = -1, expected 0 to numel\(x\) = 8"),
    ("repeated", {"x": X[0], "times": torch.zeros(4, dtype=torch.int64)}, -1, "n = -1, expected 0 or more"),
    ("split_rows", {"x": X, "keep": KEEP}, 2, r"counted n = 3, expected 0 to x\[0\] = 2"),
]


@pytest.mark.parametrize(("name", "inputs", "error", "said"), DEFECTS)
def test_wrong_counts(name: str, inputs: Any, error: int, said: str, ops: Any, library: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"test\.counted::{name}\(x: .*{said}: a defect of the kernel"):
        getattr(ops, name)(*inputs.values(), error)
    record = read_library(library).records[name]
    types = {each: helper.np_dtype_to_tensor_dtype(value.numpy().dtype) for each, value in inputs.items()}
    node = helper.make_node(
        record.onnx_name, [*inputs], [*record.outputs], "node", domain="test.counted", error=error
    )
    outputs = {each: INT64 if each in ("index", "total") else FLOAT for each in record.outputs}
    session = deploy.session(model([node], types, outputs, test__counted=1), CPU, library)
    with pytest.raises(deploy.RunError, match=rf"node 'node' \(CPU\): .*{name}\(x: .*{said}: a defect"):
        session.run({each: value.numpy() for each, value in inputs.items()})


def test_a_node_omits_an_output(library: Path) -> None:
    node = helper.make_node("CustomPositive", ["x"], ["y", "", "total"], domain="test.counted")
    proto = model([node], {"x": FLOAT}, {"y": FLOAT, "total": INT64}, test__counted=1)
    session = deploy.session(proto, CPU, library)
    for x in (X, -X, X[:0]):
        found = session.run({"x": x.numpy()})
        assert found["y"].tolist() == x[x > 0].tolist() and found["total"].tolist() == [len(found["y"])]


def test_cuda_graphs_are_refused_when_the_session_is_made(library: Path) -> None:
    node = helper.make_node("CustomPositive", ["x"], ["y", "i", "t"], "found", domain="test.counted")
    proto = model([node], {"x": FLOAT}, {"y": FLOAT, "i": INT64, "t": INT64}, test__counted=1)
    with pytest.raises(deploy.ModelError, match=r"'found'.*are data-dependent.*without enable_cuda_graph"):
        deploy.session(proto, CPU, library, enable_cuda_graph=True)


def chain(x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An op on what another one found, and sizes that meet torch's own."""
    y, index, _ = torch.ops.test_counted.positive(x)
    again = torch.ops.test_counted.positive(y - 2)[0]
    return y * 2 + index[0], again, torch.ops.test_counted.split_rows(x.detach(), keep)[0].sum(0)


def test_opcheck(ops: Any) -> None:
    torch.library.opcheck(torch.ops.test_counted.positive, (X.clone().requires_grad_(),))
    torch.library.opcheck(torch.ops.test_counted.split_rows, (X, KEEP))


def test_compiled_in_one_graph_with_gradients(ops: Any) -> None:
    def gradient(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y, again, _ = function(x, KEEP)
        return torch.autograd.grad(y.square().sum() + again.sum(), x)[0]

    torch._dynamo.reset()
    with config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True)
        for x in (X, -X, X.abs() + 3):
            for found, expected in zip(compiled(x, KEEP), chain(x, KEEP), strict=True):
                assert torch.equal(found, expected)
            torch.testing.assert_close(gradient(compiled, x), gradient(chain, x))
    assert torch.equal(gradient(chain, X) != 0, X > 0)


def test_the_bound_is_in_the_graph(ops: Any) -> None:
    program = torch.export.export(Chain(), (X, KEEP))
    ranges = sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values())
    assert (0, 8) in ranges and ranges.count((0, 2)) == 2
    for found, expected in zip(program.module()(-X, ~KEEP), chain(-X, ~KEEP), strict=True):
        assert torch.equal(found, expected)


def test_vmap_is_refused(ops: Any) -> None:
    with pytest.raises(RecordError, match=r"positive has data-dependent output shapes.*without vmap"):
        torch.vmap(ops.positive)(X)


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
        return chain(x, keep)


@export.body(domain="test.counted")
def positive(op: Any, x: Any, *, error: int) -> Any:
    flat = op.Reshape(x, op.Constant(value_ints=[-1]))
    index = op.NonZero(op.Greater(flat, op.CastLike(op.Constant(value_float=0.0), flat)))
    return op.GatherND(flat, op.Transpose(index)), index, op.Slice(op.Shape(index), [1], [2])


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_exported(exporter: str, ops: Any, library: Path, tmp_path: Path) -> None:
    """The sizes are dimensions without a number; the file runs where they are others, or 0."""
    path = tmp_path / "m.onnx"
    report = export.export(Chain(), (X, KEEP), path, exporter=exporter, library=library, optimize=False)
    assert report.parity is not None and report.parity.equal
    assert report.without_reason == "no function body: CustomSplitRows"
    assert report.nodes["test.counted.CustomPositive"] == 2
    (first, *_) = onnx.load(path).graph.output
    assert first.type.tensor_type.shape.dim[0].dim_param
    session = deploy.session(path, CPU, library)
    for x, keep in ((X, KEEP), (-X, ~KEEP), (-X.abs(), KEEP & ~KEEP)):
        found = session.run({"x": x.numpy(), "keep": keep.numpy()})
        for array, expected in zip(found.values(), chain(x, keep), strict=True):
            np.testing.assert_array_equal(array, expected.numpy())


class Positive(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.ops.test_counted.positive(x)


def test_the_body_runs_without_the_library(ops: Any, library: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    report = export.export(Positive(), (X,), path, exporter="torchscript", library=library, optimize=False)
    assert report.without_library is not None and report.without_library.equal
    alone = deploy.session(path, CPU, False)
    for x in (X, -X, -X.abs()):
        for array, expected in zip(alone.run({"x": x.numpy()}).values(), ops.positive(x), strict=True):
            np.testing.assert_array_equal(array, expected.numpy())


def test_onnx_infers_no_size() -> None:
    from twinop.record.op_schema import infer_outputs
    from twinop.record.shapes import Unknown

    record = read_library(find_library("test_counted")).records["split_rows"]
    inferred = infer_outputs(record, {"x": ("float32", (3, 4)), "keep": ("bool", (3,))}, {"error": 0})
    assert inferred == {name: ("float32", (Unknown(), 4)) for name in ("kept", "left")}
