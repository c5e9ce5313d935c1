"""Tests of what `twinop optimize` compares, and of what it accepts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from models import REFUSED, refused
from optimizing import nodes, optimized, parsed, pass_of, refusal, reported, weights
from other_sizes import assert_same

from twinop import deploy
from twinop.deploy.ort_runs import run
from twinop.errors import ExportError
from twinop.optimize import comparison, equivalence, passes
from twinop.optimize import graph as g

DETECTOR = """(float[N, 8] x) => (float[K, 8] boxes) { h = MatMul (x, w)
    s = ReduceMax <keepdims=0> (h, last) k = Greater (s, threshold) i = NonZero (k)
    t = Transpose <perm=[1, 0]> (i) boxes = GatherND (h, t) }"""
GIVEN = {"w": weights(8, 8), "last": np.array([1]), "threshold": np.array(1e3, np.float32)}
NOTHING = {
    "one empty output": DETECTOR,
    "only NaN beside numbers": "(float[N, 8] x) => (float[N, 8] boxes, float[N, 8] y) {"
    " a = Abs (x) n = Neg (a) s = Sub (n, threshold) l = Sqrt (s) boxes = MatMul (l, w) y = MatMul (x, w) }",
}


@pytest.mark.parametrize("name", NOTHING)
def test_an_output_that_is_never_compared_is_refused(name: str, tmp_path: Path) -> None:
    proto = parsed(NOTHING[name], **GIVEN)
    said = f"output boxes has no {'finite number' if 'NaN' in name else 'elements'} for any of the inputs, "
    assert re.search(f"{said}.*cannot be compared. Give inputs .*inputs_file=", refusal(proto, tmp_path))
    report, _ = optimized(proto, tmp_path, allow_uncompared=True)
    assert "output boxes" in str(report) and "it was not compared" in str(report)
    proto = parsed("(float[N, 8] x) => (float[N, 8] y) { y = Max (x, threshold) }", **GIVEN)
    assert "output y is the same for other inputs" in str(optimized(proto, tmp_path)[0])


def test_inputs_for_which_there_is_something_to_compare(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.full((3, 8), 1e5, np.float32) * np.sign(GIVEN["w"].sum(1)))
    proto = parsed(NOTHING["one empty output"], **GIVEN)
    report, _ = optimized(proto, tmp_path, inputs_file=tmp_path / "x.npz")
    assert not report.notes and report.fused


@pytest.mark.parametrize(
    ("noise", "typical", "edge", "said"),
    [
        (0, 9e-5, 0, ""),
        (0, 2e-4, 0, "relative error"),
        (4e-3, 7e-3, 0, ""),
        (4e-3, 9e-3, 0, "relative error"),
        (np.inf, 2e-4, 0, "relative error"),
        (0, 0, 1e-6, ""),  # rounding, beside usual numbers
        (1e-3, 0, 1.9e-3, ""),
        (1e-3, 0, 2.1e-3, "for inputs of zeros"),
        (0, 0, 0.1, "for inputs of zeros"),
        (0, 0, np.nan, "for inputs of zeros"),
    ],
)
def test_twice_the_originals_noise_is_accepted(noise: float, typical: float, edge: float, said: str) -> None:
    """Also for edge cases, whose errors are compared with the size of usual numbers."""
    x = np.linspace(1, 2, 100, dtype=np.float32)
    usual = equivalence.Reference([{}, {}], [[x], [0 * x]], ["inputs of zeros"], [1.5])
    errors = usual.errors([[x * (1 + np.float32(typical))], [0 * x + np.float32(1.5 * edge)]])
    if said:
        with pytest.raises(equivalence.NotEquivalent, match=said):
            usual.check(errors, lambda chosen: [[noise]] * len(chosen), "float32")
    else:
        found = usual.check(errors, lambda chosen: [[noise]] * len(chosen), "float32")
        assert found == pytest.approx(typical, rel=0.01)


def test_the_noise_of_a_model_of_integers_is_that_of_its_weights(tmp_path: Path) -> None:
    """The norm of rows with a large mean hangs on the last bits, and the inputs have none to change."""
    text = """(int64[N, 7] ids) => (float[N, 7, 64] y) { h = Gather (table, ids)
        y = LayerNormalization <axis=-1> (h, scale, bias) }"""
    given = {"table": 3000 + weights(50, 64), "scale": weights(64, seed=1), "bias": weights(64, seed=2)}
    report, model = optimized(parsed(text, **given), tmp_path, device="cpu")
    assert nodes(model, "CustomLayerNorm") and equivalence.ACCEPTED["float32"] < report.error < 1e-2


@pytest.mark.parametrize("is_edge", [False, True])
@pytest.mark.parametrize("original_fails", [False, True])
def test_16_bits_that_fail(
    is_edge: bool, original_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, unless the original in 16 bits fails there, too."""

    def fails(what: Any, library: Any, cases: Any, **options: Any) -> Any:
        answer = run(what, library, cases, **options)
        is_half = any(each.dtype == np.float16 for each in cases[0].values())
        if not (is_half and (original_fails or isinstance(what, Path))):
            return answer
        if not is_edge:
            raise ExportError("no such row")
        return replace(answer, outputs=[*answer.outputs[:-1], []])

    monkeypatch.setattr(comparison, "run", fails)
    model = parsed("(float[N, 8] x) => (float[N, 8] y) { y = MatMul (x, w) }", w=weights(8, 8))
    if original_fails:
        report, _ = optimized(model, tmp_path, dtype="float16")
        assert report.notes == ["compared in its fp32 form: no such row"] * (not is_edge)
        return
    said = "differs from the original for large inputs" if is_edge else "fails: no such row"
    with pytest.raises(ExportError, match=f"the model in float16 {said}"):
        optimized(model, tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("hidden", "kind", "number"),
    [
        ("mask", "Attention", -5000.0),
        ("mask", "MultiHeadAttention", None),
        ("mask", "MultiHeadAttention", float(np.finfo(np.float32).min)),
        ("lengths", "Attention", None),
        ("lengths", "MultiHeadAttention", -5000.0),
    ],
)
def test_rows_that_a_mask_hides(hidden: str, kind: str, number: float | None, tmp_path: Path) -> None:
    attribute = "" if number is None else f", mask_filter_value={number}"
    given = f"x, w, b, {hidden}" if kind == "Attention" else f"x, x, x, b, {hidden}"
    text = f"""(float[N, S, 8] x, int32[N, S] mask) => (float[N, S, 8] y) {{
        lengths = ReduceSum <keepdims=0> (mask, one)
        z = com.microsoft.{kind} <num_heads=2{attribute}> ({given}) y = MatMul (z, v) }}"""
    constants = {"w": weights(8, 24), "b": weights(24), "v": weights(8, 8), "one": np.array([1])}
    _, model = optimized(parsed(text, **constants), tmp_path)
    [node] = nodes(model, "MultiHeadAttention")
    assert [value is None for value in node.inputs[4:]] == ([True, False] if hidden == "mask" else [False])
    x = np.random.default_rng(3).standard_normal((4, 5, 8)).astype(np.float32) * 2
    mask = np.array([[0] * 5, [1] * 5, [1, 0, 1, 1, 0], [0, 0, 1, 1, 1]], np.int32)
    assert_same(tmp_path, 2e-3, 2e-3, x=x, mask=mask)


