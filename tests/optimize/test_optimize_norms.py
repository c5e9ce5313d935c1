"""Tests of the rewrites of norms and embeddings on small graphs: each spelling, and what stays."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_models import CPU
from optimizing import Spellings, assert_fused, nodes, optimized, parsed, types, weights
from other_sizes import assert_same

from twinop import deploy
from twinop.export import attach_bodies

UNARY = "(float[N, 6, 8] x) => (float[N, 6, 8] y)"
RMS, LAYER = ({"rms_norm": 1}, {"CustomRmsNorm": 1}), ({"layer_norm": 1}, {"CustomLayerNorm": 1})
NORMS = {
    "rms": "s = Pow (x, two) m = ReduceMean <keepdims=1> (s, last) v = Add (m, eps) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (n, w)",
    "rms, reciprocal": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (eps, m) r = Sqrt (v)"
    " i = Reciprocal (r) n = Mul (i, x) y = Mul (w, n)",
    "rms, power": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (eps, m) i = Pow (v, minus_half)"
    " n = Mul (x, i) y = Mul (w, n)",
    "layer": "c = ReduceMean (x, last) d = Sub (x, c) s = Pow (d, two) m = ReduceMean (s, last)"
    " v = Add (m, eps) r = Sqrt (v) n = Div (d, r) k = Mul (n, w) y = Add (k, bias)",
    "layer, no bias": "c = ReduceMean (x, last) d = Sub (x, c) s = Mul (d, d) m = ReduceMean (s, last)"
    " v = Add (m, eps) r = Sqrt (v) n = Div (d, r) y = Mul (w, n)",
    "rms, sum": "s = Mul (x, x) t = ReduceSum (s, last) m = Div (t, eight) v = Add (eps, m) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (w, n)",
    "rms, length": "l = ReduceL2 (x, last) s = Pow (l, two) m = Div (s, eight) v = Add (eps, m) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (w, n)",
    "layer, torch.var": "c = ReduceMean (x, last) d = Sub (x, c) s = Mul (d, d)"
    " m = ReduceMean <keepdims=0> (s, last) h = Shape (m) o = Concat <axis=0> (h, single) u = Reshape (m, o)"
    " v = Add (u, eps) r = Sqrt (v) i = Reciprocal (r) n = Mul (d, i) k = Mul (n, w) y = Add (k, bias)",
    "layer, sum": "t = ReduceSum <keepdims=0> (x, last) f = Unsqueeze (t, last) c = Div (f, eight)"
    " d = Sub (x, c) s = ReduceSumSquare (d, last) m = Div (s, eight) v = Add (m, eps) r = Sqrt (v)"
    " n = Div (d, r) y = Mul (w, n)",
    "layer, tf2onnx": "c = GlobalAveragePool (x) o = Neg (c) d = Sub (x, c) s = Mul (d, d)"
    " m = GlobalAveragePool (s) v = Add (m, eps) r = Sqrt (v) i = Reciprocal (r) f = Mul (i, w)"
    " k = Mul (x, f) l = Mul (o, f) p = Add (l, bias) y = Add (k, p)",
    "layer, ONNX": "y = LayerNormalization <axis=-1, epsilon=0.001> (x, w, bias)",
    "rms, ONNX Runtime": "y = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x, w)",
}
CONSTANTS = {
    "w": weights(8) + 1, "bias": weights(8, seed=1), "eps": np.array(1e-3, np.float32),
    "two": np.array(2, np.float32), "minus_half": np.array(-0.5, np.float32), "last": np.array([-1]),
    "eight": np.array(8, np.float32), "single": np.array([1]), "tiny": np.array(1e-12, np.float32),
    "columns": np.full(6, 1e-3, np.float32), "low": np.array(-100, np.float32),
    "ones": np.ones(8, np.float32), "middle": np.array([1]), "one": np.array(1, np.float32),
    "table": weights(9, 8), "types": weights(2, 8, seed=1), "positions": weights(6, 8, seed=2),
    "other_table": weights(9, 6, 8), "kinds": weights(2, 8, seed=1), "places": weights(5, 8, seed=2),
    "zeros": np.zeros((1, 1), np.int64), "long": np.ones((1, 50), np.int64), "known": np.array([[3]]),
    "first": np.array([0]), "times": np.array(1),
}  # fmt: skip


def test_norms_however_they_are_written(tmp_path: Path) -> None:
    zeros = {"layer_norm": 1}, LAYER[1] | {"Shape": 1, "ConstantOfShape": 1}  # as others have a bias
    made = {name: RMS if name.startswith("rms") else LAYER for name in NORMS}
    made |= {"layer, no bias": zeros, "layer, sum": zeros}
    texts: Spellings = {name: (f"{UNARY} {{ {text} }}", *made[name]) for name, text in NORMS.items()}
    for name, [*_, norm] in assert_fused(texts, tmp_path, **CONSTANTS).items():
        assert norm.attributes.get_float("eps", 0) == pytest.approx(1e-3), name
        assert str(norm.inputs[1].name).endswith("/w"), name  # type: ignore[union-attr]
    assert_same(tmp_path, **{f"{name}/x": (5, 6, 8) for name in NORMS})


SPREAD = "o = Shape (x) f = Expand (c, o) n = Div (x, f) y = Mul (n, w)"
AS_IT_IS = {"Shape": 1, "Expand": 1, "Div": 1, "Mul": 1}
STAY: Spellings = {
    "torch's normalize": (
        f"{UNARY} {{ l = ReduceL2 (x, last) c = Clip (l, tiny) {SPREAD} }}",
        {}, AS_IT_IS | {"ReduceL2": 1, "Clip": 1},
    ),
    "large numbers are cut off": (
        f"{UNARY} {{ s = Mul (x, x) m = ReduceMean (s, last) v = Add (m, eps) k = Clip (x, low) r = Sqrt (v)"
        " y = Div (k, r) }",
        {}, dict.fromkeys(("Mul", "ReduceMean", "Add", "Clip", "Sqrt", "Div"), 1),
    ),
    "a sum of length and eps": (
        f"{UNARY} {{ l = ReduceL2 (x, last) c = Add (l, tiny) {SPREAD} }}",
        {}, AS_IT_IS | {"ReduceL2": 1, "Add": 1},
    ),
    "another divisor": (
        f"{UNARY} {{ s = Mul (x, x) t = ReduceSum <keepdims=0> (s, last) u = Add (t, columns)"
        " v = Unsqueeze (u, last) r = Sqrt (v) y = Div (x, r) }",
        {}, dict.fromkeys(("Mul", "ReduceSum", "Add", "Unsqueeze", "Sqrt", "Div"), 1),
    ),
    "ids of one sequence for all": (
        "(int64[1, 6] ids, float[N, 6, 8] x) => (float[N, 6, 8] y) { a = Gather (table, ids) t = Add (a, x)"
        " y = LayerNormalization (t, w) }",
        {"layer_norm": 1}, {"Gather": 1, "Add": 1, "CustomLayerNorm": 1},
    ),
    "a table of other dimensions": (
        "(int64[N] ids, float[N, 6, 8] x) => (float[N, 6, 8] y) { a = Gather (other_table, ids)"
        " t = Add (a, x) y = LayerNormalization (t, w) }",
        {"add_layer_norm": 1}, {"Gather": 1, "CustomAddLayerNorm": 1},
    ),
}  # fmt: skip
MODULATED = "n = LayerNormalization <axis=-1, epsilon=0.01> (x, ones)"
SCALED = "a = Add (s, one) b = Mul (n, a) y = Add (b, t) }"
CONDITIONED = "(float[N, 6, 8] x, float[{0}] s, float[{0}] t) => (float[N, 6, 8] y)"
ADAPTED, APART = {"ada_layer_norm": 1}, {"layer_norm": 1, "addcmul": 1}
NORM_APART = {"CustomLayerNorm": 1, "CustomAddcmul": 1}
LOOKED_UP = "(int64[N, 6] ids) => (float[N, 6, 8] y) {"
EMBEDDED, KNOWN = {"embed_layer_norm": 1}, {"embedding of known ids": 1}
IDS = """(int64[B, S] ids, int64[B, S] of_input) => (float[B, S, 8] y) {
    n = Shape (ids) k = Expand (zeros, n) m = Shape <start=1> (ids) l = Slice (long, first, m, middle)
    a = Gather (table, ids) b = Gather (kinds, %s) c = Add (a, b) d = Gather (places, known) y = Add (%s) }"""
MORE: Spellings = {
    "scale and shift of each sequence, as DiT": (
        f"(float[N, 6, 8] x, float[N, 8] scale, float[N, 8] shift) => (float[N, 6, 8] y) {{ {MODULATED}"
        f" s = Unsqueeze (scale, middle) t = Unsqueeze (shift, middle) {SCALED}",
        ADAPTED, {"CustomAdaLayerNorm": 1},
    ),
    "in other orders": (
        f"(float[N, 6, 8] x, float[N, 8] scale, float[N, 8] shift) => (float[N, 6, 8] y) {{ {MODULATED}"
        " both = Concat <axis=1> (scale, shift) u = Unsqueeze (both, middle)"
        " s, t = Split <axis=-1, num_outputs=2> (u) a = Add (one, s) b = Mul (a, n) y = Add (t, b) }",
        ADAPTED, {"Concat": 1, "Unsqueeze": 1, "Split": 1, "Squeeze": 2, "CustomAdaLayerNorm": 1},
    ),
    # Other scales are a product and a sum.
    "of a norm with weights": (
        f"{CONDITIONED.format('N, 1, 8')} {{ {MODULATED.replace('ones', 'w')} {SCALED}",
        APART, NORM_APART | {"Add": 1},
    ),
    "of each token": (
        f"{CONDITIONED.format('N, 6, 8')} {{ {MODULATED} {SCALED}", APART, NORM_APART | {"Add": 1}
    ),
    "of a batch of one": (
        f"{CONDITIONED.format('1, 1, 8')} {{ {MODULATED} {SCALED}", APART, NORM_APART | {"Add": 1}
    ),
    "without the one": (
        f"{CONDITIONED.format('N, 1, 8')} {{ {MODULATED} b = Mul (n, s) y = Add (b, t) }}", APART, NORM_APART
    ),
    "a lookup and positions": (
        f"{LOOKED_UP} a = Gather (table, ids) t = Add (a, positions) y = LayerNormalization (t, w) }}",
        EMBEDDED, {"CustomEmbedLayerNorm": 1, "Unsqueeze": 1},
    ),
    "their sum is read": (
        f"{LOOKED_UP} a = Gather (table, ids) t = Add (positions, a) n = LayerNormalization (t, w)"
        " y = Mul (t, n) }", EMBEDDED, {"CustomEmbedLayerNorm": 1, "Unsqueeze": 1, "Mul": 1},
    ),
    "token types": (
        "(int64[N, 6] ids, int64[N, 6] kind) => (float[N, 6, 8] y) { a = Gather (table, ids)"
        " b = Gather (types, kind) c = Add (a, b) t = Add (c, positions) y = LayerNormalization (t, w) }",
        EMBEDDED, {"CustomEmbedLayerNorm": 1, "Gather": 1, "Add": 1},
    ),
    "known ids, expanded": (IDS % ("k", "c, d"), KNOWN, {"Gather": 1, "Add": 1}),
    "known ids of a buffer": (IDS % ("l", "d, c"), KNOWN, {"Gather": 1, "Add": 1}),
    "ids of an input": (IDS % ("of_input", "c, d"), {}, {"Gather": 2, "Add": 2}),
}  # fmt: skip


def test_rows_divided_by_their_length_are_no_norm(tmp_path: Path) -> None:
    assert_fused(STAY, tmp_path, **CONSTANTS)


def test_norms_with_what_is_around_them(tmp_path: Path) -> None:
    found = assert_fused(MORE, tmp_path, **CONSTANTS)
    [norm] = found["scale and shift of each sequence, as DiT"]
    assert norm.attributes.get_float("eps", 0) == pytest.approx(0.01)


def test_a_subgraph_that_reads_the_norm(tmp_path: Path) -> None:
    """A branch is part of what is recognised, the body of a loop is not."""
    scaled = SCALED.replace("y =", "p =")[:-1]
    choice = f"""y = If (c) <then_branch = f () => (float[N, 6, 8] p) {{ {scaled} }},
                            else_branch = g () => (float[N, 6, 8] q) {{ q = Identity (x) }}>"""
    body = "body = l (int64 i, bool m, float[N, 6, 8] z) => (bool go, float[N, 6, 8] p)"
    loop = f"y = Loop (times, , x) <{body} {{ go = Identity (m) {scaled} }}>"
    inputs = "(float[N, 6, 8] x, float[N, 1, 8] s, float[N, 1, 8] t, bool c) => (float[N, 6, 8] y)"
    in_loop = {"layer_norm": 1}, {"CustomLayerNorm": 1, "Loop": 1}
    for text, (made, kinds) in ((choice, (ADAPTED, {"If": 1})), (loop, in_loop)):
        proto = parsed(f"{inputs} {{ {MODULATED} {text} }}", **CONSTANTS)
        report, model = optimized(proto, tmp_path)
        assert (report.fused, types(model)) == (made, kinds)


@pytest.mark.parametrize("opset", [9, 12, 16])
def test_layer_norms_of_onnxruntime_below_opset_17(opset: int, tmp_path: Path) -> None:
    """Its optimizer writes them at any opset; onnx's converter knows none there."""
    text = (
        "(float[N, 4] x) => (float[N, 3] y) { n = LayerNormalization <axis=-1> (x, s, b) y = MatMul (n, w) }"
    )
    proto = parsed(text, opset, w=weights(4, 3), s=weights(4), b=weights(4))
    report, model = optimized(proto, tmp_path)
    assert report.fused == {"layer_norm": 1, "linear": 1} and model.opset_imports[""] == 20


