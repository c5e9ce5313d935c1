"""Each rewrite alone on a small graph: what it writes, what it skips and why, and what `explain` says."""

import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from optimizing import parsed, types, weights
from quantised_weights import weight_of
from samples import RECORDS

from twinop.errors import ExportError
from twinop.model.schema import registered_schemas
from twinop.optimize import graph as g
from twinop.optimize import invariance, passes
from twinop.optimize.cached_attention import SHARED_CACHES
from twinop.optimize.rewrite import Rewrite, fused, skipped
from twinop.optimize.symbolic_shapes import infer_shapes, infer_types

X = "(float[2, 6, 8] x, float[2, 6, 8] z) => (float[2, 6, 8] y)"
HEADS = "(float[2, 4, 6, 8] q, float[2, 4, 6, 8] k, float[2, 4, 6, 8] v) => (float[2, 4, 6, 8] y)"
ATTENTION = "t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, t) p = Softmax (s) y = MatMul (p, v)"
CACHES = (
    "(float[2, 4, 1, 8] q, float[2, 4, P, 8] old_k, float[2, 4, P, 8] old_v, float[2, 4, 1, 8] new_k, "
    "float[2, 4, 1, 8] new_v) => (float[2, 4, 1, 8] y, float[2, 4, T, 8] k, float[2, 4, T, 8] v)"
)
GROWN = "k = Concat <axis = 2> (old_k, new_k) v = Concat <axis = 2> (old_v, new_v)"
HALVES = "(float[1, 4, 6, 8] x, float[1, 1, 6, 4] c, float[1, 1, 6, 4] s) => (float[1, 4, 6, 8] y)"
ROTATION = (
    "a, b = Split <axis = -1, num_outputs = 2> (x) ac = Mul (a, c) bs = Mul (b, s) bc = Mul (b, c) "
    "as = Mul (a, s) first = Sub (ac, bs) second = Add (bc, as) y = Concat <axis = -1> (first, second)"
)
QKV = "(float16[2, 8, 192] x) => (float16[2, 8, 64] y)"
THIRDS = "q, k, v = Split <axis = -1, num_outputs = 3> (x)"
PACKED = "y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v)"
CACHE = (
    "(float16[1, 1, 192] x, float16[1, 1, 8, 64] old, int32[1] place, int32 total, float16[4, 64] rows) => "
    "(float16[1, 1, 64] a, float16[1, 1, 8, 64] k, float16[1, 1, 8, 64] v, float16[4, 64] y)"
)
GROUPED = (
    "a, k, v = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1%s> "
    "(x, , , old, old, place, total) y = Relu (rows)"
)
CACHED = "a, k, v = custom_domain.CustomAttentionCached (x, old, old, place, total)"
BLOCKS = "g = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 32> (rows, BYTES, SCALES)"
HALF = "(float16[4, 64] rows) => (float16[4, 64] y)"
WIDE = "(float[4, 64] rows) => (float[4, 64] y)"
X_8 = "f = Cast <to = 1> (rows) q = QuantizeLinear (f, ONE, NONE8) d = DequantizeLinear (q, ONE)"
W_8 = "w = DequantizeLinear <axis = 0> (W8, ROW)"
STORED = weight_of(64, 64, 4, 32, False).stored
CONSTANTS = {
    "W": weights(8, 8), "U": weights(8, 8, seed=1), "WIDE": weights(8, 16), "C": weights(8),
    "M": weights(6, 8), "TABLE": weights(9, 8), "IDS": np.arange(6), "FLAT": np.array([12, 8]),
    "APART": np.array([2, 6, 8]), "MERGED": np.array([8, 8, 8]), "FOUR": np.array([2, 4, 8, 8]),
    "ONE": np.array(1, np.float32), "STACK": weights(2, 8, 8), "W16": weights(64, 64).astype(np.float16),
    "TWO": np.array(2, np.float16), "ROW16": 1 + weights(64).astype(np.float16), "BYTES": STORED["B"],
    "SCALES": STORED["scales"].astype(np.float16), "CODES": np.ones((64, 64), np.uint8),
    "W8": weights(64, 64).astype(ml_dtypes.float8_e4m3fn), "NONE8": np.zeros((), ml_dtypes.float8_e4m3fn),
    "PATCHES": weights(5, 3, 4, 4), "FIVE": weights(5), "COLUMNS": np.array([0, 5, 6]),
    "ROW": np.ones(64, np.float32), "STEPS": np.ones((2, 64), np.float16),
}  # fmt: skip
LINEAR, NORM = "custom_domain.CustomLinear", "custom_domain.CustomRmsNorm"
PATCHED = (
    "(float[B, 3, 8, 12] x) => (float[B, 6, 5] y) { c = Conv <%s> (x, PATCHES, FIVE) "
    "f = Reshape (c, COLUMNS) y = Transpose <perm = [0, 2, 1]> (f) }"
)
BATCHED = (
    "(float[2, 4, 8, 8] q, float[2, 4, 8, 8] k) => (float[2, 4, 8, 8] y, int64[3] z) { a = Reshape (q, %s) "
    "c = Reshape (k, MERGED) t = Transpose <perm = [0, 2, 1]> (c) p = MatMul (a, t) y = Reshape (p, %s) "
    "z = Shape (p) }"
)
DEQUANTIZED = "d = DequantizeLinear <axis = 0, block_size = 32> (CODES, STEPS)"
MODULATED = (
    "(float[2, 6, 8] x, float[2, 1, 8] scale, float[2, 1, 8] shift) => (float[2, 6, 8] y) "
    "{ n = custom_domain.CustomLayerNorm (x%s) f = Add (scale, ONE) m = Mul (n, f) y = Add (m, shift) }"
)


