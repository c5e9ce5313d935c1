"""Session.run on the CPU: numpy, torch and OrtValue feeds, without copies, and what feeds may get wrong."""

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import ORT_VERSION, chain, make_model, model, node, value
from onnx import helper

from twinop.deploy import FeedError, RunError, Session, session

DTYPES = ["float32", "float16", "bfloat16", "float64"]
BINDS_BFLOAT16 = ORT_VERSION >= (1, 20)


@pytest.fixture(autouse=True)
def _bfloat16_needs_1_20(request: pytest.FixtureRequest) -> None:
    parameters = getattr(request.node, "callspec", None)
    if not BINDS_BFLOAT16 and parameters is not None and "bfloat16" in parameters.params.values():
        pytest.skip("this ONNX Runtime takes no bfloat16 feeds from Python")


@pytest.fixture(scope="module")
def relu() -> Session:
    return session(make_model("CustomRelu"))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The addresses that a run binds, by input and output name."""
    addresses: dict[str, int] = {}

    class Spy:
        def __init__(self, inner: Any) -> None:
            self._binding = original(inner)

        def bind_input(self, name: str, *arguments: Any) -> None:
            addresses[name] = arguments[-1]
            self._binding.bind_input(name, *arguments)

        def bind_output(self, name: str, *arguments: Any) -> None:
            if len(arguments) > 1:
                addresses[name] = arguments[-1]
            self._binding.bind_output(name, *arguments)

        def get_outputs(self) -> Any:
            return self._binding.get_outputs()

    original = onnxruntime.SessionIOBinding
    run = Session._tensor_runner

    def spying(self: Session) -> Any:
        runner = run(self)
        inner = runner._inner

        class Inner:
            def run_with_iobinding(self, binding: Spy, options: Any) -> None:
                inner.run_with_iobinding(binding._binding, options)

        runner._inner = Inner()
        monkeypatch.setattr(onnxruntime, "SessionIOBinding", lambda _: Spy(inner))
        return runner

    monkeypatch.setattr(Session, "_tensor_runner", spying)
    yield addresses


# ------------------------------------------------------------------------------------------- numpy


@pytest.mark.parametrize("dtype", DTYPES)
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
    if not BINDS_BFLOAT16:
        return
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


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_bfloat16_on_an_old_runtime(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(make_model("CustomRelu", "bfloat16"))
    monkeypatch.setattr(onnxruntime, "__version__", "1.18.1")
    x = make((2, 4), dtype=ml_dtypes.bfloat16 if make is np.zeros else torch.bfloat16)
    with pytest.raises(RunError, match="onnxruntime 1.18.1 takes no bfloat16 .*use 1.20 or newer"):
        opened.run({"x": x})


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


# ------------------------------------------------------------------------------------------- torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_torch_tensors_are_bound_in_place(dtype: str, shape: tuple[int, ...], bound: dict[str, int]) -> None:
    opened = session(make_model("CustomRelu", dtype))
    x = torch.randn(shape).to(getattr(torch, dtype))
    y = opened.run({"x": x})["y"]
    assert y.dtype == x.dtype and torch.equal(y, torch.relu(x))
    if x.numel():
        assert bound == {"x": x.data_ptr(), "y": y.data_ptr()}


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
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


def test_ort_values(relu: Session) -> None:
    x = np.array([[-1, 2, -3, 4]], np.float32)
    y = relu.run({"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})["y"]
    assert isinstance(y, onnxruntime.OrtValue)
    np.testing.assert_array_equal(y.numpy(), np.maximum(x, 0))
    with pytest.raises(FeedError, match=r"x is float64\[1, 4\], the model takes float32\[N, 4\]"):
        relu.run({"x": onnxruntime.OrtValue.ortvalue_from_numpy(x.astype(np.float64))})


# ------------------------------------------------------------------------------------------- wrong feeds


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_wrong_feeds(make: Any, relu: Session) -> None:
    double = np.float64 if make is np.zeros else torch.float64
    half = np.complex64 if make is np.zeros else torch.complex64
    good = make((2, 4), dtype=np.float32 if make is np.zeros else torch.float32)
    cases = [
        ({"z": good}, r"input missing: x \(float32\[N, 4\]\); given: z"),
        ({"x": good, "z": good}, "the model has no input 'z'; its inputs: x"),
        ({}, "input missing: x .*given: none"),
        (
            {"x": make((2, 4), dtype=double)},
            r"x is float64\[2, 4\].*takes float32\[N, 4\]: convert it to float32",
        ),
        ({"x": make((2, 4), dtype=half)}, "x is complex64.*convert it to float32"),
        ({"x": good[0]}, r"x is float32\[4\].*it must have 2 dimensions, not 1"),
        ({"x": good[:, :3]}, r"x is float32\[2, 3\].*dimension 1 must be 4, not 3"),
    ]
    for feeds, message in cases:
        with pytest.raises(FeedError, match=message):
            relu.run(feeds)


def test_what_is_not_a_dict_of_inputs(relu: Session) -> None:
    array = np.ones((2, 4), np.float32)
    start = r'run takes a dict of the inputs by name .*: run\(\{"x": x\}\); given: '
    cases: list[tuple[Any, Any, str]] = [
        (torch.ones(2, 4), torch.ones(2, 4), "a torch tensor and a torch tensor$"),
        (array, None, "a numpy array$"),
        ({"x": array}, array, "a dict and a numpy array$"),
        ({"x": array}, "y", "a dict and a str$"),
        (None, None, "nothing$"),
        (None, {"x": array}, "a dict; onnxruntime's own run has the outputs first, this one the inputs"),
        (["y"], {"x": array}, "a list and a dict; onnxruntime's own run has the outputs first"),
    ]
    for feeds, outputs, message in cases:
        with pytest.raises(FeedError, match=start + message):
            relu.run(feeds, outputs)


def test_feeds_of_several_kinds() -> None:
    opened = session(make_model("CustomPadAffine", shape=(4,), inputs=["x", "w"]))
    array, tensor = np.ones(4, np.float32), torch.ones(4)
    ort = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    for first, second, message in (
        (array, tensor, "w is a torch tensor and others are numpy arrays"),
        (array, ort, "w is an OrtValue and others are numpy arrays"),
        (tensor, array, "w is a numpy array and others are torch tensors"),
        (ort, tensor, "w is a torch tensor and others are OrtValues"),
        (tensor, [1.0], "w is a list and others are torch tensors"),
    ):
        with pytest.raises(FeedError, match=message):
            opened.run({"x": first, "w": second})
    with pytest.raises(FeedError, match="x is a set, not an array|x is object"):
        opened.run({"x": {1}, "w": array})
    with pytest.raises(FeedError, match="x on cpu, w on meta. Move them to one"):
        opened.run({"x": tensor, "w": tensor.to("meta")})


def test_tensors_without_readable_memory(relu: Session) -> None:
    from torch._subclasses import FakeTensorMode

    x = torch.ones(2, 4)
    with pytest.raises(FeedError, match="x is a meta tensor: it has no data to run on"):
        relu.run({"x": x.to("meta")})
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(FeedError, match=r"x is sparse \(torch.sparse_.*\): pass x.to_dense\(\)"):
            relu.run({"x": sparse})
    with FakeTensorMode() as mode, pytest.raises(FeedError, match="x has no memory of its own to read"):
        relu.run({"x": mode.from_tensor(x)})
    with pytest.raises(FeedError, match="x has no memory of its own to read"):
        torch.func.vmap(lambda row: relu.run({"x": row})["y"])(torch.ones(3, 2, 4))


def test_what_a_kernel_refuses_is_one_message() -> None:
    opened = session(make_model("CustomPadAffine", pads=[-1, 0]))
    for x in (np.ones((2, 4), np.float32), torch.ones(2, 4)):
        with pytest.raises(RunError) as error:
            opened.run({"x": x})
        assert str(error.value).startswith(
            "CustomPadAffine node 'node' (CPU): custom_domain::pad_affine(x: float32[2, 4]"
        )
        assert "pads must be two numbers >= 0" in str(error.value)


# ------------------------------------------------------------------------------------------- threads, profile


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
