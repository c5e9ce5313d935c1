"""Tests of the sizes of generated inputs: expressions, sizes that weights fix, and how large they may be."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import JOINED, KT, apart, nodes, optimized, parsed, refusal, weights
from other_sizes import assert_same

from twinop.deploy.ort_runs import run
from twinop.optimize import equivalence
from twinop.optimize.symbolic_shapes import infer_shapes, infer_types
from twinop.record.dimensions import expressions


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["b", "past + seq", "seq", "past"], {"past + seq": 15}),
        (["s0", "s1", "s0+s1", "2*s0", "((s1 - 1)//2) + 1"],
         {"s0+s1": 15, "2*s0": 14, "((s1 - 1)//2) + 1": 4}),
        (["s0", "Max(1, s0)", "s0**2", "floor(s0/2)"], {"Max(1, s0)": 7, "s0**2": 49, "floor(s0/2)": 3}),
        (["total", "past", "total - past", "(total)*2"], {"total - past": -1, "(total)*2": 14}),
        (["past length", "seq length", "past length + seq length"], {"past length + seq length": 15}),
        (["past-length", "seq-length", "past-length + seq-length"], {"past-length + seq-length": 15}),
        (["sequence-length", "batch/beams", "batch_size x num_heads", "a if b else c", "f(x)", "((("], {}),
        (["3", "n"], {"3": 3}),
        (["n", "9**9**9**9", "n/0", "(" * 300 + "n" + ")" * 300], {"9**9**9**9": 0, "n/0": 0}),
    ],
)  # fmt: skip
def test_names_that_are_expressions(names: list[str], found: dict[str, int]) -> None:
    sizes = {name: 7 + index for index, name in enumerate(each for each in names if each not in found)}
    if "past + seq" in names:
        sizes = {"b": 3, "seq": 7, "past": 8}
    assert {name: each(sizes) for name, each in expressions(names).items()} == found


@pytest.mark.parametrize(("order", "total"), [("S P T", "P + S"), ("T S P", "S+P"), ("P T S", "(P + S)")])
def test_a_dimension_that_is_a_sum(order: str, total: str, tmp_path: Path) -> None:
    given = ", ".join(f"float[B, {size}, 8] {size.lower()}" for size in order.split())
    text = "c = Concat <axis=1> (p, s) d = Add (c, t) y = Neg (d)"
    proto = parsed(f"({given}) => (float[B, T, 8] y) {{ {text} }}")
    for value in proto.graph.input:
        dim = value.type.tensor_type.shape.dim[1]
        dim.dim_param = total if dim.dim_param == "T" else dim.dim_param
    optimized(proto, tmp_path)


IMAGE = "(float[B, C, H, W] x) => (float[B, D, E, F] y) {{ {} }}"
CHANNELS = {
    "Conv": (IMAGE.format("y = Conv <strides=[8, 8]> (x, k)"), {"k": weights(4, 3, 8, 8)}),
    "channels last, padded": (
        "(float[B, H, W, C] x) => (float[B, D, E, F] y) { t = Transpose <perm=[0, 3, 1, 2]> (x) "
        "p = Pad (t, pads) y = Conv (p, k) }",
        {"k": weights(4, 3, 3, 3), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])},
    ),
    "MatMul": ("(float[B, S, F] x) => (float[B, S, G] y) { y = MatMul (x, k) }", {"k": weights(5, 4)}),
    "windows of samples": (
        "(float[B, T] x) => (float[B, D, F] y) { u = Unsqueeze (x, one) y = Conv <strides=[160]> (u, k) }",
        {"k": weights(4, 1, 400), "one": np.array([1])}),
    "a state of two layers": (
        "(float[B, T, 5] x, float[2, ?, 5] h) => (float[B, T, 5] y) { g = Gather (h, k) y = Add (x, g) }",
        {"k": np.array([1])}),
    "a width that nobody knows": (
        "(float[B, S, 8] q, float[B, T, 8] k, float[B, T, V] v) => (float[B, S, W] y) {"
        " a = Attention <q_num_heads=2, kv_num_heads=2> (q, k, v) t = Shape (a) d = Slice (t, two, three)"
        " f = Cast <to=1> (d) l = MatMul (q, w) m = Mul (l, f) y = Add (a, m) }",
        {"two": np.array([2]), "three": np.array([3]), "w": weights(8, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANNELS)
def test_sizes_that_weights_fix(name: str, tmp_path: Path) -> None:
    text, constants = CHANNELS[name]
    optimized(parsed(text, 23, **constants), tmp_path)


@pytest.mark.parametrize("shape", ["", "[1]"])
def test_integers_that_choose_a_branch(shape: str, tmp_path: Path) -> None:
    """Both branches run: the result of the other one differs in 16 bits."""
    text = f"""(float[N, 8] x, int64{shape} rate) => (float[N, 8] y) {{ e = Equal (rate, known)
        f = Reshape (e, none)
        y = If (f) <then_branch = t () => (float[N, 8] a) {{ b = Mul (x, large) a = Mul (b, b) }},
            else_branch = e () => (float[N, 8] c) {{ c = Neg (x) }}> }}"""
    proto = parsed(text, known=np.array(16000), none=np.array([], np.int64), large=np.float32(3e4))
    assert "exceed the range" in refusal(proto, tmp_path, dtype="float16")


def test_a_loop_of_no_trips_keeps_the_sizes_of_one(tmp_path: Path) -> None:
    """ONNX Runtime returns [0, 0, 0] then."""
    text = """(float[N, 8] x, int64 n) => (float[K, N, 8] z, float[N, 8] y) {
        v, z = Loop (n, , x) <body = l (int64 i, bool m, float[P, Q] s)
        => (bool k, float[P, Q] t, float[P, R] q) { k = Identity (m) t = Tanh (s) q = Sin (s) }>
        y = MatMul (x, w) }"""
    np.savez(tmp_path / "in.npz", x=weights(3, 8), n=0)
    for given in (None, tmp_path / "in.npz"):
        options = {"inputs_file": given, "allow_uncompared": True}
        _, model = optimized(parsed(text, w=weights(8, 8)), tmp_path, **options)
        assert [str(dim) for dim in model.graph.outputs[0].shape or ()] == ["K", "N", "8"]
    assert equivalence.relative_error(np.ones((0, 3)), np.ones((0, 0))) == 0.0
    assert equivalence.relative_error(np.ones((0, 3)), np.ones((2, 3))) == np.inf


@pytest.mark.parametrize("shape", ["N, 999999, 999999", "N, 65536, 1024"])
def test_inputs_that_are_too_large(shape: str, tmp_path: Path) -> None:
    text = f"(float[{shape}] x) => (float[N, 1, 1] y) {{ y = ReduceMax (x) }}"
    assert re.search("input x of shape .* is too large to try", refusal(parsed(text), tmp_path))


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "int64"])
def test_inputs_of_rank_0(dtype: str, tmp_path: Path) -> None:
    """Arithmetic of numpy makes scalars of arrays of rank 0; generated and nudged inputs stay arrays."""
    proto = parsed(f"({dtype}[N, 4] x, {dtype} s) => ({dtype}[N, 4] y) {{ m = Mul (x, s) y = Neg (m) }}")
    optimized(proto, tmp_path)
    np.savez(tmp_path / "in.npz", x=np.ones((2, 4), {"float": "f4", "double": "f8"}.get(dtype, dtype)), s=3)
    given = dict(np.load(tmp_path / "in.npz"))
    np.savez(tmp_path / "in.npz", **given | {"s": given["s"].astype(given["x"].dtype)})
    optimized(proto, tmp_path, inputs_file=tmp_path / "in.npz")


DECLARED = {
    "another rank": "float[4, S] p", "one name for two sizes": "float[N, N, 8] p, float[S, S, 2, 4] r",
    "too large a mean": "float[N, S, 8] m", "a weight": "float[3] w", "a constant": "int64 shape",
}  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_wrong_shapes_inside_are_not_believed(name: str, tmp_path: Path) -> None:
    """ONNX Runtime ignores them. The file has to be right at other sizes, too."""
    declared = DECLARED[name]
    text = f"""(float[N, S, 8] x) => (float[N, S, 8] y) <{declared}> {{
        shape = Constant <value = int64[4] {{0, 0, 2, 4}}> () p = MatMul (x, w) r = Reshape (p, shape)
        n = Shape (p) q = Reshape (r, n) s = Mul (q, q) m = ReduceMean (s, last) v = Add (m, eps) d = Sqrt (v)
        y = Div (q, d) }}"""
    given = {"w": weights(8, 8), "last": np.array([-1]), "eps": np.array(1e-3, np.float32)}
    of_weight = declared.endswith(" w")
    proto = parsed(text.replace(f"<{declared}>", "") if of_weight else text, **given)
    if of_weight:
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3]))
    report, _ = optimized(proto, tmp_path)
    assert report.fused == {"linear": 1, "rms_norm": 1} and not report.reverted
    assert_same(tmp_path, x=(5, 6, 8))


def test_an_embedding_shares_the_weight_of_the_last_product(tmp_path: Path) -> None:
    proto = parsed(
        "(int64[B, S] ids) => (float[B, S, 3000] y) "
        "{ table = Transpose <perm=[1, 0]> (w) x = Gather (table, ids) y = MatMul (x, w) }",
        w=weights(16, 3000),
    )
    report, model = optimized(proto, tmp_path)
    assert report.fused == {"linear": 1}
    assert [tuple(value.shape or ()) for value in model.graph.initializers.values()] == [(3000, 16)]


def test_slices_of_a_weight_are_weights(tmp_path: Path) -> None:
    """As in torch's TorchScript exports of cross attention in nn.MultiheadAttention."""
    text = """(float[N, 64] x) => (float[N, 64] y, float[N, 128] z) {
        a = Slice (w, zero, one, zero) t = Transpose <perm=[1, 0]> (a) y = MatMul (x, t)
        b = Slice (w, one, three, zero) u = Transpose <perm=[1, 0]> (b) z = MatMul (x, u) }"""
    bounds = {"zero": np.array([0]), "one": np.array([64]), "three": np.array([192])}
    report, model = optimized(parsed(text, w=weights(192, 64), **bounds), tmp_path)
    assert report.fused == {"linear": 2} and not nodes(model, "Slice", "Transpose")