class Case(NamedTuple):
    """A rewrite and two graphs: one that it rewrites, and one that lacks a condition.

    Attributes:
        reason: what `match` says of the first node of the second graph, or what reports count.
    """

    name: str
    fused: dict[str, int]
    written: set[str]
    text: str
    other: str
    reason: str


CASES = [
    Case("unfuse_ort", {"FastGelu decomposed": 1}, {"Gelu"},
        f"{X} {{ y = com.microsoft.FastGelu (x) }}",
        f"{X} {{ y = com.microsoft.FusedMatMul <transBatchA = 1> (x, M) }}",
        "FusedMatMul: its batch is transposed"),
    Case("einsum", {}, {"MatMul"},
        f"{X} {{ y = Einsum <equation = 'bsw, wd -> bsd'> (x, W) }}".replace("'", '"'),
        f"{X} {{ y = Einsum <equation = 'bsw, bsw -> bsw'> (x, z) }}".replace("'", '"'),
        "of neither both tensors, nor one and the result"),
    Case("embedding", {"embedding of known ids": 1}, {"Add"},
        f"{X} {{ r = Gather (TABLE, IDS) y = Add (x, r) }}",
        f"{X} {{ y = Add (x, z) }}",
        "neither term is a lookup of constant ids"),
    Case("patches", {}, {"MatMul"},
        PATCHED % "strides = [4, 4]",
        PATCHED % "strides = [4, 4], dilations = [1, 1], pads = [0, 0, 1, 1]",
        "are padded"),
    Case("unflatten", {}, {"MatMul"},
        f"{X} {{ f = Reshape (x, FLAT) p = MatMul (f, W) y = Reshape (p, APART) }}",
        f"{X} {{ y = MatMul (x, W) }}",
        "between two Reshapes"),
    Case("activation", {"silu": 1}, {"CustomSilu"},
        f"{X} {{ s = Sigmoid (x) y = Mul (s, x) }}",
        f"{X} {{ y = Mul (x, z) }}",
        "no formula of GELU, SiLU"),
    Case("norm", {"layer_norm": 1}, {"CustomLayerNorm"},
        f"{X} {{ y = LayerNormalization (x, C) }}",
        f"{X} {{ y = LayerNormalization <axis = 1> (x, M) }}",
        "LayerNormalization: over several dimensions"),
    Case("rotary", {"rotary embedding": 1}, {"RotaryEmbedding"},
        f"{HALVES} {{ {ROTATION} }}",
        f"{X} {{ y = Add (x, z) }}",
        "it is not the last node of x * cos + rotated(x) * sin"),
    Case("batched_heads", {}, {"MatMul"},
        BATCHED % ("MERGED", "FOUR"),
        f"{X} {{ y = MatMul (x, W) }}",
        "its inputs are not heads"),
    Case("growing_caches", {"attention over a growing cache": 1}, {"Attention"},
        f"{CACHES} {{ {GROWN} {ATTENTION} }}",
        f"{HEADS} {{ {ATTENTION} }}",
        "k or v is no Concat of past and new rows"),
    Case("attention", {"attention": 1}, {"MultiHeadAttention"},
        f"{HEADS} {{ {ATTENTION} }}",
        f"{HEADS} {{ {ATTENTION.replace('p = Softmax (s)', 'c = Tanh (s) p = Softmax (c)')} }}",
        "attention: the scores are capped or scaled by a tensor"),
    Case("gated", {"swiglu": 1}, {"CustomSwiglu"},
        f"{X} {{ s = custom_domain.CustomSilu (x) y = Mul (s, z) }}",
        f"{X} {{ s = custom_domain.CustomGelu (x) y = Mul (s, z) }}",
        "gelu gate: no matmuls with constant weights"),
    Case("split_linear", {"part of a packed matmul": 2}, {"MatMul"},
        f"{X} {{ h = MatMul (x, WIDE) a, c = Split <axis = -1, num_outputs = 2> (h) y = Mul (a, c) }}",
        f"{X} {{ y = MatMul (x, W) }}",
        "of which only parts are read"),
    Case("ada_layer_norm", {"ada_layer_norm": 1}, {"CustomAdaLayerNorm"},
        MODULATED % "",
        MODULATED % ", C",
        "the norm has weights"),
    Case("addcmul", {"addcmul": 1}, {"CustomAddcmul"},
        f"{X} {{ p = Mul (x, z) y = Add (x, p) }}",
        f"{X} {{ y = Add (x, z) }}",
        "neither term is a Mul that nothing else reads"),
    Case("linear", {"linear+bias+relu": 1}, {"CustomLinear"},
        f"{X} {{ p = MatMul (x, W) a = Add (p, C) y = Relu (a) }}",
        f"{X} {{ y = MatMul (x, STACK) }}",
        "MatMul: a weight of 3 dimensions"),
    Case("merge_linear", {"matmuls of one input merged": 1}, {"CustomLinear", "Split"},
        f"{X} {{ p = {LINEAR} (x, W) q = {LINEAR} (x, U) y = Mul (p, q) }}",
        f"{X} {{ y = {LINEAR} (x, W) }}",
        "it is not the first of several matmuls of one input"),
    Case("packed_attention", {"attention of packed q, k and v": 1}, {"CustomAttentionPacked"},
        f"{QKV} {{ {THIRDS} {PACKED} }}",
        f"{QKV} {{ {THIRDS} {PACKED.replace('(q, k, v)', '(q, v, k)')} }}",
        "q, k and v are not the thirds of one tensor"),
    Case("cached_attention", {"attention over a cache": 1}, {"CustomAttentionCached"},
        f"{CACHE} {{ {GROUPED % ''} }}",
        f"{CACHE} {{ {GROUPED % ', sliding_window_cache = 1'} }}",
        "GroupQueryAttention: its attribute sliding_window_cache"),
    Case("embed_norm", {"embed_layer_norm": 1}, {"CustomEmbedLayerNorm"},
        f"{X.replace('float[2, 6, 8] z', 'int64[2, 6] z')} {{ e = Gather (TABLE, z) "
        "a = Add (e, M) y = custom_domain.CustomLayerNorm (a, C) }",
        f"{X} {{ a = Add (x, z) y = custom_domain.CustomLayerNorm (a, C) }}",
        "no sum with a lookup of ids"),
    Case("add_norm", {"add_rms_norm": 1}, {"CustomAddRmsNorm"},
        f"{X} {{ a = Add (x, z) y = custom_domain.CustomRmsNorm (a, C) }}",
        f"{X} {{ a = Add (x, C) y = custom_domain.CustomRmsNorm (a, C) }}",
        "the terms of the sum are not known to have its shape"),
    Case("quantised_gates", {"linear_q_swiglu": 1}, {"CustomLinearQSwiglu"},
        f"{HALF} {{ {BLOCKS} u = {BLOCKS[4:]} s = custom_domain.CustomSilu (g) y = Mul (s, u) }}",
        f"{HALF} {{ y = Mul (rows, rows) }}",
        "it does not multiply a GELU or SiLU"),
    Case("quantised", {"linear_q+relu": 1}, {"CustomLinearQ"},
        f"{HALF} {{ {BLOCKS} y = Relu (g) }}",
        f"{HALF} {{ {BLOCKS.replace('block_size = 32', 'block_size = 64')} y = Relu (g) }}",
        "MatMulNBits: blocks of 64; linear_q has those of 32 and 128"),
    Case("norm_into_matmul", {"norms in matmuls": 1}, {"CustomLinear"},
        f"{CACHE} {{ {CACHED} n = {NORM} (rows, ROW16) y = {LINEAR} (n, W16) }}",
        f"{HALF} {{ y = {NORM} (rows, ROW16) }}",
        "the model has no attention over a cache"),
    Case("invariance", {"invariant matmuls": 1}, {"CustomLinear"},
        f"{HALF} {{ y = {LINEAR} (rows, W16) }}",
        f"{HALF} {{ y = MatMul (rows, W16) }}",
        "MatMul: not invariant: its sums may depend on the batch"),
    Case("dequantize", {"matmul of dequantised weights": 1}, {"MatMulNBits"},
        f"{HALF} {{ {DEQUANTIZED} y = MatMul (rows, d) }}",
        f"{HALF} {{ d = DequantizeLinear (CODES, TWO) f = Cast <to = 10> (d) y = MatMul (rows, f) }}",
        "its integers are not constant, or not in blocks"),
    Case("linear_fp8", {"linear_fp8": 1}, {"CustomLinear"},
        f"{WIDE} {{ {X_8} {W_8} t = Transpose <perm = [1, 0]> (w) y = MatMul (d, t) }}",
        f"{WIDE} {{ {W_8} y = Gemm <transB = 1> (rows, w) }}",
        "Gemm: x is not in 8 bits"),
    Case("in_fp8", {}, {"CustomLinearFp8"},
        f"{HALF} {{ {X_8} {W_8} a = Cast <to = 10> (d) b = Cast <to = 10> (w) y = {LINEAR} (a, b) }}",
        f"{HALF} {{ y = {LINEAR} (rows, W16) }}",
        "its x or its weight is not in 8 bits"),
]  # fmt: skip
ALL = {each.name: each for each in (*passes.PASSES, *passes.LATE)}


