"""Tests of the dtypes of an optimised model, with --dtype and without."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16
from optimizing import nodes, optimized, parsed, refusal, types, weights
from other_sizes import assert_same, both

from twinop import deploy
from twinop.optimize.graph import subgraphs


def dtypes(model: ir.Model) -> list[str]:
    """The dtypes of the inputs and outputs."""
    return [str(value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)]


def inside(model: ir.Model) -> set[str]:
    """The dtypes of what CustomLinear and Relu return."""
    found = [node.outputs[0] for node in model.graph if node.op_type != "Cast"]
    return {str(value.dtype) for value in found if not value.is_graph_output()}


@pytest.mark.parametrize(
    ("outside", "most", "narrow"),
    [
        ("FLOAT", True, "FLOAT16"),
        ("FLOAT", False, "BFLOAT16"),
        (None, True, "BFLOAT16"),
        (None, False, "FLOAT16"),
    ],
)
def test_inputs_and_outputs_keep_dtypes(outside: str | None, most: bool, narrow: str, tmp_path: Path) -> None:
    """Most elements of the weights decide on the rest: those of w have 16 bits. v stays as it is."""
    outside, to = outside or narrow, ir.DataType[narrow].value
    body = f"c = Cast <to={to}> (x) a = MatMul (c, w) d = Cast <to=1> (a) e = MatMul (d, v)"
    last = f"y = Cast <to={ir.DataType[outside].value}> (e)"
    text = f"({outside.lower()}[N, 8] x) => ({outside.lower()}[N, 4] y) {{ {body} {last} }}"
    sizes = (16, 4) if most else (2, 40)
    text = text.replace("[N, 4]", f"[N, {sizes[1]}]")
    w = weights(8, sizes[0]).astype(ir.DataType[narrow].numpy())
    report, model = optimized(parsed(text, w=w, v=weights(*sizes)), tmp_path)
    assert report.dtype == (narrow.lower() if most else "float32")
    assert report.notes == (["1 nodes compute in fp32"] if most else [])
    assert report.fused == {"linear": 2} and dtypes(model) == [outside, outside]
    assert inside(model) - {"FLOAT"} == ({narrow} if most else set())
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_of_a_norm_stay_in_fp32(dtype: str, tmp_path: Path) -> None:
    """ONNX has them in fp32 beside 16 bits."""
    text = """(float[B, 8] x) => (float[B, 4] y, float[B, 1] m) {
        n, m = LayerNormalization (x, g) y = MatMul (n, w) }"""
    _, model = optimized(parsed(text, g=weights(8), w=weights(8, 4)), tmp_path, dtype=dtype)
    last = model.graph.outputs[1].producer()
    assert last is not None and last.op_type == "Cast"
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType[dtype.upper()]}


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
        ("() => (float[4, 4] y) { y = MatMul (w, w) }", 1),
        ("(float[N, 2, 3, 4] x) => (float[N, 2, 3, 4] y) { y = MeanVarianceNormalization (x) }", 2),
        (
            '(float[N, 4] x) => (float[N, 4] y) { t = Constant <value_string = "1"> () s = Cast <to = 8> (x) '
            "e = Equal (s, t) h = MatMul (x, w) y = Where (e, x, h) }",
            2,
        ),
        (  # a new token that a mask hides sees nothing in its window
            """(float[B, S, 4] x, float[B, T] mask, float[B, P, 4] past)
            => (float[B, S, 4] y, float[B, T, 4] k) { h = MatMul (x, w) k = Concat <axis = 1> (past, h)
            i = Constant <value_ints = [-2]> () e = Constant <value_ints = [99]> ()
            o = Constant <value_ints = [1]> () r = Slice (k, i, e, o) t = Transpose <perm = [0, 2, 1]> (r)
            m = Slice (mask, i, e, o) c = Cast <to = 9> (m) u = Unsqueeze (c, o) s = MatMul (h, t)
            l = Constant <value_float = -3e38> () z = Constant <value_float = 0.0> () b = Where (u, z, l)
            d = Add (s, b) p = Softmax (d) y = MatMul (p, r) }""",
            5,
        ),
    ],
    ids=["overridable", "zeros", "output", "optional", "no input", "default axes", "text", "window"],
)
def test_unusual_values(text: str, found: int, tmp_path: Path) -> None:
    report, model = optimized(parsed(text, w=weights(4, 4)), tmp_path, dtype="float16")
    assert report.fused or "the file is the original, converted" in str(report)
    assert dtypes(model) == ["FLOAT16"] * found


def test_results_that_float16_lacks_are_no_lowest_numbers_of_a_mask(tmp_path: Path) -> None:
    text, price = "(float[N, 4] x) => (float[N, 1] y) { h = MatMul (x, w) y = Add (h, b) }", np.float32(2e5)
    proto = parsed(text, w=weights(4, 1), b=np.full(1, price))
    said = refusal(proto, tmp_path, dtype="float16")
    assert "its values exceed the range or precision of the dtype" in said


def test_float64_stays(tmp_path: Path) -> None:
    proto = parsed("(double[N, 4] x) => (double[N, 4] y) { y = MatMul(x, w) }", w=weights(4, 4).astype(float))
    report, model = optimized(proto, tmp_path)
    assert report.dtype == "float64" and dtypes(model) == ["DOUBLE", "DOUBLE"]
    said = "the model is in float64, which stays. Leave out dtype=, or export"
    assert said in refusal(proto, tmp_path, dtype="float16")


def test_sequences_of_float16(tmp_path: Path) -> None:
    text = "(float16[N, 4] x) => (float16[N, 4] y) { s = SequenceConstruct (x) y = SequenceAt (s, i) }"
    said = refusal(onnx.shape_inference.infer_shapes(parsed(text, i=np.array(0))), tmp_path)
    assert "s is Sequence" in said and "sequences and optionals of 16 bits are not supported" in said


QUANTISED = {
    "bias": "y = Add (o, b)",
    "norm": "y = LayerNormalization (mf, one, b)",
    "linear of the sums": "e = MatMul (mf, wf) y = Mul (e, small)",
    "gate": "h = Sigmoid (o) g = Mul (o, h) y = Mul (g, r)",
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
    assert name != "bias" or not report.narrowed  # the sum stays in fp32
    feeds = {"x": np.abs(rng.standard_normal((3, k))), "r": rng.standard_normal((3, 16))}
    assert_same(tmp_path, 0, 0.01, **{name: array.astype(np.float16) for name, array in feeds.items()})


def halves(*shape: int, seed: int = 0) -> np.ndarray:
    return weights(*shape, seed=seed).astype(np.float16)


T5 = """(float16[B, S, 64] x) => (float16[B, S, 64] z) {
    a = MatMul (x, w) r = Relu (a) c = Cast <to=1> (r) o = MatMul (c, wo) f = Cast <to=1> (x) h = Add (f, o)
    p = Pow (h, two) m = ReduceMean (p, last) s = Add (m, small) q = Sqrt (s) i = Div (one, q) n = Mul (h, i)
    l = Cast <to=10> (n) y = Mul (l, g) k = MatMul (y, v) z = Add (k, x) }"""
NUMBERS = {"two": np.float32(2), "small": np.float32(1e-6), "one": np.float32(1), "last": np.array([-1])}


def kept(model: ir.Model) -> dict[str, set[str]]:
    """The dtypes of what nodes return, by type."""
    found: dict[str, set[str]] = {}
    for node in model.graph:
        found.setdefault(node.op_type, set()).update(str(value.dtype) for value in node.outputs)
    return found


def test_what_a_file_computes_in_fp32_stays(tmp_path: Path) -> None:
    """T5 in fp16 has fp32 weights of its last products and a sum of layers in fp32, which exceeds fp16."""
    given = {"w": halves(64, 64), "v": halves(64, 64, seed=1), "g": halves(64) + np.float16(1)}
    wo = weights(64, 64, seed=2) * 3e5
    report, model = optimized(parsed(T5, wo=wo, **given, **NUMBERS), tmp_path)
    assert report.dtype == "float16" and not report.narrowed
    products = [node for node in model.graph if node.op_type == "CustomLinear"]
    assert [str(node.outputs[0].dtype) for node in products] == ["FLOAT16", "FLOAT", "FLOAT16"]
    assert kept(model)["CustomAddRmsNorm"] == {"FLOAT"} and types(model)["CustomAddRmsNorm"] == 1
    expected, found = (y["z"].astype(float) for y in both(tmp_path, {"x": np.full((1, 2, 64), 0.01)}))
    assert np.isfinite(expected).all() and report.error < 1e-3
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
    report, model = optimized(tmp_path / "old.onnx", tmp_path, dtype="float32")
    assert {str(value.dtype) for node in model.graph for value in node.outputs} == {"FLOAT"}


def test_a_norm_in_fp32_of_16_bits_is_an_operator_of_16_bits(tmp_path: Path) -> None:
    """It computes in fp32 inside, and rounds where the file rounds."""
    text = T5.replace("h = Add (f, o)", "h = Identity (f)")
    given = {"w": halves(64, 64), "v": halves(64, 64, seed=1), "g": halves(64) + np.float16(1)}
    report, model = optimized(parsed(text, wo=weights(64, 64), **given, **NUMBERS), tmp_path)
    assert report.fused["rms_norm"] == 1 and {*kept(model)["CustomRmsNorm"]} == {"FLOAT16"}
    assert "Cast" not in types(model)


HEAD = """(float16[N, 8] x) => (float[N, 4] y) { a = MatMul (x, w) b = Relu (a) c = Cast <to=1> (b)
    d = MatMul (c, v) y = Add (d, bias) }"""


@pytest.mark.parametrize("opset", [17, 20])
def test_a_product_in_fp32_stays_in_fp32_unless_a_dtype_is_asked_for(opset: int, tmp_path: Path) -> None:
    given = {"w": halves(8, 8), "v": weights(8, 4) + 1000, "bias": weights(4)}
    proto = parsed(HEAD, opset, **given)
    report, model = optimized(proto, tmp_path)
    assert not report.narrowed and "float32 in the source" not in str(report)
    assert {str(value.dtype) for value in model.graph.initializers.values()} == {"FLOAT", "FLOAT16"}
    report, model = optimized(proto, tmp_path, dtype="float16")
    assert report.narrowed == ["MatMul d (v)", "Add y (bias)"]
    assert "float32 in the source, float16 here: MatMul d (v), Add y (bias)" in str(report)
    assert {str(value.dtype) for value in model.graph.initializers.values()} == {"FLOAT16"}


@pytest.mark.parametrize("rows", ["N", "2"])
def test_products_of_one_input_in_two_dtypes_are_not_merged(rows: str, tmp_path: Path) -> None:
    text = f"""(float16[{rows}, 8] x) => (float16[{rows}, 8] q, float[{rows}, 8] k, float16[{rows}, 8] v) {{
        q = MatMul (x, wq) c = Cast <to=1> (x) k = MatMul (c, wk) v = MatMul (x, wv) }}"""
    given = {"wq": halves(8, 8), "wk": weights(8, 8, seed=1), "wv": halves(8, 8, seed=2)}
    report, model = optimized(parsed(text, **given), tmp_path)
    found = [str(n.inputs[0].dtype) for n in model.graph if n.op_type == "CustomLinear" and n.inputs[0]]
    assert sorted(found) == ["FLOAT", *["FLOAT16"] * (1 if rows == "2" else 2)]
    assert report.fused.get("matmuls of one input merged", 0) == (rows == "2")


@pytest.mark.parametrize(
    ("cast", "to", "device"),
    [
        ("Cast <to=10> (x)", 10, "cuda"),
        ("CastLike (x, like)", 16, "cuda"),
        ("Cast <to=16> (x)", 16, "cpu"),
    ],
)
def test_a_cast_that_rounds_stays(cast: str, to: int, device: str, tmp_path: Path) -> None:
    """In the file and in what it is compared with: 1e5 is infinite in fp16, and 1e-9 is 0."""
    like = np.ones(1, ir.DataType(to).numpy())
    body = f"i = {cast} f = Cast <to=1> (i) y = Mul (f, s) z = MatMul (y, w)"
    text = f"(float[N, 2] x) => (float[N, 2] y, float[N, 2] z) {{ {body} }}"
    proto = parsed(text, s=np.float32(3), w=weights(2, 2), like=like)
    report, model = optimized(proto, tmp_path, device=device)
    assert types(model)["Cast"] + types(model).get("CastLike", 0) == 2
    assert report.error < 1e-6
    session = deploy.session(tmp_path / "fast.onnx", ["CPUExecutionProvider"])
    x = np.array([[1e5, 1e-9], [1.0009, 2.0]], np.float32)
    expected = x.astype(ir.DataType(to).numpy()).astype(np.float32) * 3
    assert np.array_equal(session.run({"x": x})["y"], expected)


INPUTS = "(float[N, 4] x, bool c) => (float[N, 4] y)"
CHOICE = """p = MatMul (x, w)
    q = If (c) <then_branch = a () => (float[N, 4] t) { s = Sin (p) t = Add (s, x) },
    else_branch = b () => (float[N, 4] e) { e = Identity (p) }> y = MatMul (q, w)"""
LOOP = """p = MatMul (x, w)
    q = Loop (times, , p) <body = l (int64 i, bool more, float[N, 4] before) => (bool go, float[N, 4] after) {
    go = Identity (more) r = Tanh (before) after = Add (r, p) }> y = Relu (q)"""
NESTED = """p = MatMul (x, w) q = If (c) <then_branch = a () => (float[N, 4] t) {
    t = Loop (times, , x) <body = l (int64 i, bool more, float[N, 4] before)
    => (bool go, float[N, 4] after) { go = Identity (more) after = Add (before, p) }> },
    else_branch = b () => (float[N, 4] e) { e = Neg (x) }> y = Add (q, p)"""
COUNTED = """p = MatMul (x, w) r = If (c) <then_branch = a () => (int64[2] t) { t = Shape (p) },
    else_branch = b () => (int64[2] e) { z = ReduceMax <keepdims=0> (p) o = Cast <to=7> (z)
    m = Unsqueeze (o, zero) e = Concat <axis=0> (m, m) }>
    f = Cast <to=1> (r) g = ReduceMax <keepdims=0> (f) y = Mul (p, g)"""


@pytest.mark.parametrize(
    ("body", "dtype"),
    [(CHOICE, "float16"), (LOOP, "bfloat16"), (NESTED, "float16"), (COUNTED, "bfloat16")],
    ids=["if", "loop", "nested", "integers"],
)
def test_bodies_of_loops_stay_in_fp32(body: str, dtype: str, tmp_path: Path) -> None:
    given = {"w": weights(4, 4), "times": np.array(3), "zero": np.array([0])}
    report, model = optimized(parsed(f"{INPUTS} {{ {body} }}", **given), tmp_path, dtype=dtype)
    assert report.dtype == dtype
    wanted = ir.DataType[dtype.upper()]
    kinds = {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert kinds == {wanted, ir.DataType.BOOL}
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    inner = [node for loop in loops for graph in subgraphs(loop) for node in graph]
    assert len(loops) == (body in (LOOP, NESTED))
    assert all(wanted not in {value.dtype for value in node.outputs} for node in inner)
    if body == CHOICE:  # branches are as the rest
        [choice] = nodes(model, "If")
        assert {each.dtype for graph in subgraphs(choice) for each in graph.outputs} == {wanted}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_and_positions_of_opset_23(dtype: str, tmp_path: Path) -> None:
    """ONNX Runtime's CUDA provider has 16-bit kernels for both."""
    text = """(float[B, S, 8] x, float[B, S, 8] v, float[9, 2] c, float[9, 2] s) => (float[B, S, 8] y) {
        n = Shape <start=1, end=2> (x) o = Squeeze (n) i = Range (zero, o, one) p = Unsqueeze (i, axis)
        b = Shape <start=0, end=1> (x) h = Concat <axis=0> (b, n) q = Expand (p, h)
        k = RotaryEmbedding <num_heads=2> (x, c, s, q)
        y = Attention <q_num_heads=2, kv_num_heads=2> (x, k, v) }"""
    given = {"zero": np.array(0), "one": np.array(1), "axis": np.array([0]), "w": weights(8, 8)}
    more = "w1 = MatMul (z, w) y = Relu (w1) }"
    proto = parsed(text.replace("y = Attention", "z = Attention")[:-1] + more, 23, **given)
    _, model = optimized(proto, tmp_path, dtype=dtype)
    kinds = {node.op_type: node.outputs[0].dtype for node in model.graph}
    wanted = ir.DataType[dtype.upper()]
    assert (kinds["Attention"], kinds["RotaryEmbedding"]) == (wanted, wanted)
    assert "Cast" not in kinds


