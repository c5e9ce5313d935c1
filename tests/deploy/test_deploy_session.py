"""Session.run on the CPU: numpy arrays, torch tensors without copies, threads, the profile."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from models import chain, make_model, model, node, value
from onnx import helper

from twinop.deploy import FeedError, RunError, Session, session
from twinop.record.dtypes import FLOATING


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_numpy(dtype: str, shape: tuple[int, int]) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).standard_normal(shape).astype(kind)
    y = session(make_model("CustomRelu", dtype)).run({"x": x})["y"]
    assert y.dtype == kind and y.shape == shape
    np.testing.assert_array_equal(y, np.maximum(x, kind.type(0)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numpy_strides_scalars_and_lists(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    opened = session(make_model("CustomRelu", dtype, None))
    x = np.arange(-6, 6).reshape(3, 4).astype(kind)
    for view in (x.T, x[::-1, ::2], np.asfortranarray(x), x[1, 2]):
        np.testing.assert_array_equal(opened.run({"x": view})["y"], np.maximum(view, kind.type(0)))
    assert opened.run({"x": kind.type(-2)})["y"].shape == ()
    if dtype == "float32":
        with pytest.raises(FeedError, match="x is float64.*convert it to float32"):
            opened.run({"x": [[-1.0]]})  # a list is an array of float64


def test_numpy_other_types() -> None:
    """Strings, bools and 8-bit floats pass through; so do sequences."""

    def copying(**dtypes: str) -> Session:
        copies = [node("Identity", [name], [f"{name}_out"], name, "") for name in dtypes]
        inputs = [value(name, dtype, ("N",)) for name, dtype in dtypes.items()]
        outputs = [value(f"{name}_out", dtype, ("N",)) for name, dtype in dtypes.items()]
        return session(model(copies, inputs, outputs))

    s, b, f = np.array(["a", "bc"]), np.array([True, False]), np.array([1, -2], ml_dtypes.float8_e4m3fn)
    got = copying(s="str", b="bool").run({"s": s, "b": b})
    assert got["s_out"].tolist() == ["a", "bc"] and got["b_out"].tolist() == [True, False]
    got = copying(f="float8_e4m3fn", b="bool").run({"f": f, "b": b})
    assert got["f_out"].dtype == f.dtype and got["f_out"].tolist() == [1, -2]
    assert got["b_out"].tolist() == [True, False]
    with pytest.raises(FeedError, match="from numpy only in models without bfloat16 and 8-bit floats"):
        copying(f="float8_e4m3fn", s="str").run({"f": f, "s": s})

    sequence = helper.make_tensor_sequence_value_info("q", onnx.TensorProto.FLOAT, None)
    first = node("SequenceAt", ["q", "zero"], ["y"], "first", "")
    graph = model([first], [sequence], [value("y", shape=None)], initializers={"zero": np.array(0)})
    assert session(graph).run({"q": [np.ones(3, np.float32)]})["y"].tolist() == [1, 1, 1]


def test_an_input_with_a_default_may_be_left_out() -> None:
    graph = model(
        [node("Add", ["x", "w"], ["y"], "add", "")],
        [value("x"), value("w", shape=(4,))],
        [value("y")],
        initializers={"w": np.ones(4, np.float32)},
    )
    x = np.zeros((1, 4), np.float32)
    opened = session(graph)
    assert opened.run({"x": x})["y"].sum() == 4
    assert opened.run({"x": x, "w": x[0]})["y"].sum() == 0
    assert opened.run({"x": torch.zeros(1, 4)})["y"].sum() == 4
    assert opened.run({"x": torch.zeros(1, 4), "w": torch.zeros(4)})["y"].sum() == 0


def test_wanted_outputs() -> None:
    opened = session(make_model("CustomDoubleAndSum"))
    x = np.ones((2, 4), np.float32)
    assert list(opened.run({"x": x})) == ["doubled", "total"]
    assert opened.run({"x": x}, outputs=["total"])["total"].tolist() == [4, 4]
    twice = ["total", "doubled", "total"]
    for each in (opened, session(make_model("CustomDoubleAndSum", shape=None))):
        assert list(each.run({"x": torch.ones(2, 4)}, twice)) == ["total", "doubled"]
    with pytest.raises(FeedError, match="the model has no output 'sum'; its outputs: doubled, total"):
        opened.run({"x": x}, outputs=["sum"])


def test_sixteen_threads_on_one_session() -> None:
    opened = session(chain("CustomRelu", 3))

    def are_equal(seed: int) -> bool:
        x = torch.randn(seed + 1, 4, generator=torch.Generator().manual_seed(seed))
        found = [opened.run({"x": x if i % 2 else x.numpy()})["y"] for i in range(50)]
        return all(torch.equal(torch.as_tensor(each), torch.relu(x)) for each in found)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(are_equal, range(16)))


def test_executed_on_reads_the_profile() -> None:
    nodes = [node("CustomRelu", ["x"], ["a"], "named"), node("Neg", ["a"], ["b"], "neg", "")]
    nodes.append(node("CustomRelu", ["b"], name=""))
    opened = session(model(nodes, [value("x")], [value("y")]), profile=True)
    for _ in range(3):
        opened.run({"x": np.ones((1, 4), np.float32)})
    runs = opened.executed_on()
    assert [(run.node, run.op_type, run.provider, run.runs) for run in runs] == [
        ("named", "CustomRelu", "CPUExecutionProvider", 3),
        ("CustomRelu_2", "CustomRelu", "CPUExecutionProvider", 3),
    ]
    assert all(run.microseconds >= 0 for run in runs) and opened.executed_on() == runs
    assert {run.op_type for run in opened.executed_on(custom_only=False)} == {"CustomRelu", "Neg"}


def test_executed_on_needs_a_recording(relu: Session) -> None:
    with pytest.raises(RunError, match="nothing was recorded: make the session with profile=True"):
        relu.executed_on()


def test_nothing_is_left_behind_by_a_profile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = session(make_model("CustomRelu"), profile=True)
    opened.run({"x": np.ones((1, 4), np.float32)})
    opened.executed_on()
    del opened
    assert not list(tmp_path.iterdir())


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
