"""Tests that attention computes the same for masks, lengths and inputs that the comparison did not see."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from optimizing import JOINED, KT, apart, joined, nodes, optimized, parsed, pass_of, reported, weights
from other_sizes import assert_same

from twinop.deploy.ort_runs import run
from twinop.optimize import graph as g
from twinop.optimize import masks, passes
from twinop.optimize.verifier import SMALL_MASKS

pytestmark = pytest.mark.usefixtures("one_thread")
LOWEST = float(np.finfo(np.float32).min)
ATTENTION = """(float[B, S, 16] x, float[{batch}, {keys}, 16] m{inputs}) => (float[B, S, 16] y) {{
    q = MatMul (x, wq) k = MatMul (m, wk) v = MatMul (m, wv) {heads} s = MatMul (qh, kh)
    n1 = Shape <start=1, end=2> (x) t1 = Shape <start=1, end=2> (m) n = Squeeze (n1) t = Squeeze (t1)
    square = Concat <axis=0> (n1, n1) grid = Identity (square)
    i0 = Range (zero, n, one) i = Unsqueeze (i0, axis1) j = Range (zero, t, one)
    {mask}
    o = MatMul (p, vh) {joined} }}"""
CONSTANTS: dict[str, Any] = {
    **{name: weights(16, 16, seed=seed) for seed, name in enumerate(("wq", "wk", "wv"))},
    "apart": np.array([0, 0, 2, 8]), "joined": np.array([0, 0, 16]),
    "zero": np.array(0), "one": np.array(1), "axis1": np.array([1]), "axes12": np.array([1, 2]),
    "far": np.array(12), "back": np.array(-12), "part": np.float32(1 / 12), "seven": np.array(7),
    "yes": np.ones((1, 1), np.float32), "from": np.array([0, 0]), "axes01": np.array([0, 1]),
    "band": np.tril(np.ones((128, 128), bool)) & ~np.tril(np.ones((128, 128), bool), -12),
    "shown": np.float32(0), "lowest": np.float32(LOWEST), "infinite": np.float32(-np.inf),
}  # fmt: skip
CAUSAL = "c = GreaterOrEqual (i, j) bias = Where (c, shown, lowest) r = Add (s, bias) p = Softmax (r)"
GUARD = " p0 = Softmax (r) nan = IsNaN (p0) p = Where (nan, shown, p0)"


def attention(mask: str, inputs: str = "", batch: str = "B", keys: str = "S", **more: Any) -> onnx.ModelProto:
    heads = f"{apart('qv')} {apart('k', perm=KT)}"
    text = ATTENTION.format(heads=heads, joined=JOINED, mask=mask, inputs=inputs, batch=batch, keys=keys)
    return parsed(text, **{**CONSTANTS, **more})


def feeds(queries: int, keys: int, batch: int = 2, keys_batch: int | None = None) -> dict[str, np.ndarray]:
    return {"x": weights(batch, queries, 16), "m": weights(keys_batch or batch, keys, 16, seed=1)}


def check_same(folder: Path, inputs: dict[str, np.ndarray]) -> None:
    """Checks that both files of `optimized` return the same."""
    assert_same(folder, 1e-7, 1e-5, **inputs)


WINDOWS = {
    "causal": "d = Sub (i, j) a = GreaterOrEqual (d, zero) b = Less (d, far) c = And (a, b)",
    "both sides": "d0 = Sub (i, j) d = Abs (d0) c = LessOrEqual (d, far)",
    "chunks": "a = Div (i, far) b = Div (j, far) c = Equal (a, b)",
    "a negative number": "d = Sub (i, j) a = GreaterOrEqual (d, zero) e = Add (d, back) b = Less (e, zero) "
                         "c = And (a, b)",
    "Trilu": "e = Expand (yes, grid) l = Trilu <upper=0> (e) u = Trilu (l, back) c = Cast <to=9> (u)",
    "a buffer": "c = Slice (band, from, square, axes01)",
    "a reciprocal": "f = Cast <to=1> (i) g = Cast <to=1> (j) h = Mul (f, part) k2 = Mul (g, part) "
                    "a = Floor (h) b = Floor (k2) c = Equal (a, b)",
    "a product": "e = Mul (far, seven) d = Sub (i, j) a = GreaterOrEqual (d, zero) b = Less (d, e) "
                 "c = And (a, b)",
}  # fmt: skip


def test_a_window_that_short_sequences_do_not_show(tmp_path: Path) -> None:
    shown = "bias = Where (c, shown, lowest) r = Add (s, bias) p = Softmax (r)"
    proto = joined({name: attention(f"{mask} {shown}") for name, mask in WINDOWS.items()})
    report, _ = optimized(proto, tmp_path)
    assert report.fused["attention"] == len(WINDOWS)
    for length in (9, 30, 120):
        given = feeds(length, length)
        check_same(tmp_path, {f"{name}/{key}": each for name in WINDOWS for key, each in given.items()})


def test_masks_of_images_are_tried_at_sizes_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of twice the width and height has about 4 times the tokens, and 16 times the pairs of them."""
    tried = Mock(wraps=masks._is_of_kind)
    monkeypatch.setattr(masks.inputs, "MOST", 200_000)
    monkeypatch.setattr(masks, "_is_of_kind", tried)
    text = f"""(float[B, 1, H, H] image) => (float[B, S, 16] y) {{
        c = Conv <strides=[4, 4]> (image, kernel) f = Reshape (c, flat) q = Transpose <perm=[0, 2, 1]> (f)
        k = Abs (q) {apart("q")} {apart("k", perm=KT)} n = Shape <start=1, end=2> (q) m = Squeeze (n)
        r = Range (zero, m, one) u = Unsqueeze (r, axis1) g = GreaterOrEqual (u, zero)
        square = Concat <axis=0> (n, n) e = Expand (g, square) bias = Where (e, shown, lowest)
        s = MatMul (qh, kh) a = Add (s, bias) p = Softmax (a) o = MatMul (p, qh) {JOINED} }}"""
    given = {"kernel": weights(16, 1, 4, 4), "flat": np.array([0, 16, -1])}
    report, _ = optimized(parsed(text, **CONSTANTS, **given), tmp_path)
    sizes = [call.args[0].size for call in tried.call_args_list]
    assert report.fused == {"attention": 1} and max(sizes) < 2_000_000