FORMS = {
    "product": "h = MatMul (x, w)",
    "transposed": "h = Gemm <transB=1> (x, w)",
    "gate": "p1 = MatMul (x, w) p2 = MatMul (x, u) p3 = Sigmoid (p1) p4 = Mul (p1, p3) h = Mul (p4, p2)",
    "halves": """p1 = MatMul (x, w) p2, p3 = Split <axis=-1, num_outputs=2> (p1) p4 = Sigmoid (p3)
        p5 = Mul (p3, p4) h = Mul (p2, p5)""",
    "parts": "p1 = MatMul (x, w) p2, p3 = Split <axis=-1, num_outputs=2> (p1) h = Sub (p2, p3)",
    "constants": """p1, p2 = Split <axis=-1, num_outputs=2> (w) p3 = MatMul (x, p1) p4 = MatMul (x, p2)
        h = Sub (p3, p4)""",
    "attention": "p1 = Unsqueeze (x, axis) h = com.microsoft.Attention <num_heads=2> (p1, w, bias)",
    "rows": "p1 = Gather (w, places) h = Add (x, p1)",
}
READERS = {
    "carried": """v, z = Loop (three, , x, w) <body = l (int64 i, bool m, float[8, 128] s, float[128, K] r)
        => (bool n, float[8, 128] t, float[128, K] q) { n = Identity (m) t = Tanh (s) q = Sin (r) }>""",
    "captured": """v = Loop (three, , x) <body = l (int64 i, bool m, float[8, 128] s)
        => (bool n, float[8, 128] t) { n = Identity (m) d = ReduceSum (w) t = Mul (s, d) }> z = Neg (v)""",
    "branch": """e = ReduceSum (x) z = If (c) <then_branch = a () => (float[128, K] o) { o = Mul (w, e) },
        else_branch = b () => (float[128, K] r) { r = Add (w, e) }>""",
    "other": "e = ReduceSum (x) z = Mul (w, e)",
    "transposed": "e = Transpose <perm=[1, 0]> (w) f = Sin (x) z = MatMul (f, e)",
}