def test_a_mask_of_starts_and_ends_stays_with_its_attention(tmp_path: Path) -> None:
    text = """(float[N, S, 8] x, int32[N, S] mask) => (float[N, S, 8] y) {
        ends = ReduceSum <keepdims=0> (mask, one) starts = Sub (ends, ends)
        both = Concat <axis=0> (ends, starts)
        z = com.microsoft.Attention <num_heads=2> (x, w, b, both) y = MatMul (z, v) }"""
    constants = {"w": weights(8, 24), "b": weights(24), "v": weights(8, 8), "one": np.array([1])}
    report, model = optimized(parsed(text, **constants), tmp_path)
    assert nodes(model, "Attention") and not nodes(model, "MultiHeadAttention")
    reason = "a mask that is not known to be one length for each sequence"
    assert report.skipped == {f"Attention: {reason}": 1}


@pytest.mark.parametrize("declared", ["1, seqlen", "N, 7, 8", "1, 4, 8", "N, 4, 8, 1"])
def test_an_output_whose_declared_shape_is_wrong(declared: str, tmp_path: Path) -> None:
    """ONNX Runtime warns, and ignores it."""
    text = f"(float[N, 32] x) => (float[{declared}] y) {{ p = MatMul (x, w) y = Reshape (p, shape) }}"
    given = {"w": weights(32, 32), "shape": np.array([-1, 4, 8])}
    report, model = optimized(parsed(text, **given), tmp_path)
    assert report.fused and len(model.graph.outputs[0].shape or ()) == 3


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_files_that_onnx_runtime_breaks(what: str, given: bool, tmp_path: Path) -> None:
    """They are compared without its own optimizations, and the report says so; rewrites are still made."""
    np.savez(tmp_path / "x.npz", x=weights(3, 1))
    report, _ = optimized(refused(what), tmp_path, inputs_file=tmp_path / "x.npz" if given else None)
    [note] = [each for each in report.notes if each.startswith("the original: ")]
    assert "fails when it optimizes this model, so it ran without these" in note and report.error < 1e-6


