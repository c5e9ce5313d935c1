"""Session.run on torch tensors in CPU memory: in place, without copies."""

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models import make_model, model, node, value

from twinop.deploy import Session, session
from twinop.deploy.torch_binding import TensorRunner
from twinop.record.dtypes import FLOATING


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_torch_tensors_are_bound_in_place(dtype: str, shape: tuple[int, ...], bound: dict[str, int]) -> None:
    opened = session(make_model("CustomRelu", dtype))
    x = torch.randn(shape).to(getattr(torch, dtype))
    y = opened.run({"x": x})["y"]
    assert y.dtype == x.dtype and torch.equal(y, torch.relu(x))
    if x.numel():
        assert bound == {"x": x.data_ptr(), "y": y.data_ptr()}


@pytest.mark.parametrize("dtype", [*FLOATING, "bool"])
def test_torch_outputs_of_unknown_shape_come_by_dlpack(dtype: str) -> None:
    if dtype == "bool":
        graph = model([node("Not", domain="")], [value("x", "bool", None)], [value("y", "bool", None)])
        x = torch.tensor([True, False])
        expected = ~x
    else:
        graph = make_model("CustomRelu", dtype, None)
        x = torch.randn(2, 3, 4).to(getattr(torch, dtype))
        expected = torch.relu(x)
    opened = session(graph)
    y = opened.run({"x": x})["y"]
    del opened  # the output outlives its session
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    y.zero_()


def test_torch_layouts(relu: Session) -> None:
    base = torch.randn(4, 8)
    misaligned = torch.randn(17)[1:].view(4, 4)
    for x in (base[:, ::2], base.T[:4, :4], torch.randn(1, 4).expand(5, 4), misaligned, base[:, :4]):
        before = x.clone()
        assert torch.equal(relu.run({"x": x})["y"], torch.relu(x)) and torch.equal(x, before)
    negated = torch._neg_view(torch.ones(2, 4))  # -1 by a flag, not in memory; what .conj().imag gives
    assert negated.is_neg() and relu.run({"x": negated})["y"].sum() == 0
    assert relu.run({"x": torch.complex(base, -base).conj().imag[:, :4]})["y"].equal(base[:, :4].relu())
    assert relu.run({"x": torch.nn.Parameter(base[:, :4])})["y"].requires_grad is False


def test_torch_through_a_chain_and_two_inputs(torch_ops: Any) -> None:
    opened = session(make_model("CustomPadAffine", inputs=["x", "", "b"], shape=(4,), pads=[1, 2]))
    x, b = torch.randn(4), torch.randn(4)
    assert torch.equal(opened.run({"b": b, "x": x})["y"], torch_ops.pad_affine(x, None, b, pads=[1, 2]))


def test_an_input_that_is_also_an_output(relu: Session) -> None:
    """ONNX Runtime hands back the input's memory; a session returns a tensor of its own."""
    graph = model([node("CustomRelu")], [value("x")], [value("x"), value("y")])
    x = -torch.ones(2, 4)
    got = session(graph).run({"x": x})
    assert torch.equal(got["x"], x) and got["x"].data_ptr() != x.data_ptr() and got["y"].sum() == 0
    assert torch.equal(session(graph).run({"x": x}, ["x"])["x"], x)


def test_weights_as_outputs() -> None:
    weight = np.arange(4, dtype=np.float32)
    nodes = [node("Identity", ["w"], ["same"], "same", ""), node("CustomRelu")]
    outputs = [value("y"), value("w", shape=(4,)), value("same", shape=(4,))]
    opened = session(model(nodes, [value("x")], outputs, initializers={"w": weight}))
    for _ in range(2):
        got = opened.run({"x": torch.ones(1, 4)})
        assert got["w"].tolist() == got["same"].tolist() == [0, 1, 2, 3]
        got["w"].zero_(), got["same"].zero_()


def test_a_wrongly_declared_output_shape_is_no_obstacle() -> None:
    """ONNX Runtime only warns of it; memory prepared for that shape would not fit."""
    for shape in ((2, 5), ("N", 7), ("N", 4, 1)):
        graph = model([node("CustomRelu")], [value("x", shape=("N", "M"))], [value("y", shape=None)])
        graph.graph.output[0].CopyFrom(value("y", shape=shape))
        opened = session(graph)
        for rows in (2, 3):
            x = torch.randn(rows, 4)
            assert torch.equal(opened.run({"x": x})["y"], torch.relu(x))


def test_sizes_not_named_by_an_input_are_left_to_onnx_runtime() -> None:
    graph = model([node("NonZero", domain="")], [value("x")], [value("y", "int64", (2, "count"))])
    got = session(graph).run({"x": torch.tensor([[0.0, 1, 0, 1]])})["y"]
    assert got.dtype == torch.int64 and got.tolist() == [[0, 0], [1, 3]]


def test_a_tensor_keeps_the_memory_of_an_output_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's, on CUDA, which a copy of its address does not keep."""

    class Value:
        def device_name(self) -> str:
            return "cuda"

        def shape(self) -> list[int]:
            return [2]

        def data_ptr(self) -> int:
            return 256

    held = list[Any]()

    def keep(memory: Any, device: str) -> torch.Tensor:
        held.append(memory)
        return torch.zeros(2).byte()

    monkeypatch.setattr(torch, "as_tensor", keep)
    runner = TensorRunner.__new__(TensorRunner)
    runner._dtypes, runner._cuda = {"y": torch.float8_e4m3fn}, None
    value = Value()
    seen = weakref.ref(value)
    spec: Any = SimpleNamespace(name="y", type="tensor(float8e4m3fn)")
    assert runner._to_torch(value, spec).dtype is torch.float8_e4m3fn
    del value
    assert seen() is not None and held[0].__cuda_array_interface__["data"] == (256, False)
