"""Tests of the rewrites of products, attention and activations on small graphs, and of what stays."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import (
    JOINED,
    KT,
    apart,
    apart_again,
    joined,
    nodes,
    optimized,
    parsed,
    types,
    weights,
)
from other_sizes import assert_same

from twinop.optimize import merge_linear

UNARY, LINEAR = (f"(float[N, 6, 8] x) => (float[N, 6, {columns}] y)" for columns in (8, 5))
NUMBERS = {
    "root": 2**0.5, "inverse": 0.5**0.5, "one": 1, "half": 0.5, "two": 2, "three": 3, "small": 0.044715,
    "factor": (2 / np.pi) ** 0.5, "quick": 1.702,
}  # fmt: skip
MATRIX = {"w": weights(8, 5), "t": weights(5, 8), "bias": weights(5, seed=1), "row": weights(1, 1, 5)}
GIVEN = MATRIX | {name: np.array(number, np.float32) for name, number in NUMBERS.items()} | {
    "v": weights(8, 8), "kernel": weights(4, 4, 1, 1), "batched": weights(3, 8, 5), "empty": weights(8, 0),
    "to2": np.array([-1, 8]), "to3": np.array([-1, 6, 5]),
}  # fmt: skip
GELU, TANH = ({name: 1} for name in ("gelu", "gelu_tanh"))
RELU, LAYER, PLAIN = ({name: 1} for name in ("linear+bias+relu", "linear+bias", "linear"))
SQUARE, ONE = {"linear+relu": 1, "square": 1}, {"CustomLinear": 1}
ADDCMUL = "(float[B, 6, 8] x, float[B, 1, 8] s, float[B, 1, 8] g) => (float[B, 6, 8] y)"
# The signature, the nodes, what is fused, the types of nodes after it, and what is skipped.
FUSED: dict[str, tuple[str, str, dict[str, int], dict[str, int], dict[str, int]]] = {
    "gelu": (UNARY, "y = Gelu (x)", GELU, {"CustomGelu": 1}, {}),
    "gelu of erf, halved first": (
        UNARY, "a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, half) y = Mul (d, c)",
        GELU, {"CustomGelu": 1}, {},
    ),
    "gelu of erf, halved last": (
        UNARY, "a = Mul (x, inverse) b = Erf (a) c = Add (one, b) d = Mul (x, c) y = Mul (d, half)",
        GELU, {"CustomGelu": 1}, {},
    ),
    "gelu of erf, halved sum": (
        UNARY, "a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (c, half) y = Mul (x, d)",
        GELU, {"CustomGelu": 1}, {},
    ),
    "gelu of tanh, power": (
        UNARY, "a = Pow (x, three) b = Mul (a, small) c = Add (x, b) d = Mul (c, factor) e = Tanh (d)"
        " f = Add (e, one) g = Mul (x, half) y = Mul (g, f)", TANH, {"CustomGelu": 1}, {},
    ),
    "gelu of tanh, products": (
        UNARY, "a = Mul (x, x) b = Mul (a, small) c = Add (b, one) d = Mul (x, factor) e = Mul (d, c)"
        " f = Tanh (e) g = Add (one, f) h = Mul (half, x) y = Mul (h, g)", TANH, {"CustomGelu": 1}, {},
    ),
    "silu, and what ONNX Runtime fuses": (
        "(float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y)",
        "a = Sigmoid (x) b = Mul (a, x) c = Mul (b, quick) d = Sigmoid (c) e = Mul (b, d)"
        " f = Conv (e, kernel) g = Sigmoid (f) y = Mul (f, g)",
        {"silu": 1}, {"CustomSilu": 1, "Mul": 3, "Sigmoid": 2, "Conv": 1},
        {"quick GELU: ONNX Runtime fuses it": 1, "silu after a convolution: ONNX Runtime fuses it": 1},
    ),
    "a square after relu (Nemotron)": (
        LINEAR, "a = MatMul (x, w) r = Relu (a) y = Pow (r, two)", SQUARE, ONE | {"CustomSquare": 1}, {}
    ),
    "a product with itself after relu": (
        LINEAR, "a = MatMul (x, w) r = Relu (a) y = Mul (r, r)", SQUARE, ONE | {"CustomSquare": 1}, {}
    ),
    "a square alone": (UNARY, "y = Pow (x, two)", {}, {"Pow": 1}, {}),
    "a cube": (UNARY, "r = Relu (x) y = Pow (r, three)", {}, {"Relu": 1, "Pow": 1}, {}),
    "a product of relu": (UNARY, "r = Relu (x) y = Mul (r, x)", {}, {"Relu": 1, "Mul": 1}, {}),
    "a product": (LINEAR, "y = MatMul (x, w)", PLAIN, ONE, {}),
    "a bias": (LINEAR, "a = MatMul (x, w) y = Add (bias, a)", LAYER, ONE, {}),
    "a bias of three axes": (LINEAR, "a = MatMul (x, w) y = Add (a, row)", LAYER, ONE, {}),
    "a transposed weight": (LINEAR, "m = Transpose <perm=[1, 0]> (t) y = MatMul (x, m)", PLAIN, ONE, {}),
    "relu": (LINEAR, "a = MatMul (x, w) c = Add (a, bias) y = Relu (c)", RELU, ONE, {}),
    "silu": (
        LINEAR, "a = MatMul (x, w) c = Add (a, bias) s = Sigmoid (c) y = Mul (s, c)",
        {"linear+bias+silu": 1}, ONE, {},
    ),
    "gelu behind it": (
        LINEAR, 'a = MatMul (x, w) y = Gelu <approximate="tanh"> (a)', {"linear+gelu_tanh": 1}, ONE, {}
    ),
    "a Gemm of tokens": (
        LINEAR, "flat = Reshape (x, to2) a = Gemm (flat, w, bias) c = Reshape (a, to3) y = Relu (c)",
        RELU, ONE, {},
    ),
    "tf2onnx's Gemm": ("(float[N, 8] x) => (float[N, 5] y)", "y = Gemm <beta=0.0> (x, w)", PLAIN, ONE, {}),
    "ONNX Runtime's Gemm with an activation": (
        "(float[N, 8] x) => (float[N, 5] y)",
        'y = com.microsoft.FusedGemm <activation = "Relu"> (x, w, bias)', RELU, ONE, {},
    ),
    # The function body is one for all nodes, so the others get a bias of zeros.
    "a bias of some products only": (
        LINEAR, "a = MatMul (x, v) c = MatMul (a, w) y = Add (c, bias)",
        PLAIN | LAYER, {"CustomLinear": 2}, {},
    ),
    "products that stay": (
        "(float[3, 6, 8] x) => (float[3, 6, 5] y, float[18, 5] z, float[3, 6, 0] e)",
        "y = MatMul (x, batched) f = Reshape (x, to2) z = Gemm <alpha=0.5> (f, w) e = MatMul (x, empty)",
        {}, {"MatMul": 2, "Reshape": 1, "Gemm": 1},
        {
            "MatMul: a weight of 3 dimensions": 1, "MatMul: a dimension of size 0": 1,
            "Gemm: transA is set, or alpha or beta is not 1": 1,
        },
    ),
    # The second and third factor are broadcast along the tokens.
    "scale and shift": (ADDCMUL, "p = Mul (x, s) y = Add (p, g)", {"addcmul": 1}, {"CustomAddcmul": 1}, {}),
    "a gate": (ADDCMUL, "p = Mul (g, x) y = Add (x, p)", {"addcmul": 1}, {"CustomAddcmul": 1}, {}),
    "two products": (
        ADDCMUL, "p = Mul (x, g) q = Mul (x, s) y = Add (p, q)",
        {"addcmul": 1}, {"CustomAddcmul": 1, "Mul": 1}, {},
    ),
    "a product that is read twice": (
        ADDCMUL, "p = Mul (x, s) q = Add (p, g) y = Mul (p, q)", {}, {"Mul": 2, "Add": 1}, {}
    ),
}  # fmt: skip


def test_what_is_fused(tmp_path: Path) -> None:
    """All of them in one file, each with weights of its own."""
    protos = dict[str, onnx.ModelProto]()
    for seed, (name, (signature, body, *_)) in enumerate(FUSED.items()):
        own = {key: weights(*GIVEN[key].shape, seed=seed) for key in ("w", "v", "t")}
        protos[name] = parsed(f"{signature} {{ {body} }}", **GIVEN | own)
    report, model = optimized(joined(protos), tmp_path)
    found = {name: types(nodes) for name, nodes in apart_again(model).items()}
    assert found == {name: kinds for name, (_, _, _, kinds, _) in FUSED.items()}
    assert report.fused == sum((Counter(fused) for _, _, fused, _, _ in FUSED.values()), Counter())
    assert report.skipped == {reason: 1 for *_, skipped in FUSED.values() for reason in skipped}
    declared = ir.load(report.source).graph.outputs
    assert [str(each.shape) for each in model.graph.outputs] == [str(each.shape) for each in declared]
    linear = nodes(model, "CustomLinear")
    assert all(node.attributes.get_string("layout", "nk") == "nk" for node in linear)
    assert len({len(node.inputs) for node in linear}) == 1


FUSED_CONV = """(float[N, 2, 6, 6] x) => (float[N, 3, 4, 4] y) {
    c = com.microsoft.FusedConv <activation = "NAME", activation_params = [NUMBERS]> (x, w, bias, z)
    n = Neg (c) y = Max (n, c) }"""
FUSED_GEMM = """(float[N, 8] x) => (float[N, 5] y) {
    c = com.microsoft.FusedGemm <transB = 1, activation = "NAME", activation_alpha = NUMBERS> (x, w, bias)
    n = Neg (c) y = Max (n, c) }"""


@pytest.mark.parametrize(
    ("text", "name", "numbers", "opset"),
    [
        (FUSED_CONV, "LeakyRelu", "0.3", 16),
        (FUSED_CONV, "Clip", "-0.4, 0.6", 9),
        (FUSED_GEMM, "Elu", "0.7", 13),
    ],
)
def test_fused_activations_of_onnxruntime(
    text: str, name: str, numbers: str, opset: int, tmp_path: Path
) -> None:
    """No inference knows their types, which a conversion to 16 bits needs."""
    is_conv = text is FUSED_CONV
    tensors = {"w": weights(3, 2, 3, 3) if is_conv else weights(5, 8), "bias": weights(3 if is_conv else 5)}
    tensors |= {"z": weights(1, 3, 4, 4)} if is_conv else {}
    proto = parsed(text.replace("NAME", name).replace("NUMBERS", numbers), opset, **tensors)
    if is_conv:
        proto.graph.node[0].input[3] = "" if name == "Clip" else "z"
    _, model = optimized(proto, tmp_path, dtype="float16")
    assert nodes(model, name)


def test_a_square_in_16_bits(tmp_path: Path) -> None:
    """Pow would stay in fp32, between casts."""
    proto = parsed(f"{LINEAR} {{ a = MatMul (x, w) r = Relu (a) y = Pow (r, two) }}", **GIVEN)
    report, model = optimized(proto, tmp_path, dtype="float16")
    assert report.fused == SQUARE and types(model) == ONE | {"CustomSquare": 1}


@pytest.mark.parametrize("body", ["y = Mul (b, b)", "y = Gelu (b)"])
def test_what_is_slower_on_the_cpu_stays(body: str, tmp_path: Path) -> None:
    """A rule says it, and no clock. A gate becomes one node with its product."""
    text = f"{UNARY} {{ a = Sigmoid (x) b = Mul (a, x) {body} }}"
    proto = parsed(text)
    report, _ = optimized(proto, tmp_path, device="cpu")
    assert not report.fused and "silu: ONNX Runtime fuses it" in report.skipped
    gate = parsed(f"{UNARY} {{ a = Sigmoid (x) b = Mul (a, x) c = Tanh (x) y = Mul (b, c) }}")
    report, _ = optimized(gate, tmp_path, device="cpu")
    assert report.fused == {"swiglu": 1} and not report.skipped


QKV = """(float[%s, 6, 8] x) => (float[%s, 6, 5] y) {
    q = MatMul (x, w) k = MatMul (x, t5) r = Add (k, bias) a = MatMul (x, w3) z = Relu (a)
    c = Add (q, r) d = ReduceSum (z, last) y = Add (c, d) }"""


@pytest.mark.parametrize("batch", ["2", "many", "N"])
def test_products_of_the_same_few_rows(batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products become one where the rows are known and few; the one with an activation stays apart."""
    monkeypatch.setattr(merge_linear, "_MAX_ELEMENTS", 12 * 13)
    few, batch = batch == "2", batch.replace("many", "3")
    given = {"t5": weights(8, 5, seed=2), "w3": weights(8, 3), "last": np.array([-1])}
    report, model = optimized(parsed(QKV % (batch, batch), **MATRIX, **given), tmp_path)
    assert report.fused.get("matmuls of one input merged", 0) == few
    assert [node.inputs[1].shape.dims for node in nodes(model, "CustomLinear")] == (  # type: ignore[union-attr]
        [(10, 8), (3, 8)] if few else [(5, 8), (5, 8), (3, 8)]
    )
    assert types(model).get("Split", 0) == few