@pytest.mark.parametrize(("form", "reader"), zip(FORMS, cycle(READERS)))
def test_a_weight_that_others_read_is_stored_once(form: str, reader: str, tmp_path: Path) -> None:
    rows = "1, 8" if form == "attention" else "8"
    columns = {"attention": 384, "constants": 256}.get(form, 128)
    signature = f"(float[8, 128] x, bool c) => (float[{rows}, N] h, float[K, L] z)"
    given = {"w": weights(128, columns), "three": np.array(3)}
    given |= {"u": weights(128, 128, seed=1)} if form == "gate" else {}
    given |= {"places": np.arange(8)} if form == "rows" else {}
    given |= {"bias": weights(384), "axis": np.array([0])} if form == "attention" else {}
    proto = parsed(f"{signature} {{ {FORMS[form]} {READERS[reader]} }}", **given)
    report, model = optimized(proto, tmp_path)
    tensors = [each.const_value for each in model.graph.initializers.values()]
    found = [each.size for each in tensors if each is not None and each.size > 512]
    assert sum(found) == sum(each.size for each in given.values() if each.size > 512), str(report)
    assert form not in ("product", "transposed", "gate") or report.fused["linear"] >= 1


_ATTENDS = f"""{apart("qv", "eight")} {apart("k", "eight", KT)} a = MatMul (qh, kh) b = Mul (a, half)
    c = Add (b, m) p = Softmax (c) o = MatMul (p, vh) {JOINED}"""