SIMPLIFIED = "n = SimplifiedLayerNormalization <axis=-1, epsilon=1e-6> (x, s) y = MatMul (n, w)"


@pytest.mark.parametrize(
    ("opset", "kind", "without"),
    [(17, "float", []), (20, "float16", ["norm"]), (17, "float16", ["norm", "linear"])],
)
def test_simplified_norms_of_onnxruntime(opset: int, kind: str, without: list[str], tmp_path: Path) -> None:
    """onnx.checker refuses the operator: the file has none, with a rewrite for it or without."""
    numpy = np.float32 if kind == "float" else np.float16
    text = f"({kind}[N, 4] x) => ({kind}[N, 3] y) {{ {SIMPLIFIED} }}"
    proto = parsed(text, opset, w=weights(4, 3).astype(numpy), s=weights(4).astype(numpy))
    report, model = optimized(proto, tmp_path, without=without)
    assert report.fused == {**({} if without else {"rms_norm": 1}), **({} if without[1:] else {"linear": 1})}
    assert not nodes(model, "SimplifiedLayerNormalization") and report.nodes_before == 2
    assert model.opset_imports[""] == (20 if report.fused else opset)  # function bodies need 20
    proto = onnx.load(tmp_path / "fast.onnx")
    onnx.checker.check_model(proto, full_check=True)


