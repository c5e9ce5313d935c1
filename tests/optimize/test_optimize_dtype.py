"""Tests of the dtypes of an optimised model, with --dtype and without."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16
from optimizing import optimized, parsed, types, weights

from twinop import deploy
from twinop.errors import ExportError
from twinop.optimize import optimize


def dtypes(model: ir.Model) -> list[str]:
    """The dtypes of the inputs and outputs."""
    return [str(value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)]


def inside(model: ir.Model) -> set[str]:
    """The dtypes of what CustomLinear and Relu return."""
    found = [node.outputs[0] for node in model.graph if node.op_type != "Cast"]
    return {str(value.dtype) for value in found if not value.is_graph_output()}


@pytest.mark.parametrize("narrow", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize(
    ("outside", "most"), [("FLOAT", True), ("FLOAT", False), (None, True), (None, False)]
)
def test_inputs_and_outputs_keep_their_dtypes(
    outside: str | None, most: bool, narrow: str, tmp_path: Path
) -> None:
    """Most elements of the weights decide on the rest: those of w have 16 bits."""
    outside, to = outside or narrow, ir.DataType[narrow].value
    body = f"c = Cast <to={to}> (x) a = MatMul (c, w) d = Cast <to=1> (a) e = MatMul (d, v)"
    last = f"y = Cast <to={ir.DataType[outside].value}> (e)"
    text = f"({outside.lower()}[N, 8] x) => ({outside.lower()}[N, 4] y) {{ {body} {last} }}"
    sizes = (16, 4) if most else (2, 40)
    text = text.replace("[N, 4]", f"[N, {sizes[1]}]")
    w = weights(8, sizes[0]).astype(ir.DataType[narrow].numpy())
    report, model = optimized(parsed(text, w=w, v=weights(*sizes)), tmp_path)
    assert report.dtype == (narrow.lower() if most else "float32") and not report.notes
    assert report.made == {"linear": 2} and dtypes(model) == [outside, outside]
    assert inside(model) == {narrow if most else "FLOAT"}
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]


def test_what_the_converter_of_onnxruntime_writes(tmp_path: Path) -> None:
    proto = parsed("(float[N, 8] x) => (float[N, 4] y) { a = MatMul (x, w) y = Relu (a) }", w=weights(8, 4))
    report, model = optimized(convert_float_to_float16(proto, keep_io_types=True), tmp_path)
    assert dtypes(model) == ["FLOAT", "FLOAT"] and report.dtype == "float16"
    assert types(model) == {"Cast": 2, "CustomLinear": 1}
    report, model = optimized(tmp_path / "old.onnx", tmp_path, dtype="float16")
    assert dtypes(model) == ["FLOAT16", "FLOAT16"] and types(model) == {"CustomLinear": 1}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(float[N, 4] x, float[4,4] w) => (float[N, 4] y) { h = Relu(x) y = MatMul(h, w) }", 3),
        ("(float[N, 4] x) => (float[N, 4] y) { s = Shape(x) c = ConstantOfShape(s) y = Add(x, c) }", 2),
        ("(float[N, 4] x) => (float[N, 4] y, float[4,4] w) { y = MatMul (x, w) }", 3),
        ("(float[N, 4] x) => (float[N, 4] y) { h = Relu(x) o = Optional(h) y = OptionalGetElement(o) }", 2),
    ],
    ids=["overridable", "zeros", "output", "optional"],
)
def test_unusual_values(text: str, found: int, tmp_path: Path) -> None:
    report, model = optimized(parsed(text, w=weights(4, 4)), tmp_path, dtype="float16")
    assert report.made or "the file is the original, converted" in str(report)
    assert dtypes(model) == ["FLOAT16"] * found


def test_the_weights_in_fp32_are_not_written(tmp_path: Path) -> None:
    proto = parsed("(float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weights(4, 4))
    _, model = optimized(proto, tmp_path, dtype="float16")
    assert [value.dtype for value in model.graph.initializers.values()] == [ir.DataType.FLOAT16]


def test_measuring_a_dtype_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: Any) -> None:
        raise deploy.RunError("no kernel\nfor MatMul")

    onnx.save(
        parsed("(float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }", w=weights(4, 4)), tmp_path / "o"
    )
    monkeypatch.setattr("twinop.deploy.session", session)
    report = optimize(tmp_path / "o", tmp_path / "fast.onnx", dtype="bfloat16", device="cpu")
    assert not report.made and report.times is None


def test_float64_stays(tmp_path: Path) -> None:
    proto = parsed(
        "(double[N, 4] x) => (double[N, 4] y) { y = MatMul (x, w) }", w=weights(4, 4).astype(float)
    )
    report, model = optimized(proto, tmp_path)
    assert report.dtype == "float64" and dtypes(model) == ["DOUBLE", "DOUBLE"]
    with pytest.raises(
        ExportError, match="the model is in float64, which stays. Leave out dtype=, or export"
    ):
        optimize(tmp_path / "old.onnx", tmp_path / "fast.onnx", dtype="float16")


def test_sequences_of_float16(tmp_path: Path) -> None:
    proto = parsed(
        "(float16[N, 4] x) => (float16[N, 4] y) { s = SequenceConstruct (x) y = SequenceAt (s, i) }",
        i=np.array(0),
    )
    onnx.save(onnx.shape_inference.infer_shapes(proto), tmp_path / "old.onnx")
    with pytest.raises(
        ExportError, match="s is Sequence.*sequences and optionals of 16 bits are not supported"
    ):
        optimize(tmp_path / "old.onnx", tmp_path / "fast.onnx")


QUANTISED = {
    "bias": "y = Add (o, b)",
    "bias and residual": "a = Add (o, b) y = Add (a, r)",
    "norm": "y = LayerNormalization (mf, one, b)",
    "linear": "d = Mul (mf, small) y = MatMul (d, wf)",
    "linear of the sums": "e = MatMul (mf, wf) y = Mul (e, small)",
    "gate": "h = Sigmoid (o) g = Mul (o, h) y = Mul (g, r)",
    "transposed": "t = Transpose <perm=[0, 1]> (mf) u = Mul (t, sc) y = Add (u, b)",
    "twice": "n = Add (mf, mf) u = Mul (n, sc) y = Add (u, b)",
}


@pytest.mark.parametrize("name", QUANTISED)
def test_integer_sums_never_become_16_bits(name: str, tmp_path: Path) -> None:
    """Dynamic quantisation: sums of 1,024 products of int8 exceed what fp16 holds."""
    rng, k = np.random.default_rng(0), 1024
    text = f"""(float[N, {k}] x, float[N, 16] r) => (float[N, 16] z) {{ q, s, p = DynamicQuantizeLinear (x)
        m = MatMulInteger (q, w, p) mf = Cast <to=1> (m) sc = Mul (s, ws) o = Mul (mf, sc) {QUANTISED[name]}
        z = Tanh (y) }}"""
    given: dict[str, np.ndarray] = {
        "w": rng.integers(20, 127, (k, 16)).astype(np.int8), "ws": np.array(1e-4, np.float32),
        "b": weights(16), "one": np.ones(16, np.float32), "wf": weights(16, 16),
        "small": np.array(1e-7, np.float32),
    }  # fmt: skip
    report, _ = optimized(parsed(text, **given), tmp_path, dtype="float16")
    assert report.dtype == "float16"
    feeds = {"x": np.abs(rng.standard_normal((3, k))), "r": rng.standard_normal((3, 16))}
    files = (tmp_path / "old.onnx", tmp_path / "fast.onnx")
    old, new = (deploy.session(file, ["CPUExecutionProvider"]) for file in files)
    halves = {name: array.astype(np.float16) for name, array in feeds.items()}
    expected = old.run({name: array.astype(np.float32) for name, array in halves.items()})["z"]
    assert np.abs(new.run(halves)["z"].astype(np.float64) - expected).max() < 0.01