def context_of(name: str, text: str) -> g.RewriteContext:
    used = {key: array for key, array in CONSTANTS.items() if re.search(rf"\b{key}\b", text)}
    model = ir.from_proto(parsed(text, **used))
    is_invariant = name != "linear_fp8"  # whose sums have no fixed order
    model.graph.meta.update({SHARED_CACHES: True, invariance.INVARIANT: is_invariant})
    with registered_schemas([each for each in RECORDS.values() if not each.is_backward]):
        infer_types(model)
        infer_shapes(model)
    return g.RewriteContext(model, ALL[name].device or ("cpu" if name == "rotary" else "cuda"), RECORDS)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_library_of_few_ops(case: Case) -> None:
    """Built with TWINOP_OPS: what it lacks is not written, and the report says so."""
    context = context_of(case.name, case.text)
    before = types(context.model).keys()
    context.records = {}
    ALL[case.name](context)(context.model)
    written = {each for each in types(context.model).keys() - before if each.startswith("Custom")}
    assert not written and all("the library has no op" in each for each in skipped(context.model))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_a_rewrite_writes_and_skips(case: Case) -> None:
    context = context_of(case.name, case.text)
    assert ALL[case.name](context)(context.model).modified
    assert fused(context.model) == case.fused and not skipped(context.model)
    assert case.written <= types(context.model).keys()
    context = context_of(case.name, case.other)
    said = list[str]()
    rewrite: Rewrite = ALL[case.name](context)
    rewrite.watch = lambda node, outcome: said.append(str(outcome))
    before = types(context.model)
    assert not rewrite(context.model).modified and types(context.model) == before
    assert not fused(context.model)
    counted = [*skipped(context.model)]
    assert case.reason in counted or (not counted and any(case.reason in each for each in said)), said


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_match_changes_nothing(case: Case) -> None:
    context = context_of(case.name, case.text)
    before = ir.to_proto(context.model)
    assert [*ALL[case.name](context)._found()]
    assert ir.to_proto(context.model) == before


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        ("y = MatMul (x, STACK)", "y", ["MatMul y:", "  linear: a weight of 3 dimensions"]),
        ("p = MatMul (x, W) y = Relu (p)", "p", ["  linear: matches", "  linear: fused, so its value is "]),
        ("t = Tanh (x) s = Mul (t, z) y = Softmax (s)", "s", ["  attention from Softmax y: no MatMul"]),
        ("p = Mul (x, z) y = Add (p, C)", "p", ["  addcmul from Add y: matches", "  gated: it does not "]),
        ("y = Cos (x)", "y", ["Cos y:", "  no rewrite starts from it, or from what reads it"]),
    ],
)
def test_explain_says_which_condition_failed(body: str, name: str, said: list[str]) -> None:
    context = context_of("linear", f"{X} {{ {body} }}")
    lines = passes.explain(context, name, passes.chosen("cuda", "float32")).splitlines()
    assert all(any(line.startswith(each) for line in lines) for each in said), lines


def test_explain_names_what_is_alike() -> None:
    context = context_of("linear", f"{X} {{ scores = MatMul (x, W) y = Relu (scores) }}")
    with pytest.raises(ExportError, match=r"explain='score': no node or value .* similar names: scores"):
        passes.explain(context, "score", passes.chosen("cuda", "float32"))


def test_a_pass_says_what_later_ones_left() -> None:
    """What a later rewrite absorbs is not counted; a reason stays with the value."""
    context = context_of("linear", f"{X} {{ s = Sigmoid (x) a = Mul (s, x) y = Mul (a, z) }}")
    for name in ("activation", "gated"):
        assert passes.apply_passes(context, [ALL[name]]) == {name}
    assert fused(context.model) == {"swiglu": 1}