@pytest.mark.parametrize("shows", ["And (a, b)", "And (a, f)", "Identity (a)"])
@pytest.mark.parametrize("choice", ["c, s, lowest", "h, infinite, s"])
def test_scores_that_a_condition_chooses(shows: str, choice: str, tmp_path: Path) -> None:
    """A window above all lengths that are tried stays."""
    mask = f"""d = Sub (i, j) a = GreaterOrEqual (d, zero) b = Less (d, huge) e = Cast <to=1> (d)
        f = Less (e, wide) c = {shows} h = Not (c) r = Where ({choice}) p = Softmax (r)"""
    proto = attention(mask, huge=np.array(100_000), wide=np.array(1e5, np.float32))
    _, model = optimized(proto, tmp_path)
    [node] = nodes(model, "MultiHeadAttention")
    assert node.attributes.get_int("unidirectional") == (1 if shows == "Identity (a)" else None)
    check_same(tmp_path, feeds(9, 9))


_PADDING = "u = Cast <to=9> (mask)"
_BRANCH = "{0}e = Equal (mask, seven) {0}w = Where ({0}e, lowest, shown) {0}o = Unsqueeze ({0}w, axes12)"
_THEN, _ELSE = (f"{n}b () => (float[B, 1, 1, S] {n}o) {{ {_BRANCH.format(n)} }}" for n in "te")
# As transformers before 4.36. Two lowest numbers add up to -inf; rows of it are NaN in both.
_SUMMED = f"""{_PADDING} b = Where (u, shown, LOWEST) pad = Unsqueeze (b, axes12) c = GreaterOrEqual (i, j)
    cb = Where (c, shown, LOWEST) both = Add (cb, pad) r = Add (s, both)"""