GATED = "(float[N, 6, 8] x) => (float[N, 6, 4] y)"
GATES = {
    "two products": "g = MatMul (x, v) s = Sigmoid (g) a = Mul (g, s) u = MatMul (x, w) y = Mul (a, u)",
    "two biases": "p = MatMul (x, v) g = Add (p, b) a = Gelu (g) q = MatMul (x, w) u = Add (q, c)"
    " y = Mul (u, a)",
    "a bias of the gate": "p = MatMul (x, v) g = Add (p, b) s = Sigmoid (g) a = Mul (g, s) u = MatMul (x, w)"
    " y = Mul (a, u)",
    "a bias of the other": "g = MatMul (x, v) s = Sigmoid (g) a = Mul (g, s) q = MatMul (x, w) u = Add (q, c)"
    " y = Mul (u, a)",
    "unflatten": "p = MatMul (x, packed) r = Reshape (p, pairs) g = Gather <axis=2> (r, zero)"
    " u = Gather <axis=-2> (r, one) s = Sigmoid (g) a = Mul (g, s) y = Mul (a, u)",
    "unflatten, up first": "p = MatMul (x, packed) r = Reshape (p, pairs)"
    " i, j = Split <axis=-2, num_outputs=2> (r) u = Squeeze (i, axis) g = Squeeze (j, axis) s = Sigmoid (g)"
    " a = Mul (g, s) y = Mul (a, u)",
    "halves": "p = MatMul (x, packed) g, u = Split <axis=-1, num_outputs=2> (p) s = Sigmoid (g)"
    " a = Mul (g, s) y = Mul (a, u)",
    "halves, up first": "p = MatMul (x, packed) u, g = Split <axis=-1, num_outputs=2> (p) s = Sigmoid (g)"
    " a = Mul (g, s) y = Mul (a, u)",
}
PACKED = {
    "v": weights(8, 4), "w": weights(8, 4, seed=1), "b": weights(4), "c": weights(4, seed=1),
    "packed": weights(8, 8), "pairs": np.array([0, 0, 2, 4]), "zero": np.array(0), "one": np.array(1),
    "axis": np.array([-2]),
}  # fmt: skip