ADDED = {"CustomLayerNorm": "CustomAddLayerNorm", "CustomRmsNorm": "CustomAddRmsNorm"}
each_norm = pytest.mark.parametrize("norm", ADDED)
NORMED = "(KIND[N, 4, 16] x, KIND[N, 4, 16] r%s) => (KIND[N, 4, 16] y%s) { %s }"
PAIR = "s = Add (x, r) y = custom_domain.NORM <eps=0.001> (s, w)"


def normed(norm: str, body: str, kind: str = "float", given: str = "", made: str = "") -> onnx.ModelProto:
    text = (NORMED % (given, made, body)).replace("KIND", kind).replace("NORM", norm)
    numpy = {"float": np.float32, "float16": np.float16, "double": np.float64}[kind]
    constants = {"w": weights(16), "b": weights(16, seed=1), "square": weights(4, 16)}
    return parsed(text, **{name: array.astype(numpy) for name, array in constants.items()})


@pytest.mark.parametrize(
    ("norm", "kind", "add"),
    [
        ("CustomLayerNorm", "float", "Add"),
        ("CustomRmsNorm", "float16", "custom_domain.CustomAdd"),
        ("CustomLayerNorm", "double", "Add"),
    ],
)
def test_no_bit_changes(norm: str, kind: str, add: str, tmp_path: Path) -> None:
    body = PAIR.replace("Add (", f"{add} (")
    proto = attach_bodies(normed(norm, body, kind, made=", KIND[N, 4, 16] s"))
    _, made = optimized(proto, tmp_path)
    assert types(made) == {ADDED[norm]: 1}
    kinds = {"float": torch.float32, "float16": torch.float16, "double": torch.float64}
    feeds = {name: torch.randn(3, 4, 16, dtype=torch.float64).to(kinds[kind]) for name in "xr"}
    expected, found = (deploy.session(tmp_path / f"{name}.onnx", CPU).run(feeds) for name in ("old", "fast"))
    assert list(found) == ["y", "s"] and all(torch.equal(found[name], expected[name]) for name in expected)


