"""Tests of rewrites of parts of a tensor, of nodes that stay, and of standard ops where the user asks."""

from pathlib import Path

import numpy as np
import pytest
from optimizing import nodes, optimized, parsed, types, weights
from other_sizes import assert_same

INDICES = {
    "m1": np.array([-1]), "zero": np.array([0]), "two": np.array([2]), "four": np.array([4]),
    "six": np.array([6]), "far": np.array([100]), "before": np.array([-100]), "m4": np.array([-4]),
}  # fmt: skip
PACKED = "(float[N, 8] x) => (float[N, %d] y) { h = MatMul (x, w) %s }"


@pytest.mark.parametrize(
    ("width", "body", "products"),
    [
        (4, "a, b, c = Split <axis=-1, num_outputs=3> (h) y = Mul (a, b)", 2),
        (4, "a, b, c = Split <axis=1, num_outputs=3> (h) y = Relu (c)", 1),
        (12, "p = Slice (h, before, far, m1) y = Relu (p)", 1),
        (4, "p = Slice (h, m4, far, m1) y = Relu (p)", 1),
        (6, "p = Slice (h, zero, far, m1, two) y = Relu (p)", 0),
    ],
    ids=["an unread part", "the last part", "all", "from the end", "every second column"],
)
def test_packed_products(width: int, body: str, products: int, tmp_path: Path) -> None:
    model = parsed(PACKED % (width, body), w=weights(8, 12), **INDICES)
    _, made = optimized(model, tmp_path)
    assert bool(nodes(made, "Split", "Slice")) == (products == 0)
    assert types(made)["CustomLinear"] == (products or 1)
    assert_same(tmp_path, x=(7, 8))


HALVES = """(float[N, 8] z) => (float[N, 4] y) {
    g = Slice (z, %s) u = Slice (z, %s) s = Sigmoid (g) a = Mul (g, s) y = Mul (a, u) }"""


@pytest.mark.parametrize(
    ("gate", "up", "packed"),
    [
        ("zero, four, m1", "four, far, m1", True),
        ("before, four, m1", "m4, far, m1", True),
        ("zero, far, m1, two", "four, far, m1", False),  # every second column
        ("zero, four, m1", "two, six, m1", False),  # not the second half
    ],
)
def test_gates_of_slices(gate: str, up: str, packed: bool, tmp_path: Path) -> None:
    report, _ = optimized(parsed(HALVES % (gate, up), **INDICES), tmp_path)
    assert report.fused == {"swiglu (packed)" if packed else "swiglu": 1}
    assert_same(tmp_path, z=(7, 8))


# The graph, its constants, the types of nodes after it, and what is skipped.
BESIDE: dict[str, tuple[str, dict[str, np.ndarray], dict[str, int], dict[str, int]]] = {
    # The op starts at the Cast to float64, because it takes and returns one dtype.
    "a norm in float64": (
        """(float[N, 8] x) => (float[N, 8] y) { d = Cast <to=11> (x) q = Mul (d, d)
        m = ReduceMean <keepdims=1> (q, last) e = Add (m, eps) r = Sqrt (e) n = Div (d, r) c = Cast <to=1> (n)
        y = Mul (c, w) }""",
        {"last": np.array([-1]), "eps": np.array(1e-6), "w": weights(8)}, {"CustomRmsNorm": 1}, {},
    ),
    "a bias of a higher rank": (
        "(float[N, 8] x) => (float[1, N, 8] y) { h = MatMul (x, w) y = Add (h, b) }",
        {"w": weights(8, 8), "b": weights(1, 1, 8)}, {"CustomLinear": 1, "Add": 1}, {},
    ),
    "a weight with the name of a new one": (
        "(float[N, 8] x) => (float[N, 8] y) { h = MatMul (x, w) y = MatMul (h, w_nk) }",
        {"w": weights(8, 8), "w_nk": weights(8, 8, seed=1)}, {"CustomLinear": 2}, {},
    ),
    "a norm with one number as weight, beside another": (
        """(float[N, 8] x) => (float[N, 8] y, float[N, 8] z) {
        y = SimplifiedLayerNormalization <axis=-1> (x, w) z = RMSNormalization <axis=-1> (x, one) }""",
        {"w": weights(8), "one": weights(1)}, {"CustomRmsNorm": 1, "RMSNormalization": 1},
        {"RMSNormalization: one number as weight": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_beside_others(name: str, tmp_path: Path) -> None:
    text, given, kinds, skipped = BESIDE[name]
    report, model = optimized(parsed(text, 23 if "RMSNorm" in text else 20, **given), tmp_path)
    assert types(model) == kinds and report.skipped == skipped
    assert_same(tmp_path, x=(7, 8))


def test_several_flattened_forms_of_a_value(tmp_path: Path) -> None:
    """onnxscript makes each a Reshape, and gives their shapes one name."""
    text = """(float[N, 8] x) => (float[N, 8] y) {
        r = Relu (x) a = Flatten <axis=2> (r) b = Flatten <axis=0> (r) s = MatMul (b, a)
        c = Flatten <axis=1> (r) h = MatMul (c, w) y = Add (h, s) }"""
    report, _ = optimized(parsed(text, w=weights(8, 8)), tmp_path)
    assert report.fused["linear"] == 1
    assert_same(tmp_path, x=(7, 8))
    branch = """(float[N, 8] x) => (float[N, 8] y) { h = MatMul (x, w) f = ReduceMax <keepdims=0> (h)
        c = Greater (f, zero) y = If (c) <then_branch = a () => (float[N, 8] t) {
                a = Flatten <axis=2> (h) b = Flatten <axis=0> (h) s = MatMul (b, a) t = Add (h, s) },
            else_branch = b () => (float[N, 8] e) { e = Identity (h) }> }"""
    optimized(parsed(branch, w=weights(8, 8), zero=np.array(0, np.float32)), tmp_path)
    assert_same(tmp_path, x=(7, 8))