def test_gates(tmp_path: Path) -> None:
    protos = {name: parsed(f"{GATED} {{ {body} }}", **PACKED) for name, body in GATES.items()}
    report, model = optimized(joined(protos), tmp_path)
    zeros = {"Shape": 1, "ConstantOfShape": 1}  # a bias, as others have one
    for name, found in apart_again(model).items():
        assert types(found) == {"CustomLinearSwiglu": 1} | ({} if "bias" in name else zeros), name
    assert set(report.fused) == {"linear+gate (gelu)", "linear+gate (silu)"}
    assert_same(tmp_path, **{f"{name}/x": (5, 6, 8) for name in GATES})


QKV_OF = "(float[B, S, 8] q, float[B, T, 8] k, float[B, T, 8] v%s) => (float[B, S, 8] y)"
HEADS = f"{QKV_OF} {{ {apart('qv')} {apart('k', perm=KT)} %s o = MatMul (p, vh) {JOINED} }}"
SHAPES = {
    "apart": np.array([0, 0, 2, 4]), "joined": np.array([0, 0, 8]), "scale": np.array(0.3, np.float32),
    "low": np.array(-1e9, np.float32), "low16": np.array(-65504, np.float32),
    "lowest": np.array(np.finfo(np.float32).min), "end": np.array([-1]), "axis": np.array(3),
}  # fmt: skip
SCORES = {
    "plain": ("", "s = MatMul (qh, kh) p = Softmax (s)"),
    "scaled after": ("", "s = MatMul (qh, kh) t = Mul (s, scale) p = Softmax (t)"),
    "scaled before": ("", "r = Mul (qh, scale) s = MatMul (r, kh) p = Softmax (s)"),
    "divided": ("", "s = MatMul (qh, kh) t = Div (s, scale) p = Softmax (t)"),
    "added mask": (", float[B, 1, 1, T] m", "s = MatMul (qh, kh) t = Add (s, m) p = Softmax (t)"),
    "mask of heads": (", float[1, 2, S, T] m", "s = MatMul (qh, kh) t = Add (m, s) p = Softmax (t)"),
    "two masks": (
        ", float[B, 1, 1, T] m, float[1, 1, S, T] n",
        "s = MatMul (qh, kh) t = Add (s, m) r = Add (t, n) p = Softmax (r)",
    ),
    "scaled after the mask": (
        ", float[B, 1, S, T] m",
        "s = MatMul (qh, kh) t = Add (s, m) r = Mul (t, scale) p = Softmax (r)",
    ),
    "subtracted mask, then scaled": (
        ", float[B, 1, S, T] m",
        "s = MatMul (qh, kh) t = Sub (s, m) r = Div (t, scale) p = Softmax (r)",
    ),
    "chosen mask, then scaled": (
        ", bool[B, 1, S, T] m",
        "s = MatMul (qh, kh) t = Where (m, s, low) r = Mul (t, scale) p = Softmax (r)",
    ),
    "bounded, as OPT's": (
        ", float[B, 1, S, T] m",
        "s = MatMul (qh, kh) t = Add (s, m) r = Max (t, lowest) p = Softmax (r)",
    ),
    "chosen mask": (", bool[B, 1, S, T] m", "s = MatMul (qh, kh) t = Where (m, s, low) p = Softmax (t)"),
    "less their maximum (LayoutLMv3)": (
        ", float[B, 1, S, T] m",
        "s = MatMul (qh, kh) t = Add (s, m) h = ReduceMax <keepdims=0> (t, end) u = Unsqueeze (h, end)"
        " r = Sub (t, u) p = Softmax (r)",
    ),
    "of fp16 (MPT)": (", bool[B, 1, S, T] m", "s = MatMul (qh, kh) t = Where (m, s, low16) p = Softmax (t)"),
}


