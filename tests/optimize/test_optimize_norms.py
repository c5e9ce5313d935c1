"""Tests of the rewrites of norms and embeddings on small graphs: each spelling, and what stays."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_models import CPU
from optimizing import nodes, optimized, parsed, types, weights
from other_sizes import assert_same

from twinop import deploy
from twinop.export import attach_bodies

UNARY = "(float[N, 6, 8] x) => (float[N, 6, 8] y)"
ONE = np.array(1, np.float32)

NORMS = {
    "rms": "s = Pow (x, two) m = ReduceMean <keepdims=1> (s, last) v = Add (m, eps) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (n, w)",
    "rms, reciprocal": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (eps, m) r = Sqrt (v)"
    " i = Reciprocal (r) n = Mul (i, x) y = Mul (w, n)",
    "rms, power": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (eps, m) i = Pow (v, minus_half)"
    " n = Mul (x, i) y = Mul (w, n)",
    "layer": "c = ReduceMean (x, last) d = Sub (x, c) s = Pow (d, two) m = ReduceMean (s, last)"
    " v = Add (m, eps) r = Sqrt (v) n = Div (d, r) k = Mul (n, w) y = Add (k, b)",
    "layer, no bias": "c = ReduceMean (x, last) d = Sub (x, c) s = Mul (d, d) m = ReduceMean (s, last)"
    " v = Add (m, eps) r = Sqrt (v) n = Div (d, r) y = Mul (w, n)",
    "rms, sum": "s = Mul (x, x) t = ReduceSum (s, last) m = Div (t, eight) v = Add (eps, m) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (w, n)",
    "rms, length": "l = ReduceL2 (x, last) s = Pow (l, two) m = Div (s, eight) v = Add (eps, m) r = Sqrt (v)"
    " n = Div (x, r) y = Mul (w, n)",
    "layer, torch.var": "c = ReduceMean (x, last) d = Sub (x, c) s = Mul (d, d)"
    " m = ReduceMean <keepdims=0> (s, last) h = Shape (m) o = Concat <axis=0> (h, single) u = Reshape (m, o)"
    " v = Add (u, eps) r = Sqrt (v) i = Reciprocal (r) n = Mul (d, i) k = Mul (n, w) y = Add (k, b)",
    "layer, sum": "t = ReduceSum <keepdims=0> (x, last) f = Unsqueeze (t, last) c = Div (f, eight)"
    " d = Sub (x, c) s = ReduceSumSquare (d, last) m = Div (s, eight) v = Add (m, eps) r = Sqrt (v)"
    " n = Div (d, r) y = Mul (w, n)",
    "layer, ONNX": "y = LayerNormalization <axis=-1, epsilon=0.001> (x, w, b)",
    "rms, ONNX Runtime": "y = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x, w)",
}
ROWS = {
    "w": weights(8) + 1, "b": weights(8, seed=1), "eps": np.array(1e-3, np.float32),
    "two": np.array(2, np.float32), "minus_half": np.array(-0.5, np.float32), "last": np.array([-1]),
    "eight": np.array(8, np.float32), "single": np.array([1]),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_however_they_are_written(name: str, tmp_path: Path) -> None:
    _, model = optimized(parsed(f"{UNARY} {{ {NORMS[name]} }}", **ROWS), tmp_path)
    kind = "CustomRmsNorm" if name.startswith("rms") else "CustomLayerNorm"
    assert types(model) == {kind: 1}
    [norm] = model.graph
    assert norm.attributes.get_float("eps", 0) == pytest.approx(1e-3)
    assert norm.inputs[1] is not None and norm.inputs[1].name == "w"
    assert_same(tmp_path, x=(5, 6, 8))


SPREAD = "o = Shape (x) f = Expand (c, o) n = Div (x, f) y = Mul (n, w)"
LENGTHS = {
    "torch's normalize": f"l = ReduceL2 (x, last) c = Clip (l, tiny) {SPREAD}",
    "large numbers are cut off": "s = Mul (x, x) m = ReduceMean (s, last) v = Add (m, eps) k = Clip (x, low)"
    " r = Sqrt (v) y = Div (k, r)",
    "a sum of length and eps": f"l = ReduceL2 (x, last) c = Add (l, tiny) {SPREAD}",
    "another divisor": "s = Mul (x, x) t = ReduceSum <keepdims=0> (s, last) u = Add (t, columns)"
    " v = Unsqueeze (u, last) r = Sqrt (v) y = Div (x, r)",
}


@pytest.mark.parametrize("name", LENGTHS)
def test_rows_divided_by_their_length_are_no_norm(name: str, tmp_path: Path) -> None:
    given = ROWS | {"tiny": np.array(1e-12, np.float32), "columns": np.full(6, 1e-3, np.float32)}
    given["low"] = np.array(-100, np.float32)
    _, model = optimized(parsed(f"{UNARY} {{ {LENGTHS[name]} }}", **given), tmp_path)
    assert not nodes(model, "CustomRmsNorm")
    assert_same(tmp_path, x=(5, 6, 8))


MODULATED = "n = LayerNormalization <axis=-1, epsilon=0.01> (x, ones)"
MODULATIONS = {
    "as DiT": "s = Unsqueeze (scale, middle) t = Unsqueeze (shift, middle) a = Add (s, one) b = Mul (n, a)"
    " y = Add (b, t)",
    "other orders": "both = Concat <axis=1> (scale, shift) u = Unsqueeze (both, middle)"
    " s, t = Split <axis=-1, num_outputs=2> (u) a = Add (one, s) b = Mul (a, n) y = Add (t, b)",
}
CONDITIONED = "(float[N, 6, 8] x, float[N, 8] scale, float[N, 8] shift) => (float[N, 6, 8] y)"
CONSTANTS = {"ones": np.ones(8, np.float32), "middle": np.array([1]), "w": weights(8), "one": ONE}


@pytest.mark.parametrize("name", MODULATIONS)
def test_scale_and_shift_of_each_sequence(name: str, tmp_path: Path) -> None:
    text = f"{CONDITIONED} {{ {MODULATED} {MODULATIONS[name]} }}"
    report, model = optimized(parsed(text, **CONSTANTS), tmp_path)
    assert report.fused == {"ada_layer_norm": 1}
    [norm] = nodes(model, "CustomAdaLayerNorm")
    assert norm.attributes.get_float("eps", 0) == pytest.approx(0.01)
    if name == "as DiT":
        assert types(model) == {"CustomAdaLayerNorm": 1}


def test_a_subgraph_that_reads_the_norm(tmp_path: Path) -> None:
    """A branch is part of what is recognised, the body of a loop is not."""
    scaled = "a = Add (s, one) b = Mul (n, a) p = Add (b, t)"
    choice = f"""y = If (c) <then_branch = f () => (float[N, 6, 8] p) {{ {scaled} }},
                            else_branch = g () => (float[N, 6, 8] q) {{ q = Identity (x) }}>"""
    body = "body = l (int64 i, bool m, float[N, 6, 8] z) => (bool go, float[N, 6, 8] p)"
    loop = f"y = Loop (times, , x) <{body} {{ go = Identity (m) {scaled} }}>"
    inputs = "(float[N, 6, 8] x, float[N, 1, 8] s, float[N, 1, 8] t, bool c) => (float[N, 6, 8] y)"
    in_loop = {"layer_norm": 1}, {"CustomLayerNorm": 1, "Loop": 1}
    for text, (made, kinds) in ((choice, ({"ada_layer_norm": 1}, {"If": 1})), (loop, in_loop)):
        proto = parsed(f"{inputs} {{ {MODULATED} {text} }}", times=np.array(1), **CONSTANTS)
        report, model = optimized(proto, tmp_path)
        assert (report.fused, types(model)) == (made, kinds)


def test_other_scales_of_a_norm_are_a_product_and_a_sum(tmp_path: Path) -> None:
    """Of a norm with weights, of each token, of a batch of one, without the one."""
    weighted = MODULATED.replace("ones", "w")
    for norm, sizes, text in (
        (weighted, "N, 1, 8", "a = Add (s, one) b = Mul (n, a) y = Add (b, t)"),
        (MODULATED, "N, 6, 8", "a = Add (s, one) b = Mul (n, a) y = Add (b, t)"),
        (MODULATED, "1, 1, 8", "a = Add (s, one) b = Mul (n, a) y = Add (b, t)"),
        (MODULATED, "N, 1, 8", "b = Mul (n, s) y = Add (b, t)"),
    ):
        inputs = f"(float[N, 6, 8] x, float[{sizes}] s, float[{sizes}] t) => (float[N, 6, 8] y)"
        report, _ = optimized(parsed(f"{inputs} {{ {norm} {text} }}", **CONSTANTS), tmp_path)
        assert report.fused == {"layer_norm": 1, "addcmul": 1}, (norm, sizes, text)


EMBEDDINGS = {
    "positions": "a = Gather (table, ids) t = Add (a, positions) y = LayerNormalization (t, w)",
    "the sum is read": "a = Gather (table, ids) t = Add (positions, a) n = LayerNormalization (t, w)"
    " y = Mul (t, n)",
    "token types": "a = Gather (table, ids) b = Gather (types, kinds) c = Add (a, b) t = Add (c, positions)"
    " y = LayerNormalization (t, w)",
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_lookup_and_the_norm_behind_it(name: str, tmp_path: Path) -> None:
    kinds = ", int64[N, 6] kinds" if name == "token types" else ""
    text = f"(int64[N, 6] ids{kinds}) => (float[N, 6, 8] y) {{ {EMBEDDINGS[name]} }}"
    tables = {"table": weights(9, 8), "types": weights(2, 8, seed=1), "positions": weights(6, 8, seed=2)}
    report, model = optimized(parsed(text, w=weights(8), **tables), tmp_path)
    assert report.fused == {"embed_layer_norm": 1}
    [norm] = nodes(model, "CustomEmbedLayerNorm")
    assert len(norm.outputs) == (2 if name == "the sum is read" else 1)
    assert types(model).get("Gather", 0) == (name == "token types")


def test_a_lookup_of_other_ids_stays(tmp_path: Path) -> None:
    """Ids of one sequence for all, and a table of other dimensions."""
    for ids, table in (("[1, 6]", (9, 8)), ("[N]", (9, 6, 8))):
        body = "a = Gather (table, ids) t = Add (a, x) y = LayerNormalization (t, w)"
        text = f"(int64{ids} ids, float[N, 6, 8] x) => (float[N, 6, 8] y) {{ {body} }}"
        report, _ = optimized(parsed(text, w=weights(8), table=weights(*table)), tmp_path)
        assert "embed_layer_norm" not in report.fused


EMBEDDED = """(int64[B, S] ids, int64[B, S] types) => (float[B, S, 8] y) {
    n = Shape (ids) k = Expand (zeros, n) m = Shape <start=1> (ids) l = Slice (long, first, m, axis)
    a = Gather (words, ids) b = Gather (kinds, %s) c = Add (a, b) d = Gather (places, known) y = Add (%s) }"""
TABLES = {
    "words": weights(9, 8), "kinds": weights(2, 8, seed=1), "places": weights(5, 8, seed=2),
    "zeros": np.zeros((1, 1), np.int64), "long": np.ones((1, 50), np.int64), "known": np.array([[3]]),
    "first": np.array([0]), "axis": np.array([1]),
}  # fmt: skip


KNOWN = {"embedding of known ids": 1}


@pytest.mark.parametrize(
    ("ids", "total", "fused"),
    [("k", "c, d", KNOWN), ("l", "d, c", KNOWN), ("types", "c, d", {})],
    ids=["expanded", "of a buffer", "of an input"],
)
def test_embeddings_of_known_ids(ids: str, total: str, fused: dict[str, int], tmp_path: Path) -> None:
    report, model = optimized(parsed(EMBEDDED % (ids, total), **TABLES), tmp_path)
    assert report.fused == fused and (not fused or types(model) == {"Gather": 1, "Add": 1})


def test_a_norm_that_takes_embeddings_of_known_ids_along_counts_both(tmp_path: Path) -> None:
    text = EMBEDDED.replace("B, S", "B, 6") % ("k", "c, d)  y = LayerNormalization (t, w")
    tables = TABLES | {"known": np.array([[0, 1, 2, 3, 4, 0]])}
    proto = parsed(text.replace("y = Add (c", "t = Add (c"), w=weights(8), **tables)
    report, _ = optimized(proto, tmp_path)
    assert report.fused == KNOWN | {"embed_layer_norm": 1}


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


def test_simplified_norms_over_two_axes(tmp_path: Path) -> None:
    text = """(float[N, 2, 4] x, float[N, 2, 4] z) => (float[N, 2, 4] y, float[N, 1, 1] r, float[N, 2, 4] v) {
        y, r = SimplifiedLayerNormalization <axis=1> (x, s)
        v = com.microsoft.SkipSimplifiedLayerNormalization (x, z, t) }"""
    report, model = optimized(parsed(text, s=weights(2, 4), t=weights(4)), tmp_path, without=["norm"])
    assert report.fused == {"SkipSimplifiedLayerNormalization decomposed": 1}
    assert report.error < 1e-6 and not nodes(model, "SimplifiedLayerNormalization")


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


APART = {
    "a bias": "s = Add (x, b) y = custom_domain.NORM (s, w) q = Neg (r)",
    "no weight": "s = Add (x, r) y = custom_domain.NORM (s)",
    "not the last dimension alone": "s = Add (x, r) y = custom_domain.NORM <axis=1> (s, square)",
    "not a sum": "s = Mul (x, r) y = custom_domain.NORM (s, w)",
}


@pytest.mark.parametrize(("norm", "body"), [*zip([*ADDED] * 2, APART.values(), strict=True)], ids=[*APART])
def test_what_stays_apart(norm: str, body: str, tmp_path: Path) -> None:
    _, made = optimized(normed(norm, body), tmp_path)
    assert nodes(made, norm) and not nodes(made, ADDED[norm])


@each_norm
def test_sizes_that_may_differ(norm: str, tmp_path: Path) -> None:
    proto = normed(norm, PAIR)
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "M"
    _, made = optimized(proto, tmp_path)
    assert nodes(made, norm) and not nodes(made, ADDED[norm])


def test_weights_in_fp32_beside_rows_in_16_bits(tmp_path: Path) -> None:
    """The fused op takes them as the norm does; an attribute of the norm stays."""
    proto = normed("CustomRmsNorm", PAIR.replace("eps=0.001", "axis=2, offset=1"), "float16")
    _, made = optimized(proto, tmp_path)
    [fused] = made.graph
    assert fused.op_type == "CustomAddRmsNorm" and fused.attributes.get_int("offset", 0) == 1
