"""Tests of --dtype on models with subgraphs: they stay in fp32, and get what they capture in fp32."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from optimizing import nodes, optimized, parsed, weights

from twinop.optimize.graph import subgraphs

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
    assert {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} == {
        wanted,
        ir.DataType.BOOL,
    }
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
    proto = parsed(text.replace("y = Attention", "z = Attention")[:-1] + more, **given)
    proto.opset_import[0].version = 23
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
    _, model = optimized(proto, tmp_path, **options)
    found = [node.inputs[0] for node in model.graph if node.op_type == "ReduceMean"]
    assert found and all(value is not None and (value.dtype is ir.DataType.FLOAT) == wide for value in found)


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
    proto = parsed(text, **given)
    proto.opset_import[0].version = 21
    report, model = optimized(proto, tmp_path, dtype=dtype, device="cuda")
    [weight] = nodes(model, "DequantizeLinear")
    assert weight.inputs[1] is not None and (weight.inputs[1].dtype is not ir.DataType.FLOAT) == narrow
    assert report.skipped["DequantizeLinear: blocks of 16; linear_q has those of 32 and 128"] == 1
    assert report.error < 2e-2