def test_attention(tmp_path: Path) -> None:
    report, model = optimized(
        joined({name: parsed(HEADS % SCORES[name], **SHAPES) for name in SCORES}), tmp_path
    )
    assert report.fused == {"attention": len(SCORES)}
    for name, found in apart_again(model).items():
        [node] = [each for each in found if each.op_type == "MultiHeadAttention"]
        inputs = [f"{name}/{each}" for each in "qkv"]
        assert [value.name for value in node.inputs[:3] if value is not None] == inputs
        assert node.attributes.get_int("num_heads", 0) == 2
        assert (len(node.inputs) > 5) == bool(SCORES[name][0]) and "MatMul" not in types(found), name
    assert [str(dim) for dim in model.graph.inputs[1].shape or ()] == ["B", "T", "8"]


_TOGETHER = " ".join(f"{n}b = Reshape ({n}h, together)" for n in "qkv")
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    # Convolutions compute [B, C, T].
    "k is not transposed (SqueezeBERT)": (
        f"""(float[B, 8, S] q, float[B, 8, T] k, float[B, 8, T] v) => (float[B, S, 8] y) {{
        {apart("qv", "columns", "0, 1, 3, 2")} kh = Reshape (k, columns) s = MatMul (qh, kh)
        p = Softmax (s) o = MatMul (p, vh) {JOINED} }}""",
        {"q": (3, 8, 6), "k": (3, 8, 5), "v": (3, 8, 5)},
    ),
    "one head of k and v, which MatMul broadcasts (Falcon, GPTBigCode)": (
        f"""(float[B, 6, 8] q, float[B, 6, 4] k, float[B, 6, 4] v) => (float[B, 6, 8] y) {{
        {apart("q")} {apart("k", "single", KT)} {apart("v", "single")} s = MatMul (qh, kh)
        n = Shape (qh) d = Gather (n, axis) f = Cast <to=1> (d) r = Sqrt (f) t = Div (s, r) p = Softmax (t)
        o = MatMul (p, vh) {JOINED} }}""",
        {"q": (3, 6, 8), "k": (3, 6, 4), "v": (3, 6, 4)},
    ),
    # As torch's TorchScript exporter writes BLOOM, where batch and length are dynamic.
    "it reads the size of its result": (
        f"""{QKV_OF % ""} {{ {apart("qkv")} n = Shape (q) s0 = Gather (n, one)
        together = Concat <axis=0> (minus, s0, four) {_TOGETHER}
        kk = Transpose <perm=[0, 2, 1]> (kb) s = MatMul (qb, kk) t = Mul (s, scale)
        scores = Concat <axis=0> (minus, two, s0, s0) w = Reshape (t, scores) p = Softmax (w)
        rows = Concat <axis=0> (minus, s0, s0) pb = Reshape (p, rows) ob = MatMul (pb, vb)
        size = Shape (ob) count = Gather (size, zero) b = Div (count, two) tokens = Gather (size, one)
        heads = Concat <axis=0> (b, two, tokens, four) o = Reshape (ob, heads)
        ot = Transpose <perm=[0, 2, 1, 3]> (o) of = Shape (ot) rest = Slice (of, zero, two)
        whole = Concat <axis=0> (rest, eight) y = Reshape (ot, whole) }}""".replace("T,", "S,"),
        {"q": (3, 6, 8), "k": (3, 6, 8), "v": (3, 6, 8)},
    ),
    "its result is regrouped": (
        """(float[N, 8, 2, 4] x) => (float[M, 4, 8] y) { q = Transpose <perm=[0, 2, 1, 3]> (x)
        k = Transpose <perm=[0, 2, 3, 1]> (x) s = MatMul (q, k) p = Softmax <axis=-1> (s) o = MatMul (p, q)
        t = Transpose <perm=[0, 2, 1, 3]> (o) y = Reshape (t, groups) }""",
        {"x": (3, 8, 2, 4)},
    ),
    "scaled before the heads (Whisper, BART)": (
        HEADS.replace("q4 = Reshape (q,", "r = Mul (q, scale) q4 = Reshape (r,") % SCORES["plain"],
        {"q": (3, 6, 8), "k": (3, 5, 8), "v": (3, 5, 8)},
    ),
    # Of opset 12: onnx's conversion writes Flatten, Softmax and Reshape where it does not know the rank.
    "a softmax of unknown rank": (
        f"""{QKV_OF % ""} {{ whole = Shape (q) bs = Gather (whole, outer) split = Concat <axis=0> (bs, last)
        {apart("qv", "split")} {apart("k", "split", KT)} s = MatMul (qh, kh) p = Softmax <axis=3> (s)
        o = MatMul (p, vh) {JOINED} }}""".replace("T,", "S,"),
        {"q": (3, 6, 8), "k": (3, 6, 8), "v": (3, 6, 8)},
    ),
}
_LISTS = {"columns": [0, 2, 4, -1], "single": [0, 0, 1, 4], "groups": [-1, 4, 8], "outer": [0, 1]}
_LISTS |= {"zero": [0], "one": [1], "two": [2], "four": [4], "minus": [-1], "last": [2, 4], "eight": [8]}