@each_norm
def test_a_sum_that_nothing_reads_is_not_written(norm: str, tmp_path: Path) -> None:
    """The node and its function omit it, unless another node of the op needs it."""
    for made in ("", ", KIND[N, 4, 16] s"):
        optimized(normed(norm, PAIR, made=made), tmp_path)
        proto = onnx.load(tmp_path / "fast.onnx")
        assert [len(e.output) for e in (proto.graph.node[0], proto.functions[0])] == [1 + bool(made)] * 2


@each_norm
def test_other_readers_of_the_sum(norm: str, tmp_path: Path) -> None:
    """A node before the norm, a second norm and the graph read the sum; a weight is made between the two."""
    body = """s = Add (x, r) n = Neg (s) v = Abs (raw) o = custom_domain.NORM (s, w) z = Neg (o)
        y = custom_domain.NORM (s, v)"""
    made = "".join(f", float[N, 4, 16] {name}" for name in "nzs")
    _, fast = optimized(normed(norm, body, given=", float[16] raw", made=made), tmp_path)
    assert types(fast) == {"Neg": 2, "Abs": 1, norm: 1, ADDED[norm]: 1}  # the sum is made once


LEFT = {
    "a bias": "s = Add (x, b) y = custom_domain.NORM (s, w) q = Neg (r)",
    "no weight": "s = Add (x, r) y = custom_domain.NORM (s)",
    "not the last dimension alone": "s = Add (x, r) y = custom_domain.NORM <axis=1> (s, square)",
    "not a sum": "s = Mul (x, r) y = custom_domain.NORM (s, w)",
}


@pytest.mark.parametrize(("norm", "body"), [*zip([*ADDED] * 2, LEFT.values(), strict=True)], ids=[*LEFT])
def test_what_stays_apart(norm: str, body: str, tmp_path: Path) -> None:
    _, made = optimized(normed(norm, body), tmp_path)
    assert nodes(made, norm) and not nodes(made, ADDED[norm])