TOKENS: dict[str, tuple[str, Any]] = {
    "sequences without a token may show everything": (
        f"""any = ReduceMax <keepdims=1> (mask, axis1) none = Equal (any, zero) {_PADDING} e = Or (u, none)
        b = Where (e, shown, lowest) bias = Unsqueeze (b, axes12) r = Add (s, bias)""",
        [[1, 1, 1, 0, 0], [0] * 5],
    ),
    # Beside another mask of -1e4, as older models have, it shows which tokens a hidden row sees.
    "a lowest number stays": (
        """f = Cast <to=1> (mask) g = Sub (single, f) h = Mul (g, less) pad = Unsqueeze (h, axes12)
        c = GreaterOrEqual (i, j) cb = Where (c, shown, less) r0 = Add (s, pad) r = Add (r0, cb)""",
        [[0, 0, 1, 1, 1], [0] * 5],
    ),
    "causal and padding, summed": (
        _SUMMED.replace("LOWEST", "lowest"), [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]],
    ),
    "causal, padded, infinite": (_SUMMED.replace("LOWEST", "infinite"), [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]),
    "ids in a subgraph": (
        f"c = Less (n, one) bias = If (c) <then_branch = {_THEN}, else_branch = {_ELSE}> r = Add (s, bias)",
        [[1, 1, 1, 7, 7]] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_masks_of_tokens(name: str, tmp_path: Path) -> None:
    mask, shown = TOKENS[name]
    given = "ids" if name.startswith("ids") else "attention_mask"
    mask = f"{mask} p = Softmax (r)".replace("(mask", f"({given}")
    more = {"less": np.float32(-1e4), "single": np.float32(1)}
    report, _ = optimized(attention(mask, f", int64[B, S] {given}", **more), tmp_path)
    assert report.fused["attention"] == 1
    check_same(tmp_path, feeds(5, 5) | {given: np.array(shown)})


def test_a_mask_that_large_scores_exceed_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, model = optimized(proto := attention(CAUSAL, lowest=np.float32(-1e4)), tmp_path)
    [node] = nodes(model, "MultiHeadAttention")
    assert "unidirectional" not in node.attributes and node.inputs[5] is not None
    assert SMALL_MASKS in report.notes
    check_same(tmp_path, {name: 300 * each for name, each in feeds(9, 9).items()})

    def wrong(work: g.RewriteContext) -> None:
        for node in work.nodes("Tanh"):
            node.op_type = "Sin"

    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES, pass_of("wrong", wrong)])
    for index, name in enumerate("xmm"):  # so no score exceeds the mask: another rewrite differs
        proto.graph.node[index].input[0] = f"{name}t"
    for name in "xm":
        proto.graph.node.insert(0, onnx.helper.make_node("Tanh", [name], [f"{name}t"]))
    report = reported(proto, tmp_path, device="cuda")
    assert [*report.reverted] == ["wrong"] and report.fused["attention"] and not report.notes


@pytest.mark.parametrize("lowest", [LOWEST, -np.inf])
def test_lengths_hide_large_scores(lowest: float, tmp_path: Path) -> None:
    mask = f"""{_PADDING} b = Where (u, shown, lowest) bias = Unsqueeze (b, axes12)
        r = Add (s, bias) p = Softmax (r)"""
    given = attention(mask, ", int64[B, S] mask", lowest=np.float32(lowest))
    report, model = optimized(given, tmp_path, padding="right")
    [node] = nodes(model, "MultiHeadAttention")
    assert g.rank(node.inputs[4]) == 1 and not report.reverted
    large = {name: 300 * each for name, each in feeds(9, 9).items()}
    check_same(tmp_path, large | {"mask": np.array([[1] * 5 + [0] * 4, [1] * 9])})
    case = large | {"mask": np.ones((2, 1), np.int64)}  # our session refuses it, not ONNX Runtime
    old, new = (run(path, report.libraries, [case]).outputs for path in (report.source, report.path))
    np.testing.assert_allclose(new[0][0], old[0][0], 1e-5)


@pytest.mark.parametrize(
    ("number", "op", "causal"), [(-1e4, "Add", [1]), (1e4, "Sub", [None]), (-9e3, "Add", [])]
)
def test_scores_that_become_zero(number: float, op: str, causal: list[int | None], tmp_path: Path) -> None:
    """OpenAI GPT: scores * kept - 10000 * (1 - kept)."""
    mask = (
        "c = Slice (kept, from, square, axes01) small = Mul (s, tiny) a = Mul (c, small) d = Sub (single, c) "
        f"b = Mul (d, number) r = {op} (a, b) p = Softmax (r)"
    )
    more = {"tiny": np.float32(1e-5), "single": np.float32(1), "number": np.float32(number)}
    kept = np.tril(np.ones((128, 128), np.float32))
    report, model = optimized(attention(mask, kept=kept, **more), tmp_path)
    found = nodes(model, "MultiHeadAttention")
    assert [node.attributes.get_int("unidirectional") for node in found] == causal, report.skipped
    check_same(tmp_path, feeds(30, 30))
    _, model = optimized(attention(mask, kept=kept * np.float32(0.5), **more), tmp_path)
    assert not nodes(model, "MultiHeadAttention")