def test_attention_in_other_forms(tmp_path: Path) -> None:
    lists = {key: np.array(each) for key, each in _LISTS.items()}
    protos = {name: parsed(text, **SHAPES, **lists) for name, (text, _) in FORMS.items()}
    unknown = protos.pop("a softmax of unknown rank")
    unknown.opset_import[0].version, unknown.ir_version = 12, 7
    for proto, count in ((joined(protos), len(protos)), (joined({"a softmax of unknown rank": unknown}), 1)):
        report, model = optimized(proto, tmp_path)
        assert report.fused == {"attention": count}
        assert not nodes(model, "Softmax", "MatMul", "Mul", "Shape", "Flatten")
        names = {value.name.partition("/")[0] for value in proto.graph.input}
        sizes = {f"{name}/{each}": size for name in names for each, size in FORMS[name][1].items()}
        assert_same(tmp_path, **sizes)


def test_attention_of_einsums(tmp_path: Path) -> None:
    """Keras and JAX write heads, scores and their sum as equations, here with k before q."""
    head = '{0}0 = Einsum <equation = "bsw,whd->bshd"> (x, w{0}) {0} = Add (b{0}, {0}0)'
    heads = " ".join(map(head.format, "qkv"))
    model = parsed(
        f"(float[B, S, 8] x) => (float[B, S, 8] y) {{ {heads} "
        's = Einsum <equation = "bkhd,bqhd->bhqk"> (k, q) p = Softmax (s) '
        'a = Einsum <equation = "bhqk,bkhd->bqhd"> (p, v) y = Einsum <equation = "bqhd,hdw->bqw"> (a, o) }',
        **{f"w{each}": weights(8, 2, 4, seed=seed) for seed, each in enumerate("qkv")},
        **{f"b{each}": weights(2, 4, seed=seed) for seed, each in enumerate("qkv")},
        o=weights(2, 4, 8),
    )
    report, fast = optimized(model, tmp_path)
    assert report.fused == {"linear+bias": 3, "linear": 1, "attention": 1} and not nodes(
        fast, "Transpose", "Einsum"
    )


def test_a_bias_that_is_added_in_fp32_stays_behind_an_einsum(tmp_path: Path) -> None:
    text = """(float16[A, 8] x) => (float[A, 2, 4] y) { e = Einsum <equation = "aw,whd->ahd"> (x, w)
        f = Cast <to = 1> (e) y = Add (f, bias) }"""
    model = parsed(text, w=weights(8, 2, 4).astype(np.float16), bias=weights(2, 4))
    report, fast = optimized(model, tmp_path)
    assert report.fused == {"linear": 1} and len(nodes(fast, "Add", "Cast")) == 2


def test_an_einsum_is_transposed_behind_the_matmul(tmp_path: Path) -> None:
    """ONNX Runtime 1.31.1 crashes in fp16 on the CPU on a matmul of what was transposed."""
    text = '(float[A, B, 8] x) => (float[B, A, 6] y) { y = Einsum <equation = "abd,dk->bak"> (x, w) }'
    report, fast = optimized(parsed(text, w=weights(8, 6)), tmp_path, dtype="float16", device="cpu")
    assert [node.op_type for node in fast.graph] == ["MatMul", "Transpose"] and not report.notes
    assert_same(tmp_path, rtol=1e-2, atol=1e-2, x=(2, 3, 8))


def test_reshapes_that_undo_each_other(tmp_path: Path) -> None:
    """GroupViT splits the heads of its probabilities, and joins them again."""
    text = """(float[B, 4, S, 8] x) => (float[C, S, 3] y) { shape = Shape (x) rows = Shape <start = 2> (x)
        flat = Concat <axis = 0> (minus, rows) a = Reshape (x, flat) b = Softmax (a) c = Reshape (b, shape)
        d = Reshape (c, flat) y = MatMul (d, w) }"""
    _, model = optimized(parsed(text, minus=np.array([-1]), w=weights(8, 3)), tmp_path)
    assert len(nodes(model, "Reshape")) == 1
    assert_same(tmp_path, x=(2, 4, 3, 8))


@pytest.mark.parametrize("equation", ["...aij,...jk->...aik", "iij,ijk->ik"])
def test_an_einsum_with_an_axis_without_a_letter_of_its_own_stays(equation: str, tmp_path: Path) -> None:
    """An ellipsis of three axes is as long as its text; a letter twice is a diagonal."""
    a, b, y = ("2,3,2,3,4,5", "2,3,2,5,6", "2,3,2,3,4,6") if "." in equation else ("3,3,5", "3,5,6", "3,6")
    text = f'(float[{a}] a, float[{b}] b) => (float[{y}] y) {{ y = Einsum <equation = "{equation}"> (a, b) }}'
    _, fast = optimized(parsed(text), tmp_path)
    assert [node.op_type for node in fast.graph] == ["Einsum"]
    sizes: dict[str, Any] = {each: tuple(map(int, of.split(","))) for each, of in (("a", a), ("b", b))}
    assert_same(tmp_path, **sizes)


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_before_opset_13_of_no_rows(axis: int, tmp_path: Path) -> None:
    """onnx's conversion flattens and reshapes, which no -1 or 0 may do where there are no elements."""
    text = f"(float[N, S, 8] x) => (float[N, S, 8] y) {{ a = MatMul (x, w) y = Softmax <axis = {axis}> (a) }}"
    proto = parsed(text, 12, w=weights(8, 8))
    assert optimized(proto, tmp_path)[0].fused == {"linear": 1}
    for batch in (0, 1, 3):
        assert_same(tmp_path, x=(batch, 5, 8))