BROADCASTS = {
    "ada_layer_norm": (
        "float[N, S, 8] x, float[N, 1, 8] m, float[N, 1, 8] n",
        "l = LayerNormalization (x, ones) s = Add (m, one) a = Mul (l, s) y = Add (a, n)",
    ),
    "swiglu": ("float[N, S, 8] x, float[N, S, 8] m", "t = Sigmoid (x) u = Mul (x, t) y = Mul (u, m)"),
    "attention": ("float[N, S, 8] q, float[N, T, 8] k, float[N, T, 8] v, float[N, 1, S, T] m", _ATTENDS),
    "embed_layer_norm": (
        "int64[N, S] i, int64[N, S] m",
        "a = Gather (w, i) e = Gather (w, m) u = Add (a, e) y = LayerNormalization (u, ones)",
    ),
    "rotary embedding": (
        "float[N, S, 8] q, int64[N, S] i",
        f"""{apart("q", "eight")} f = Cast <to=1> (i) g = Unsqueeze (f, last) h = Mul (g, ones2) m = Cos (h)
        n = Sin (h) x0 = Slice (qh, zero, two, last) x1 = Slice (qh, two, four, last) x2 = Neg (x1)
        x3 = Concat <axis=-1> (x2, x0) c0 = Concat <axis=-1> (m, m) c1 = Unsqueeze (c0, axis)
        s0 = Concat <axis=-1> (n, n) s1 = Unsqueeze (s0, axis) a = Mul (qh, c1) b = Mul (x3, s1)
        o = Add (a, b) {JOINED}""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("made", BROADCASTS)
def test_equal_names_are_no_equal_sizes(made: str, tmp_path: Path) -> None:
    """ONNX Runtime does not enforce them. What the original broadcasts, the result refuses or computes."""
    given, body = BROADCASTS[made]
    lists = {"eight": [0, 0, 2, 4], "joined": [0, 0, 8], "zero": [0], "two": [2], "four": [4], "last": [-1]}
    constants = {name: np.array(numbers) for name, numbers in (lists | {"axis": [1]}).items()}
    constants |= {"w": weights(8, 8), "ones": np.ones(8, np.float32), "ones2": np.ones(2, np.float32)}
    constants |= {"one": np.float32(1), "half": np.float32(0.5)}
    proto = parsed(f"({given}) => (float[N, S, 8] y) {{ {body} }}", **constants)
    report, _ = optimized(proto, tmp_path)
    assert report.fused[made]
    sizes = {"N": 3, "S": 5, "T": 5}
    cases = list[dict[str, np.ndarray]]()
    values = [each for each in proto.graph.input if each.name not in constants]
    for small in range(-1, len(values)):
        for axis in (0, 1):
            case = {}
            for index, value in enumerate(values):
                shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
                is_float = value.type.tensor_type.elem_type == 1
                if index == small and (is_float or index):  # ids of the first input are those of all
                    shape[axis] = 1
                array = weights(*shape, seed=index)
                case[value.name] = array if is_float else (array > 0).astype(np.int64)
            cases.append(case)
    options: Any = {"required": 0, "optimize": False}
    files = report.source, report.path
    old, new = (run(path, report.libraries or None, cases, **options).outputs for path in files)
    pairs = [each for each in zip(old, new, strict=True) if each[0]]
    assert len(pairs) > 2 and pairs[0][1]
    for expected, found in pairs:
        if found:
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)


def test_a_length_padded_to_blocks() -> None:
    """LongT5 and Pegasus-X cut the result of blocks: what they cut has not the length of the input."""
    text = """(float[B, S, 8] x) => (float[B, S, 8] y) {
        s = Shape <start=1, end=2> (x) less = Neg (s) rest = Mod (less, four)
        pads = Concat <axis=0> (zeros, rest, zero) p = Pad (x, pads)
        c = Slice (p, zero, s, one) y = Add (x, c) }"""
    given = {"zero": [0], "one": [1], "four": [4], "zeros": [0, 0, 0, 0]}
    proto = parsed(text, **{name: np.array(value) for name, value in given.items()})
    model = ir.from_proto(proto)
    infer_types(model)
    infer_shapes(model)
    padded, cut = ([str(dim) for dim in node.outputs[0].shape or ()] for node in nodes(model, "Pad", "Slice"))
    assert cut == ["B", "S", "8"] and padded[::2] == ["B", "8"] and padded[1] != "S"


@pytest.mark.parametrize(
    "body",
    [
        "m = ReduceMax (x, last) d = Sub (x, m) n = ReduceL2 (d, last) e = Div (d, n)",  # gpt-oss
        """t = Transpose <perm = [0, 2, 1]> (x) c, state = com.microsoft.CausalConvWithState (t, w, b, past)
        d = Transpose <perm = [0, 2, 1]> (c) e = Div (d, x)""",  # LFM2
        """k = Slice (x, first, second, last)
        d, state = com.microsoft.LinearAttention <q_num_heads = 2, kv_num_heads = 1> (x, k, k, memory)
        g = com.microsoft.GatedRMSNorm (d, b, x) e = Div (g, x)""",  # Qwen 3.5
        """m = ReduceMax <keepdims = 0> (x) i = Cast <to = 7> (m) n = Unsqueeze (i, first)
        o = Concat <axis = 0> (n, n, n) c = Expand (x, o) d = Slice (c, first, n) e = Div (d, x)""",  # Bamba
    ],
    ids=["reductions", "convolution", "recurrence", "numbers"],
)
def test_sizes_behind(body: str) -> None:
    """Without the sizes behind one operator, those of the whole model would be unknown."""
    known = "<float[B, S, 8] d>" if "Expand" in body else ""  # as torch's exporter declares it
    text = f"""(float[B, S, 8] x, float[B, 8, 2] past, float[B, 1, 4, 4] memory) => (float[B, S, 8] y)
        {known} {{ {body} s = Shape (x) f = Reshape (e, flat) y = Reshape (f, s) }}"""
    rows = {"last": [-1], "flat": [-1, 8], "first": [0], "second": [4]}
    floats = {"w": np.ones((8, 1, 3), np.float32), "b": np.ones(8, np.float32)}
    proto = parsed(text, **{name: np.array(row) for name, row in rows.items()}, **floats)
    model = ir.from_proto(proto)
    infer_types(model)
    infer_shapes(model)
    found = [[str(dim) for dim in node.outputs[0].shape or ()] for node in nodes(model, "Div", "Reshape")]
    assert found == [["B", "S", "8"], ["B*S", "8"], ["B", "S", "8"]]
    states = nodes(model, "CausalConvWithState", "LinearAttention")
    assert all(node.outputs[1].shape == node.inputs[3].shape for node in states)  # type: ignore[union-attr]


def test_features_of_a_row(tmp_path: Path) -> None:
    """ONNX Runtime's inference has them in the shape of the indices, so a Reshape to that went: of skl2onnx's
    nearest neighbours."""
    text = """(float[N, 4] x) => (float[N, 3] y, int64[N, 2] z) { v, i = TopK (x, two) y = MatMul (x, w)
        e = ai.onnx.ml.ArrayFeatureExtractor (row, i) z = Reshape (e, pairs) }"""
    row, pairs = np.arange(5, 9), np.array([-1, 2])
    proto = parsed(text, two=np.array([2]), w=weights(4, 3), row=row, pairs=pairs)
    proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    report, _ = optimized(proto, tmp_path)
    assert report.fused


def test_sizes_of_images() -> None:
    """torch writes the tokens of a square image with Pow."""
    text = """(float[B, C, H, H] x) => (float[B, C, I, J] y, float[B, C, S] z) {
        r = Resize (x, , scales) y = Neg (r) n = Shape <end=2> (x) h = Shape <start=2, end=3> (x)
        t = Pow (h, two) o = Concat <axis=0> (n, t) s = Reshape (x, o) z = Neg (s) }"""
    model = ir.from_proto(parsed(text, scales=np.array([1, 1, 2, 0.5], np.float32), two=np.array(2.0)))
    infer_types(model)
    infer_shapes(model)
    found = {value.name: [*map(str, value.shape or ())] for node in model.graph for value in node.outputs}
    assert found["r"] == ["B", "C", "2*H", "floor(0.5*H)"] and found["s"] == ["B", "C", "H**2"]
