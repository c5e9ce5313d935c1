"""Tests that no small constant vanishes: in the folding of exports, in `twinop optimize`, in 16 bits."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from optimizing import optimized, parsed, types, weights
from other_sizes import both

from twinop import deploy, torch_op
from twinop.export import export
from twinop.model.folding import fold_constants, hidden

ZEROS = np.zeros((2, 3), np.float32)
NUMBERS = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
ROWS = "g (float[N, 3] x) => (float[N, 3] y)"


def constants(**numbers: float) -> str:
    lines = (f"{name} = Constant <value = float {{{number!r}}}> () " for name, number in numbers.items())
    return "".join(lines)


FOLDED = {
    "add": (constants(c=1e-10) + "s = Add (x, c) y = Log (s)", ZEROS, ["Add", "Log"]),
    "add, turned": (constants(c=1e-10) + "s = Add (c, x) y = Log (s)", ZEROS, ["Add", "Log"]),
    "sub": (constants(c=-1e-10) + "s = Sub (x, c) y = Log (s)", ZEROS, ["Sub", "Log"]),
    "mul": (constants(c=1.000005) + "y = Mul (x, c)", NUMBERS, ["Mul"]),
    "div": (constants(c=0.999995) + "y = Div (x, c)", NUMBERS, ["Div"]),
    "quotient": (constants(c=1e-12) + "a = Abs(x) s = Add(a, c) y = Div(x, s)", ZEROS, ["Abs", "Add", "Div"]),
    "exactly 0": (constants(c=0.0) + "s = Add (x, c) y = Relu (s)", NUMBERS, ["Relu"]),
    "exactly 1": (constants(c=1.0) + "s = Mul (c, x) t = Div (s, c) y = Relu (t)", NUMBERS, ["Relu"]),
    "ranges apart": (
        constants(a=0.0, b=1.0, c=2.0, d=3.0) + "s = Clip (x, a, b) y = Clip (s, c, d)", NUMBERS,
        ["Clip", "Clip"],
    ),
    "a range": (constants(a=-3.0, b=-1.0) + "s = Clip (x, a, b) y = Relu (s)", NUMBERS, ["Clip", "Relu"]),
    "scatter that adds": (
        "i = Constant <value = int64[2, 1] {0, 1}> () u = Neg (x) r = Shape (x) d = Reshape (x, r)"
        ' y = ScatterND <reduction="add"> (d, i, u)',
        NUMBERS, ["Neg", "ScatterND"],
    ),
    "constants": (constants(a=2.0, b=3.0) + "p = Mul (a, b) y = Mul (x, p)", NUMBERS, ["Mul"]),
    "equal nodes": ("a = Exp (x) b = Exp (x) y = Add (a, b)", NUMBERS, ["Exp", "Add"]),
    "casts": ("a = Cast <to=1> (x) y = Relu (a)", NUMBERS, ["Relu"]),
}  # fmt: skip


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("case", FOLDED.values(), ids=list(FOLDED))
def test_folding_changes_no_value(case: tuple[str, np.ndarray, list[str]]) -> None:
    text, x, kinds = case
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20]> {ROWS} {{ {text} }}')
    model = ir.from_proto(proto)
    fold_constants(model)
    assert [node.op_type for node in model.graph] == kinds
    np.testing.assert_array_equal(run(ir.to_proto(model), x), run(proto, x))


class Sums(torch.nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.relu = torch_op.CustomReLU() if own else torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.relu(x)
        return torch.log(y + 1e-10), y / (y.abs() + 1e-12), y * 1.000005


@pytest.mark.parametrize(("own", "exporter"), [(True, "dynamo"), (False, "torchscript")])
def test_an_export_keeps_them(own: bool, exporter: str, tmp_path: Path) -> None:
    model, path = Sums(own), tmp_path / "m.onnx"
    export(model, (torch.rand(2, 3) + 0.5,), path, exporter=exporter, optimize=True, device="cpu")
    for x in (torch.zeros(2, 3), torch.full((2, 3), 1e-9), torch.ones(2, 3)):
        found = deploy.session(path, ["CPUExecutionProvider"]).run({"x": x.numpy()})
        for expected, value in zip(model(x), found.values(), strict=True):
            np.testing.assert_allclose(value, expected.numpy(), rtol=3e-7)


LINEAR = "(float[N, 8] x) => (float[N, 8] y)"
SMALL = {
    "log": "p = Mul (x, x) s = Add (p, tiny) l = Log (s) y = MatMul (l, w)",
    "quotient": "l = ReduceL2 (x, last) s = Add (l, tiny) q = Div (x, s) y = MatMul (q, w)",
    "after a norm": "n = RMSNormalization (x, one) s = Add (n, tiny) l = Log (s) y = MatMul (l, w)",
    "reciprocal": "a = Abs (x) s = Add (a, tiny) r = Reciprocal (s) q = Mul (r, x) y = MatMul (q, w)",
    "almost silu": "s = Sigmoid (x) t = Add (x, small) m = Mul (t, s) y = MatMul (m, w)",
    "root": "a = Abs (x) s = Add (a, tiny) r = Sqrt (s) q = Div (x, r) y = MatMul (q, w)",
    "a norm and a row": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (m, eps) r = Sqrt (v) n = Div (x, r)"
    " k = Mul (n, one) a = Add (k, row) l = Log (a) y = MatMul (l, w)",
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in SMALL), ("log", "float16"), ("a norm and a row", "float16")],
)
def test_optimize_keeps_them(name: str, dtype: str, tmp_path: Path) -> None:
    given = {
        "tiny": np.float32(1e-10), "small": np.float32(1e-5), "eps": np.float32(1e-5), "last": np.array([-1]),
        "row": np.full(8, 1e-10, np.float32), "one": np.ones(8, np.float32), "w": weights(8, 8),
    }  # fmt: skip
    arrays = {k: np.asarray(v) for k, v in given.items()}
    proto = parsed(f"{LINEAR} {{ {SMALL[name]} }}", 23 if "RMSN" in SMALL[name] else 20, **arrays)
    report, _ = optimized(proto, tmp_path, dtype=dtype)
    assert report.fused
    kind = np.float16 if dtype == "float16" else np.float32
    rows = np.array([[0] * 8, [1e-3] * 8, [0] * 7 + [1.0], [4.0] * 8])
    expected, found = (y["y"].astype(float) for y in both(tmp_path, {"x": rows.astype(kind)}))
    assert np.isfinite(expected).all()
    tolerance = 4e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


ALMOST = {
    "gelu": ("e = Erf (d) o = Add (e, c) h = Mul (x, half) y = Mul (h, o)", {"c": 1.0}, True),
    "gelu with 1.0001": ("e = Erf (d) o = Add (e, c) h = Mul (x, half) y = Mul (h, o)", {"c": 1.0001}, False),
    "silu of x + 1e-6": ("t = Add (x, c) s = Sigmoid (x) y = Mul (t, s)", {"c": 1e-6}, False),
    "silu up to 40": ("t = Max (x, c) s = Sigmoid (x) y = Mul (t, s)", {"c": 1e-3}, False),
}


@pytest.mark.parametrize("case", ALMOST.values(), ids=list(ALMOST))
def test_what_is_almost_an_activation_stays(case: tuple[str, dict[str, float], bool], tmp_path: Path) -> None:
    text, numbers, is_one = case
    given = {"root": 2**0.5, "half": 0.5} | numbers
    arrays = {name: np.array(number, np.float32) for name, number in given.items()}
    _, model = optimized(parsed(f"{LINEAR} {{ d = Div (x, root) {text} }}", **arrays), tmp_path)
    assert ("CustomGelu" in types(model)) is is_one and "CustomSilu" not in types(model)


def test_what_is_hidden_comes_back_after_an_error() -> None:
    graph = ir.Graph([], [], nodes=[ir.node("Abs", [None])], opset_imports={"": 20})
    with pytest.raises(ZeroDivisionError), hidden(ir.Model(graph, ir_version=10), lambda node: True):
        raise ZeroDivisionError
    assert [node.domain for node in graph] == [""] and graph.opset_imports == {"": 20}