@pytest.mark.parametrize(("op", "opset", "dtype"), [("Upsample", 9, "float16"), ("Resize", 10, None)])
def test_images_that_older_opsets_enlarge(op: str, opset: int, dtype: str | None, tmp_path: Path) -> None:
    """onnx's conversion gives a result another name, and Resize other places of its samples."""
    text = f"""(float[N, 8] x) => (float[N, M] y) {{ h = MatMul (x, w) u = {op} <mode = "linear"> (h, twice)
        y = Relu (u) }}"""
    model = parsed(text, opset, 4, w=weights(8, 4), twice=np.array([1, 2], np.float32))
    report, _ = optimized(model, tmp_path, dtype=dtype)
    assert report.fused == {"linear": 1}


_HIDDEN = "c = Greater (m, scale) t = Where (c, s, low) p = Softmax (t)"


def test_attention_of_windows(tmp_path: Path) -> None:
    """Hiera's windows are [B, H, W, S, D]; ViTDet and SAM join batch and heads; SAM adds a bias."""
    protos, sizes = dict[str, onnx.ModelProto](), dict[str, tuple[int, ...]]()
    for outer, probabilities in product(
        ("B, 2, 3", "2, 2, 3", "12", "B"), ("p = Softmax (s)", "t = Add (s, m) p = Softmax (t)", _HIDDEN)
    ):
        axes, name = [*range(outer.count(",") + 1)], f"{len(protos)}"
        perm = [*axes, len(axes) + 1, len(axes)]
        text = f"""(float[{outer}, 6, 8] q, float[{outer}, 4, 8] k, float[{outer}, 4, 5] v,
            float[{outer}, 6, 4] m) => (float[{outer}, 6, 5] y) {{
            r = Mul (q, scale) a = Abs (k) kh = Transpose <perm={perm}> (a)
            s = MatMul (r, kh) {probabilities} y = MatMul (p, v) }}"""
        protos[name] = parsed(text, **SHAPES)
        first = tuple(3 if size == "B" else int(size) for size in outer.split(", "))
        each = {"q": (*first, 6, 8), "k": (*first, 4, 8), "v": (*first, 4, 5), "m": (*first, 6, 4)}
        sizes |= {f"{name}/{key}": size for key, size in each.items()}
    report, model = optimized(joined(protos), tmp_path)
    assert report.fused == {"attention": 12} and not nodes(model, "Softmax", "MatMul", "Transpose")
    assert_same(tmp_path, **sizes)


GROUPED = {
    "a mask for each window (Swin)": ("float[1, 3, 1, 6, 6] a, float[2, 1, 1] b", "3, 2, 6, 6"),
    "a mask for each window of each image": ("float[4, 3, 2, 6, 6] a, float[2, 1, 1] b", "3, 2, 6, 6"),
    "a number for each head (SwinV2)": ("float[1, 3, 2, 6, 6] a, float[1, 2, 1, 1] b", "3, 2, 6, 6"),
    "rows and columns (ViTDet)": ("float[12, 2, 3, 2, 1] a, float[12, 2, 3, 1, 3] b", "2, 3, 2, 3"),
}


@pytest.mark.parametrize("name", GROUPED)
def test_what_is_added_to_grouped_scores(name: str, tmp_path: Path) -> None:
    (inputs, groups), is_flat = GROUPED[name], "[12" in GROUPED[name][0]
    heads = " ".join(f"{each}h = Abs ({each})" for each in "qkv") if is_flat else apart("qkv")
    perm, end = ("0, 2, 1", "y = Identity (o)") if is_flat else ("0, 1, 3, 2", JOINED)
    scaled = "Mul (s, scale)" if is_flat else "Mul (b, s)"
    sums = "d = Add (c, b) e = Add (a, d)" if is_flat else "e = Add (a, c)"
    text = f"""(float[12, 6, 8] q, float[12, 6, 8] k, float[12, 6, 8] v, {inputs}) => (float[12, 6, 8] y)
        <int64[{groups.count(",") + 2}] groups = {{-1, {groups}}}> {{
        {heads} kt = Transpose <perm=[{perm}]> (kh) s = MatMul (qh, kt) t = {scaled}
        c = Reshape (t, groups) {sums} r = Reshape (e, single) p = Softmax (r) o = MatMul (p, vh) {end} }}"""
    single = [-1, 6, 6] if is_flat else [-1, 2, 6, 6]
    model = parsed(text, **SHAPES, single=np.array(single))
    report, fast = optimized(model, tmp_path)
    assert report.fused == {"attention": 1} and not nodes(fast, "Softmax", "MatMul")
    sizes = {
        each.name: tuple(d.dim_value for d in each.type.tensor_type.shape.dim) for each in model.graph.input
    }
    assert_same(tmp_path, **sizes)


@pytest.mark.parametrize("outer", ["B, C", "2, 40000", "B, 2000"])
def test_windows_that_stay(outer: str, tmp_path: Path) -> None:
    """More sequences than a launch takes, or a number that nothing bounds."""
    rank = outer.count(",") + 1
    text = f"""(float[{outer}, 1, 1, 2] q) => (float[{outer}, 1, 1, 2] y) {{
        a = Abs (q) kt = Transpose <perm={[*range(rank + 1), rank + 2, rank + 1]}> (a)
        s = MatMul (q, kt) p = Softmax (s) y = MatMul (p, q) }}"""
    report, _ = optimized(parsed(text, **SHAPES), tmp_path)
    assert not report.fused and "unknown number" in next(iter(report.skipped))


LATE = "p = Softmax (x) pb = Reshape (p, rows)"
ALIBI = "u = Mul (s, scale) t = Add (alibi, u)"


