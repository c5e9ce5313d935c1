"""Session.run on the CPU: numpy arrays, errors of kernels, threads, the profile."""

import threading
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

# ------------------------------------------------------------------------------------------- numpy


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
    assert (
        got["f_out"].dtype == f.dtype
        and got["f_out"].tolist() == [1, -2]
        and got["b_out"].tolist() == [True, False]
    )
    with pytest.raises(FeedError, match="from numpy only in models without bfloat16 and 8-bit floats"):
        copying(f="float8_e4m3fn", s="str").run({"f": f, "s": s})

    sequence = helper.make_tensor_sequence_value_info("q", onnx.TensorProto.FLOAT, None)
    first = node("SequenceAt", ["q", "zero"], ["y"], "first", "")
    graph = model([first], [sequence], [value("y", shape=None)], initializers={"zero": np.array(0)})
    assert session(graph).run({"q": [np.ones(3, np.float32)]})["y"].tolist() == [1, 1, 1]
    put = [node("SequenceConstruct", ["x"], ["q"], "put", "")]
    opened = session(model(put, [value("x"), value("b", "bfloat16")], [sequence]))
    with pytest.raises(RunError, match=r"output q is seq.tensor.float.*does not return as arrays"):
        opened.run({"x": np.ones((1, 4), np.float32), "b": np.ones((1, 4), ml_dtypes.bfloat16)})


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
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.randn(seed + 1, 4, generator=torch.Generator().manual_seed(seed))
        for i in range(50):
            feeds = {"x": x} if i % 2 else {"x": x.numpy()}
            if not torch.equal(torch.as_tensor(opened.run(feeds)["y"]), torch.relu(x)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_executed_on_reads_the_profile() -> None:
    nodes = [
        node("CustomRelu", ["x"], ["a"], "named"),
        node("Neg", ["a"], ["b"], "neg", ""),
        node("CustomRelu", ["b"], name=""),
    ]
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