@pytest.mark.parametrize("given", [False, True], ids=["generated inputs", "given inputs"])
@pytest.mark.parametrize("mask", [CAUSAL, f"d = Sub (t, n) i2 = Add (i, d) {CAUSAL.replace('(i,', '(i2,')}"])
def test_a_causal_mask_of_more_or_fewer_keys_than_queries(mask: str, given: bool, tmp_path: Path) -> None:
    """The first and the last query may see one key only: top left, or bottom right."""
    np.savez(tmp_path / "inputs.npz", x=feeds(5, 5)["x"], m=feeds(5, 5)["m"])
    inputs_file = tmp_path / "inputs.npz" if given else None
    report, model = optimized(attention(mask, keys="T"), tmp_path, inputs_file=inputs_file)
    assert report.fused["attention"] == 1
    [node] = nodes(model, "MultiHeadAttention")
    assert "unidirectional" not in node.attributes
    for queries, keys in ((5, 5), (3, 9), (9, 5)):
        check_same(tmp_path, feeds(queries, keys))


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("bool", "bias = Where (mask, shown, infinite) r = Add (s, bias)"),
        ("bool", "r = Where (mask, s, infinite)"),
        ("float", "r = Add (s, mask)"),
        ("bool", "bias = Where (mask, shown, lowest) r = Add (s, bias)"),
        ("bool", "flat = Squeeze (mask, axes01) bias = Where (flat, shown, infinite) r = Add (s, bias)"),
    ],
    ids=["bias", "chosen scores", "float", "finite", "of all sequences"],
)
def test_a_guard_of_rows_that_a_mask_hides(kind: str, mask: str, tmp_path: Path) -> None:
    batch = 1 if "flat" in mask else 2
    declared = f", {kind}[{'1' if batch == 1 else 'B'}, 1, S, S] mask"
    report, model = optimized(attention(mask + GUARD, declared), tmp_path)
    assert report.fused["attention"] == 1
    assert len(nodes(model, "ReduceMax")) == ("lowest" not in mask)
    shown = np.ones((2, 1, 5, 5), bool)
    shown[:, :, 1], shown[0, 0, 3, 2:] = False, False
    given = shown if kind == "bool" else np.where(shown, np.float32(0), np.float32(-np.inf))
    check_same(tmp_path, feeds(5, 5) | {"mask": given[:batch]})


def test_batches_that_may_differ(tmp_path: Path) -> None:
    report, _ = optimized(attention("p = Softmax (s)", batch="C"), tmp_path)
    assert report.skipped == {"attention: q and k of batches that may differ": 1}
    check_same(tmp_path, feeds(4, 4, batch=3, keys_batch=1))


GATE = """(float[N, 8] x) => (float[N, 6] y) { h = MatMul (x, w) a, b = Split <axis=-1, num_outputs=2> (h)
    s = Sigmoid (a) t = Mul (a, s) u = Mul (t, b) %s }"""


def wrong(work: object) -> None:
    """Is a rewrite that changes the results."""
    for node in work.nodes("Sigmoid"):  # type: ignore[attr-defined]
        node.op_type = "Tanh"


@pytest.mark.parametrize(
    "output",
    ["l = Log (x) n = ReduceSum (l) y = Add (u, n)", "y = Add (u, low)", "y = Concat <axis=0> (u, low)"],
    ids=["NaN for negative inputs", "one lowest number", "a row of lowest numbers"],
)
def test_each_number_is_compared(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinop.optimize.passes.PASSES", [pass_of("wrong", wrong)])
    low = np.array([[LOWEST, 0, 0, 0, 0, 0]] if "Add" in output else [[LOWEST] * 6], np.float32)
    report = reported(parsed(GATE % output, w=weights(8, 12), low=low), tmp_path)
    assert "differs from the original" in report.reverted["wrong"]


def test_inverted_masks_in_16_bits(tmp_path: Path) -> None:
    """torch's padding masks hide what is True. The comparison in 16 bits leaves none of the cases out."""
    mask = "b = Where (padding_mask, lowest, shown) bias = Unsqueeze (b, axes12) r = Add (s, bias)"
    model = attention(f"{mask} p = Softmax (r)", ", bool[B, S] padding_mask")
    report, _ = optimized(model, tmp_path, dtype="float16")
    assert 0 < report.error < 1e-2