@pytest.mark.parametrize(("rows", "batch"), [(5_000, "B"), (3_000, "2")])
def test_the_largest_rows_of_tables_are_compared(rows: int, batch: str, tmp_path: Path) -> None:
    """Random ids rarely meet the one row that does not fit."""
    text = f"""(int64[{batch}, S] ids) => (float[{batch}, S, 4] y) {{ e = Gather (t, ids) a = Mul (e, e)
        n = LayerNormalization (a, g) y = MatMul (n, w) }}"""
    table = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    given = {"g": np.ones(4, np.float32), "w": weights(4, 4)}
    optimized(parsed(text, t=table, **given), tmp_path, dtype="float16")
    table[rows - 777, 1] = 300  # its square exceeds fp16
    said = refusal(parsed(text, t=table, **given), tmp_path, dtype="float16")
    assert "relative error of inf for the ids of the largest rows of ids: its" in said
    optimized(tmp_path / "old.onnx", tmp_path, dtype="bfloat16")


NUMBERS = "f = Cast <to=1> (i) s = Slice (f, zero, one, one) d = Sub (f, s) m = MatMul (x, w) y = Add (m, d)"
HIDES = "f = Cast <to=1> (i) v = Sub (unit, f) h = Mul(v, low) m = MatMul(x, w) a = Add(m, h) y = Softmax(a)"


@pytest.mark.parametrize("name", ["padding_lengths", "masked_positions", "lengths"])
@pytest.mark.parametrize("shape", ["B, 8", "8"])
def test_no_name_makes_a_mask_of_numbers(name: str, shape: str, tmp_path: Path) -> None:
    text = f"(float[B, 8] x, int64[{shape}] i) => (float[B, 8] y) {{ {NUMBERS} }}".replace("(i)", f"({name})")
    text = text.replace("] i)", f"] {name})").replace("s = Slice (f, zero, one, one)", "s = ReduceMin (f)")
    optimized(parsed(text, w=weights(8, 8)), tmp_path, dtype="float16")
    numbers = np.broadcast_to(70_001 + np.arange(8), (3, 8) if "," in shape else (8,)).astype(np.int64)
    x = np.zeros((3, 8), np.float16)
    session = deploy.session(tmp_path / "fast.onnx", ["CPUExecutionProvider"])
    assert np.array_equal(session.run({"x": x, name: numbers})["y"][0], np.arange(8))


@pytest.mark.parametrize("name", ["attention_mask", "shown"])
def test_what_hides_scores_is_a_mask_by_any_name(name: str, tmp_path: Path) -> None:
    text = f"(float[B, 8] x, int64[B, 8] {name}) => (float[B, 8] y) {{ {HIDES} }}".replace("(i)", f"({name})")
    given = {"unit": np.float32(1), "low": np.float32(-10000)}
    _, model = optimized(parsed(text, w=weights(8, 8), **given), tmp_path, dtype="float16")
    kinds = {node.op_type: node.outputs[0].dtype for node in model.graph}
    assert kinds["Softmax"] is ir.DataType.FLOAT16


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_large_inputs_that_overflow_in_the_original_too(device: str, tmp_path: Path) -> None:
    """The CPU computes x ** 3 + x and the norm in fp32 also where a GPU has fp16."""
    text = """(float[N, 8] x) => (float[N, 8] y) { p = Pow (x, three) h = Add (p, x)
        l = LayerNormalization (h, g) y = MatMul (l, w) }"""
    given = {"three": np.float32(3), "g": weights(8) + 1, "w": weights(8, 8)}
    report, _ = optimized(parsed(text, **given), tmp_path, dtype="float16", device=device)
    assert report.error < 2e-3 and report.fused["add_layer_norm"] == 1


