"""Tests of --dtype on models with subgraphs: they stay in fp32, and get what they capture in fp32."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from optimizing import optimized, parsed, weights

INPUTS = "(float[N, 4] x, bool c) => (float[N, 4] y)"
CHOICE = """p = MatMul (x, w)
    q = If (c) <then_branch = a () => (float[N, 4] t) { s = Sin (p) t = Add (s, x) },
                else_branch = b () => (float[N, 4] e) { e = Identity (p) }>
    y = MatMul (q, w)"""
LOOP = """p = MatMul (x, w)
    q = Loop (times, , p) <body = l (int64 i, bool more, float[N, 4] before) => (bool go, float[N, 4] after) {
        go = Identity (more) r = Tanh (before) after = Add (r, p) }>
    y = Relu (q)"""
NESTED = """p = MatMul (x, w)
    q = If (c) <then_branch = a () => (float[N, 4] t) {
                    t = Loop (times, , x) <body = l (int64 i, bool more, float[N, 4] before)
                        => (bool go, float[N, 4] after) { go = Identity (more) after = Add (before, p) }> },
                else_branch = b () => (float[N, 4] e) { e = Neg (x) }>
    y = Add (q, p)"""
COUNTED = """p = MatMul (x, w)
    r = If (c) <then_branch = a () => (int64[2] t) { t = Shape (p) },
                else_branch = b () => (int64[2] e) { z = ReduceMax <keepdims=0> (p) o = Cast <to=7> (z)
                    m = Unsqueeze (o, zero) e = Concat <axis=0> (m, m) }>
    f = Cast <to=1> (r) g = ReduceMax <keepdims=0> (f) y = Mul (p, g)"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("body", [CHOICE, LOOP, NESTED, COUNTED], ids=["if", "loop", "nested", "integers"])
def test_subgraphs_stay_in_fp32(body: str, dtype: str, tmp_path: Path) -> None:
    given = {"w": weights(4, 4), "times": np.array(3), "zero": np.array([0])}
    report, model = optimized(parsed(f"{INPUTS} {{ {body} }}", **given), tmp_path, dtype=dtype)
    assert report.dtype == dtype
    wanted = ir.DataType[dtype.upper()]
    assert {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} == {
        wanted,
        ir.DataType.BOOL,
    }
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.graph is not model.graph:
            assert wanted not in {value.dtype for value in node.outputs}


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


POOLED = """(float[B, 4, H, W] x) => (float[B, 4] y) {
    s = Sigmoid (x) a = Mul (x, s) m = ReduceMean (a, last) c = Conv (m, k)
    g = Mul (a, c) p = ReduceMean <keepdims=0> (g, last) y = MatMul (p, w) }"""
NORMED = """(float[B, 4, H, W] x) => (float[B, 4] y) {
    q = Mul (x, x) m = ReduceMean <keepdims=0> (q, last) y = MatMul (m, w) }"""


@pytest.mark.parametrize(("text", "fp32_nodes"), [(POOLED, 0), (NORMED, 2)], ids=["pooling", "squares"])
def test_means_that_pool_stay_in_float16(text: str, fp32_nodes: int, tmp_path: Path) -> None:
    given = {"last": np.array([2, 3]), "k": weights(4, 4, 1, 1), "w": weights(4, 4)}
    report, model = optimized(parsed(text, **given), tmp_path, dtype="float16")
    assert sum(node.op_type == "Cast" for node in model.graph) == (2 if fp32_nodes else 0)
    assert report.notes == ([f"{fp32_nodes} nodes compute in fp32"] if fp32_nodes else [])