@pytest.mark.parametrize(
    ("batch", "alibi", "sums", "shares"),
    [
        ("4", "8", ALIBI, LATE),
        ("4", "1", ALIBI, LATE),
        ("B", "1", ALIBI, LATE),
        ("B", "8", "t = Div (s, scale)", LATE),
        ("B", "8", "t = Div (s, scale)", "xb = Reshape (x, rows) pb = Softmax (xb)"),
    ],
)
def test_heads_in_the_batch(batch: str, alibi: str, sums: str, shares: str, tmp_path: Path) -> None:
    """BLOOM computes both products on [B*H, S, D], and adds ALiBi there; BART also has the softmax there."""
    text = f"""(float[{batch}, 6, 8] q, float[{batch}, 6, 8] k, float[{batch}, 6, 8] v,
        float[{alibi}, 1, 6] alibi, float[{batch}, 1, 6, 6] m) => (float[{batch}, 6, 8] y) {{
        {apart("qkv")} {_TOGETHER} kk = Transpose <perm=[0, 2, 1]> (kb) s = MatMul (qb, kk) {sums}
        w = Reshape (t, scores) x = Add (w, m) {shares} ob = MatMul (pb, vb)
        o = Reshape (ob, heads) {JOINED} }}"""
    targets = {"together": [-1, 6, 4], "scores": [-1, 2, 6, 6], "rows": [-1, 6, 6], "heads": [-1, 2, 6, 4]}
    constants = SHAPES | {name: np.array(target) for name, target in targets.items()}
    npz = tmp_path / "in.npz"
    sizes: dict[str, Any] = dict.fromkeys("qkv", (4, 6, 8)) | {"alibi": (int(alibi), 1, 6), "m": (4, 1, 6, 6)}
    given: dict[str, Any] = {name: weights(*size) for name, size in sizes.items()}
    np.savez(npz, **given)
    report, model = optimized(parsed(text, **constants), tmp_path, inputs_file=npz)
    assert report.fused == {"attention": 1} and not nodes(model, "Softmax", "MatMul", "Transpose")
    assert_same(tmp_path, **sizes)


def test_heads_of_tf2onnx(tmp_path: Path) -> None:
    """Its Einsum, as in Keras's attention, gives each input and the result a dimension of 1."""
    units = ("q", "three", "0, 2, 1, 3, 4"), ("k", "one", "0, 3, 1, 2, 4"), ("v", "two", "0, 3, 2, 4, 1")
    text = apart("qkv")
    for n, axis, perm in units:
        text += f""" {n}u = Unsqueeze ({n}4, {axis}) {n}t = Transpose <perm=[{perm}]> ({n}u)
            {n}s = Shape ({n}t) {n}o = Gather ({n}s, outer) {n}p = ReduceProd <keepdims=1> ({n}o)
            {n}c = Concat <axis=0> ({n}p, any, {"six" if n == "v" else "four"}) {n}b = Reshape ({n}t, {n}c)"""
    text += """ kr = Transpose <perm=[0, 2, 1]> (kb) vr = Transpose <perm=[0, 2, 1]> (vb) s = MatMul (qb, kr)
        r = Reshape (s, scores) t = Squeeze (r, last) u = Mul (t, scale) p = Softmax (u)
        pu = Unsqueeze (p, three) pb = Reshape (pu, rows) ob = MatMul (pb, vr) o5 = Reshape (ob, heads)
        o = Squeeze (o5, last)"""
    constants = {"outer": [0, 1], "any": [-1], "one": [1], "two": [2], "three": [3], "four": [4], "six": [6]}
    constants |= {"scores": [-1, 2, 6, 6, 1], "rows": [-1, 6, 6], "heads": [-1, 2, 6, 4, 1], "last": [4]}
    given = SHAPES | {name: np.array(numbers) for name, numbers in constants.items()}
    shape = "float[B, 6, 8]"
    proto = parsed(f"({shape} q, {shape} k, {shape} v) => ({shape} y) {{ {text} {JOINED} }}", **given)
    report, model = optimized(proto, tmp_path)
    assert report.fused == {"attention": 1} and {*types(model)} == {"MultiHeadAttention"}
    assert_same(tmp_path, q=(3, 6, 8), k=(3, 6, 8), v=(3, 6, 8))


def test_attention_with_quantised_probabilities_stays(tmp_path: Path) -> None:
    """One node for all of it would not round them: other results than those that were calibrated."""
    rounded = "e = QuantizeLinear (f, step, offset) p = DequantizeLinear (e, step, offset)"
    case = ("", f"s = MatMul (qh, kh) t = Mul (s, scale) f = Softmax (t) {rounded}")
    numbers = SHAPES | {"step": np.array(1 / 255, np.float32), "offset": np.array(0, np.uint8)}
    report, model = optimized(parsed(HEADS % case, **numbers), tmp_path)
    assert not report.fused and len(nodes(model, "Softmax", "QuantizeLinear", "DequantizeLinear")) == 3