POOLED = """(%(dtype)s[B, 4, H, W] x) => (%(dtype)s[B, 4] y) {
    s = Sigmoid (x) a = Mul (x, s) m = ReduceMean (a, last) c = Conv (m, k)
    g = Mul (a, c) p = ReduceMean <keepdims=0> (g, last) y = MatMul (p, w) }"""
NORMED = """(%(dtype)s[B, 4, H, W] x) => (%(dtype)s[B, 4, H, W] y) {
    s = Sigmoid (x) a = Mul (x, s) q = Mul (a, a) m = ReduceMean (q, last) y = Mul (a, m) }"""
WIDE = """(%(dtype)s[B, 4, H, W] x) => (float[B, 4, 1, 1] y) {
    s = Sigmoid (x) a = Mul (x, s) f = Cast <to=1> (a) y = ReduceMean (f, last) }"""


@pytest.mark.parametrize(
    ("text", "dtype", "wide"),
    [
        (POOLED, "float16", False),
        (POOLED, "float", True),  # a sum of many 16-bit numbers may overflow
        (NORMED, "float16", True),
        (WIDE, "float16", True),  # the model says so
    ],
    ids=["pooling", "pooling in fp32", "a norm", "an output in fp32"],
)
def test_means_that_pool_in_float16_stay_so(text: str, dtype: str, wide: bool, tmp_path: Path) -> None:
    given = {"k": weights(4, 4, 1, 1), "w": weights(4, 4)}
    if dtype == "float16":
        given = {name: array.astype(np.float16) for name, array in given.items()}
    proto = parsed(text % {"dtype": dtype}, last=np.array([2, 3]), **given)
    options = {} if dtype == "float16" else {"dtype": "float16"}
    report, model = optimized(proto, tmp_path, **options)
    found = [node.inputs[0] for node in model.graph if node.op_type == "ReduceMean"]
    assert found and all(value is not None and (value.dtype is ir.DataType.FLOAT) == wide for value in found)
    assert not report.narrowed  # what is asked for of a whole file in fp32 is not told node by node