def test_values_that_fit_come_from_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that does not run on generated values is compared on edge inputs of the whole model, too."""

    def limited(work: Any) -> None:  # only large inputs reach row 7
        for node in work.nodes("GatherND"):
            most = g.initializer(work.graph, np.array(6), "number")
            node.replace_input_with(1, g.add(node, "Min", [node.inputs[1], most]))

    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 200)
    monkeypatch.setattr(passes, "PASSES", [pass_of("limited", limited)])
    text = """(float[N, 4] x) => (float[N, 8, 16] y) { a = MatMul (x, w) s = Sigmoid (a)
        v = Unsqueeze (s, last) m = Mul (v, rows) f = Floor (m) i = Cast <to=7> (f)
        y = GatherND (table, i) }"""
    proto = parsed(
        text, w=weights(4, 8), last=np.array([2]), rows=np.array([0, 7], np.float32), table=weights(1, 8, 16)
    )
    report = reported(proto, tmp_path, device="cpu")
    assert "differs from the original for large inputs" in report.reverted["limited"], report
    assert not report.notes


@pytest.mark.parametrize("is_computed", [False, True])
def test_rows_of_a_table_are_real(is_computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves of a cosine's rows are equal, which rewrites may use; of random numbers they are not."""

    def with_one_half(work: g.RewriteContext) -> None:
        for node in work.nodes("Mul"):
            numbers = [g.int_constant(node, [each]) for each in (0, 32, -1)]
            half = g.add(node, "Slice", [node.inputs[1], *numbers])
            node.replace_input_with(1, g.add(node, "Concat", [half, half], {"axis": -1}))

    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 16_000)
    monkeypatch.setattr(passes, "PASSES", [pass_of("with_one_half", with_one_half)])
    text = f"""(int64[B, S] ids) => (float[B, S, 64] y) {{
        {"half = Cos (angles) table = Concat <axis=-1> (half, half)" if is_computed else ""}
        s = Shape <start=1> (ids) p = Slice (places, zero, s) cos = Gather (table, p) h = Gather (words, ids)
        a = MatMul (h, w1) b = Mul (a, cos) c = MatMul (b, w2) d = Mul (c, cos) y = MatMul (d, w3) }}"""
    given = {f"w{i}": weights(64, 64, seed=i) for i in range(1, 4)} | {"words": weights(20, 64)}
    angles = weights(64, 32)
    given |= {"angles": angles} if is_computed else {"table": np.concatenate([angles, angles], 1)}
    report = reported(parsed(text, places=np.arange(64), zero=np.array([0]), **given), tmp_path, device="cpu")
    assert not report.reverted and not report.notes


def test_axes_that_broadcast_have_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum of [B, S, 64] and what is computed, the inference takes the first axis of both for B."""
    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 16_000)
    text = """(int64[B, S] ids) => (float[B, S, 64] y) <float[B, S, 64] n> {
        s = Shape <start=1> (ids) p = Slice (places, zero, s, one, one) e = Gather (table, p)
        n = custom_domain.CustomEmbedLayerNorm (words, ids, e, gain, gain)
        a = MatMul (n, w1) b = Relu (a) y = MatMul (b, w2) }"""
    given = {"places": np.arange(64)[None], "zero": np.array([0]), "one": np.array([1])}
    given |= {"table": weights(64, 64), "words": weights(20, 64), "gain": weights(64)}
    given |= {"w1": weights(64, 64), "w2": weights(64, 64, seed=2)}
    report, _ = optimized(parsed(text, **given), tmp_path)
    assert report.compared["kinds of segments with generated and edge inputs"] == 4 and not report.notes


ROW_OF_THE_LARGEST = """(float[N, 4] x) => (float[N, 8] y) { a = MatMul (x, w) s = Abs (a)
    m = ReduceMax <keepdims=0> (s) i = Cast <to=7> (m) r = Gather (table, i) y = Mul (a, r) }"""


@pytest.mark.parametrize("rows", [40, 9000])
def test_edge_cases_where_it_fails(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_few_rows(work: g.RewriteContext) -> None:
        for node in work.nodes("Gather"):
            node.replace_input_with(0, g.initializer(work.graph, table[:40], "few"))

    monkeypatch.setattr(passes, "PASSES", [pass_of("with_few_rows", with_few_rows)])
    table = weights(rows, 8)
    proto = parsed(ROW_OF_THE_LARGEST, w=weights(4, 8) / 10, table=table)
    report = reported(proto, tmp_path, device="cpu")
    assert [*report.reverted] == ["with_few_rows"] * (rows > 40), report
    assert ("not compared for large inputs" in report.to_json()) == (rows == 40)