CACHES = {
    "new tokens behind": ("float[B, 2, P, 4]", "k = Concat <axis=2> (past, kn)"),
    "cross attention": ("float[B, 2, P, 4]", "k = Identity (past)"),
    "repeated heads": (
        "float[B, 1, P, 4]",
        "a = Slice (kn, zeros, ones, ones) c = Concat <axis=2> (past, a) k = Concat <axis=1> (c, c)",
    ),
    "of fixed length": (
        "float[B, 2, 9, 4]", "t = Gather <axis=2> (kn, zeros) n = Shape (t) at = Expand (zeros, n) "
        "k = ScatterElements <axis=2> (past, at, t)"
    ),
    "not split into heads": (
        "float[B, P, 8]", "c = Concat <axis=1> (past, k3) r = Reshape (c, apart) "
        "k = Transpose <perm=[0, 2, 1, 3]> (r)",
    ),
    "chosen by an If": (
        "float[B, 2, P, 4]",
        "k = If (first_step) <then_branch = a () => (float[B, 2, T, 4] t) { t = Identity (kn) },"
        " else_branch = b () => (float[B, 2, T, 4] e) { e = Identity (past) }>",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("past", "made"), CACHES.values(), ids=CACHES)
def test_attention_over_a_cache_stays(past: str, made: str, tmp_path: Path) -> None:
    """MultiHeadAttention would transpose the cache in each step: 6 times slower."""
    text = f"""(float[B, S, 8] x, {past} past, bool first_step) => (float[B, S, 8] y) {{
        q3 = MatMul (x, w) q4 = Reshape (q3, apart) q = Transpose <perm=[0, 2, 1, 3]> (q4)
        k3 = MatMul (x, w2) k4 = Reshape (k3, apart) kn = Transpose <perm=[0, 2, 1, 3]> (k4) {made}
        kt = Transpose <perm=[0, 1, 3, 2]> (k) s = MatMul (q, kt) p = Softmax (s)
        o = MatMul (p, k) ot = Transpose <perm=[0, 2, 1, 3]> (o) y = Reshape (ot, joined) }}"""
    more = {"w": weights(8, 8), "w2": weights(8, 8, seed=1), "zeros": np.array([0]), "ones": np.array([1])}
    report, model = optimized(parsed(text, **SHAPES, **more), tmp_path)
    assert not nodes(model, "MultiHeadAttention")
    assert report.skipped["attention: keys or values of a cache"] == 1


def test_mask_of_one_sequence(tmp_path: Path) -> None:
    """With a fixed batch of one, the only sequence has to show what the mask hides."""
    made = """m = Cast <to=1> (mask) n = Sub (one, m) c = Mul (n, low) bias = Unsqueeze (c, heads)
        s = MatMul (qh, kh) t = Add (s, bias) p = Softmax (t)"""
    text = (HEADS % (", int64[B, T] mask", made)).replace("B,", "1,").replace("S,", "9,").replace("T]", "9]")
    more = {"one": np.array(1, np.float32), "heads": np.array([1, 2])}
    _, model = optimized(parsed(text.replace("T,", "9,"), **SHAPES, **more), tmp_path)
    assert [len(node.inputs) for node in nodes(model, "MultiHeadAttention")] == [6]


CHOSEN = "e = Expand (%s, shape) m = Where (e, zero, low) s = MatMul (qh, kh) t = Add (s, m) p = Softmax (t)"
MASKS = {
    "constant": ("", "c = Identity (all)", 3),
    "of ids": (", int64[B, T] ids", "i = Equal (ids, nine) n = Not (i) c = Unsqueeze (n, heads)", 6),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_hide_nothing(name: str, tmp_path: Path) -> None:
    """They are left out if they follow from shapes. Ids may hide what no case has shown."""
    given, made, inputs = MASKS[name]
    sizes = "z = Shape <start=0, end=2> (q) w = Shape <start=1, end=2> (k)"
    shape = "b, r = Split <num_outputs=2> (z) shape = Concat <axis=0> (b, single, r, w)"
    text = HEADS % (given, f"{made} {sizes} {shape} {CHOSEN % 'c'}")
    more = {
        "all": np.array([[[[True]]]]), "single": np.array([1]), "zero": np.array(0, np.float32),
        "nine": np.array(9), "heads": np.array([1, 2]),
    }  # fmt: skip
    _, model = optimized(parsed(text, **SHAPES, **more), tmp_path)
    assert [len(node.inputs) for node in nodes(model, "MultiHeadAttention")] == [inputs]


@pytest.mark.parametrize(
    "body",
    [
        "y = Add (p, q)",
        "s = Add (p, q) y = LayerNormalization (s, b)",
        "g = Sigmoid (p) h = Mul (p, g) y = Mul (h, q)",
    ],
)
def test_sizes_without_names_may_be_one(body: str, tmp_path: Path) -> None:
    text = "(float[?, ?, 8] x, float[?, ?, 8] z) => (float[?, ?, 8] y)"
    body = f"{{ p = MatMul (x, w) q = MatMul (z, w) {body} }}"
    optimized(parsed(text + body, w=weights(8, 8), b=weights(8)), tmp_path)
    for shape in ((2, 5, 8), (1, 5, 8), (2, 1, 8)):
        assert_same(tmp_path, x=(2, 5, 8), z=shape)
        assert_same(tmp_path, x=shape, z=(2, 5, 8))


def test_what_onnx_runtime_has_fused_is_taken_apart(tmp_path: Path) -> None:
    text = """(float[B, S, 8] x, float[B, S, 8] r, int32[B, S] mask) => (float[B, S, 8] y, float[B, S, 8] z) {
        a = com.microsoft.Attention <num_heads=2> (x, qkv, qkv_bias, mask)
        y, mean, deviation, sum = com.microsoft.SkipLayerNormalization <epsilon=0.001> (a, r, w, b, c)
        p = com.microsoft.FusedMatMul <alpha=0.5, transB=1> (y, m) f = com.microsoft.BiasGelu (p, b)
        z = com.microsoft.FastGelu (f) }"""
    given = {"qkv": weights(8, 24), "qkv_bias": weights(24), "w": weights(8) + 1, "m": weights(8, 8)}
    report, model = optimized(parsed(text, b=weights(8), c=weights(8, seed=1), **given), tmp_path)
    kinds = [types(model)[each] for each in ("CustomLinear", "CustomAddLayerNorm", "MultiHeadAttention")]
    assert kinds == [4, 1, 1]
    assert not nodes(model, "Attention", "SkipLayerNormalization", "FusedMatMul", "BiasGelu", "FastGelu")
    assert report.fused["Attention decomposed"] == 1
    [attention] = nodes(model, "MultiHeadAttention")
    assert attention.inputs[4] is None  # a mask [B, T] there is slow


def test_two_masks_of_onnx_runtimes_attention(tmp_path: Path) -> None:
    text = """(float[2, 6, 8] x, int32[2, 6] mask, float[1, 2, 6, 6] positions) => (float[2, 6, 8] y) {
        y = com.microsoft.MultiHeadAttention <num_heads=2> (x, x, x, , mask, positions) }"""
    _, model = optimized(parsed(text), tmp_path)
    assert [node.inputs[4] for node in nodes(model, "MultiHeadAttention")] == [None]