@pytest.mark.parametrize(
    ("of", "dtype", "scale", "reader", "narrow"),
    [
        ("float16", None, 2e-3, "x", True),  # a session fuses both
        ("bfloat16", "bfloat16", 2e-3, "x", True),
        ("bfloat16", "float16", 1e-7, "x", False),  # float16 has no such scale
        ("float", "float16", 2.1e-3, "x", False),
        ("float16", None, 2e-3, "p", False),  # p may be large: the product is in fp32
    ],
)
def test_weights_in_blocks_stay_in_16_bits_if_these_have_their_scales(
    of: str, dtype: str | None, scale: float, reader: str, narrow: bool, tmp_path: Path
) -> None:
    text = f"({of}[N, 64] x, int64[N, 64] i) => ({of}[N, 32] y, {of}[N, 64] z) {{ z = MatMul (x, k) "
    text += "d = DequantizeLinear <axis = 0, block_size = 16> (w, s) "
    text += f"p = CastLike (i, x) y = MatMul ({reader}, d) }}"
    kind = ir.DataType[of.upper()].numpy()
    scales = np.random.default_rng(0).uniform(0.5, 1, (4, 32)).astype(np.float32) * scale
    given = {"w": np.random.default_rng(1).integers(-8, 8, (64, 32), np.int8), "s": scales.astype(kind)}
    given["k"] = weights(64, 64).astype(kind)
    proto = parsed(text, 21, **given)
    report, model = optimized(proto, tmp_path, dtype=dtype, device="cuda")
    [weight] = nodes(model, "DequantizeLinear")
    assert weight.inputs[1] is not None and (weight.inputs[1].dtype is not ir.DataType.FLOAT) == narrow
    assert report.skipped["DequantizeLinear: blocks of 16; linear_q has those of 32 and 128"] == 1
    assert report.error < 2e-2


def test_an_input_that_is_rounded_and_read_in_fp32(tmp_path: Path) -> None:
    """As in a file in 16 bits that ONNX Runtime's optimizer has written for the CPU."""
    text = """(float[N, 2, 4] x) => (float[N, 3] y) { h = Cast <to=10> (x) f = Flatten (h) a = Cast <to=1> (f)
        v = Cast <to=1> (w) m = MatMul (a, v) y = LayerNormalization (m, s) }"""
    proto = parsed(text, w=weights(8, 3).astype(np.float16), s=weights(3))
    report, _ = optimized(proto, tmp_path)
    assert report.fused
