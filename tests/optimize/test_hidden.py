"""What padding masks hide is not compared, and everything else is."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import exported, parsed, pass_of, weights

from twinop import deploy
from twinop.optimize import OptimizeReport, hidden, optimize, passes, segments
from twinop.optimize import graph as g
from twinop.optimize.equivalence import relative_error

CHAIN = """(float[B, S, 32] x, int64[B, S] mask) => (float[B, S, 32] y OTHERS) {
    m = Cast <to = 1> (mask) u = Unsqueeze (m, last) a = MatMul (x, w0) b = Add (a, u) c = MatMul (b, w1)
    d = Mul (c, u) e = Sub (c, d) f = Add (d, e) z = MatMul (f, w2) y = Add (z, u)
    p = ReduceMax <keepdims = 0> (y, one) t = Transpose <perm = [1, 0, 2]> (y) }"""
CONSTANTS = {f"w{i}": weights(32, 32, seed=i) for i in range(3)}
CONSTANTS |= {"last": np.array([-1]), "one": np.array([1])}
SEVEN = np.array(7, np.float32)
NOTE = "y: compared where mask shows tokens"


def changing(at: str, name: str = "y") -> Any:
    """Makes a rewrite that adds 1 to a value where the mask shows tokens, or hides them but shows others."""

    def change(work: g.RewriteContext) -> None:
        [mask] = [value for value in work.graph.inputs if value.name == "mask"]
        old = next(value for node in work.graph for value in node.outputs if value.name == name)
        number, axis = (g.initializer(work.graph, np.array(each), "n") for each in (at == "shown", [-1]))
        nodes = list[ir.Node]()

        def made(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes))
            return nodes[-1].outputs[0]

        is_there = made("Equal", made("Cast", mask, to=9), made("Cast", number, to=9))
        is_there = made("And", is_there, made("Cast", made("ReduceMax", mask, axis), to=9))
        new = made("Add", old, made("Unsqueeze", made("Cast", is_there, to=1), axis))
        for use in [each for each in old.uses() if each.node is not new.producer()]:
            use.node.replace_input_with(use.idx, new)
        if old.is_graph_output():
            work.graph.outputs[work.graph.outputs.index(old)] = new
        new.type, new.shape, new.name, old.name = old.type, old.shape, name, f"{name}_before"
        work.graph.insert_after(g.maker(old), nodes)
        work.graph.sort()

    return pass_of("changes", change)


def changed(source: Path, monkeypatch: pytest.MonkeyPatch, change: Any, **options: Any) -> OptimizeReport:
    """Optimises a file with a rewrite more, for CUDA."""
    with monkeypatch.context() as patch:
        patch.setattr(passes, "PASSES", [*passes.PASSES, change])
        return optimize(source, source.with_name("new.onnx"), device="cuda", **options)


def chain(folder: Path, others: str = "") -> Path:
    onnx.save(parsed(CHAIN.replace("OTHERS", others), **CONSTANTS), folder / "old.onnx")
    return folder / "old.onnx"


@pytest.mark.parametrize(
    ("style", "padding"), [("bert", "right"), pytest.param("llama", None, marks=pytest.mark.slow)]
)
def test_an_encoder(style: str, padding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the promise, masks hide each end, and attention shows that they do."""
    source = exported(style, "sdpa", "torchscript", tmp_path)
    report = changed(source, monkeypatch, changing("hidden"), padding=padding)
    assert not report.reverted and report.fused and NOTE in report.notes


@pytest.mark.parametrize(
    ("others", "reverted"),
    [(", float[S, B, 32] t", []), (", float[B, 32] p", ["changes"])],
    ids=["transposed", "pooled"],
)
def test_outputs(others: str, reverted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axes may be elsewhere; what lacks the sequence is compared whole, and all without a promise."""
    source = chain(tmp_path, others)
    report = changed(source, monkeypatch, changing("hidden"), padding="right")
    assert [*report.reverted] == reverted
    shown = [note.partition(":")[0] for note in report.notes if "compared where" in note]
    assert shown == ["y", *(["t"] if "t" in others.split() else [])]
    if not reverted:
        assert [*changed(source, monkeypatch, changing("shown"), padding="right").reverted] == ["changes"]
        report = changed(source, monkeypatch, changing("hidden"))
        assert [*report.reverted] == ["changes"] and NOTE not in report.notes


@pytest.mark.parametrize("name", [pytest.param("y", marks=pytest.mark.slow), "b"])
def test_segments_on_inputs_of_the_user(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment that sees the mask, and what accumulates up to the outputs; "b" crosses."""
    monkeypatch.setattr(segments, "MOST_BYTES", 4200)
    mask = np.array([[1, 1, 1, 0, 0, 0], [1] * 6])
    np.savez(tmp_path / "given.npz", x=weights(2, 6, 32, seed=7), mask=mask)
    options: dict[str, Any] = {"padding": "right", "inputs_file": tmp_path / "given.npz"}
    report = changed(chain(tmp_path), monkeypatch, changing("hidden", name), **options)
    assert report.compared["segments"] == 3 and not report.reverted and NOTE in report.notes
    report = changed(chain(tmp_path), monkeypatch, changing("shown", name), **options)
    assert [*report.reverted] == ["changes"]


def test_the_error_in_8_bits(tmp_path: Path) -> None:
    """Rows of numbers that are almost equal have large errors behind a norm, also in 16 bits."""
    text = """(float[B, S, 64] x, int64[B, S] mask) => (float[B, S, 64] y) {
        s = Add (x, seven) n = LayerNormalization (s, row) a = MatMul (n, w0) b = Gelu (a) c = MatMul (b, w1)
        y = MatMul (c, w2) }"""
    given = {f"w{i}": weights(64, 64, seed=i) for i in range(3)} | {"row": 1 + weights(64), "seven": SEVEN}
    onnx.save(parsed(text, **given), tmp_path / "old.onnx")
    x, mask = weights(2, 32, 64, seed=8), np.ones((2, 32), np.int64)
    x[1, 8:] *= np.float32(1e-2)
    mask[1, 8:] = 0
    np.savez(tmp_path / "given.npz", x=x, mask=mask)
    options: dict[str, Any] = {"rows": 0, "max_error": 9, "inputs_file": tmp_path / "given.npz"}
    report = optimize(
        tmp_path / "old.onnx", tmp_path / "new.onnx", dtype="float8", padding="right", **options
    )
    assert report.float8 is not None and report.float8.layers and not report.reverted
    sessions = [deploy.session(tmp_path / f"{at}.onnx", ["CPUExecutionProvider"]) for at in ("old", "new")]
    cases = [{"x": x.astype(dtype), "mask": mask} for dtype in (np.float32, np.float16)]
    a, b = (np.asarray(each.run(case)["y"]) for each, case in zip(sessions, cases, strict=True))
    shown = relative_error(a[mask != 0], b[mask != 0])
    assert report.float8.error == pytest.approx(shown, rel=0.05) and report.float8.error_16 < 1e-2
    assert relative_error(a, b) > 3 * shown


MODEL = ir.from_proto(
    parsed(
        """(int64[B, S] mask, int64[B, S] other_mask, int64[B, T] memory_mask, int64[2, 4] fixed_mask)
        => (float[B, S, 4] a, float[S, B] b, float[B, 4] c, float[B, S, S] d, float[B, S, T] e, float[2, 4] f,
            float[B, T, 4] g, float[U, V, 4] h, float[8, 4, 2] i)
        { a = Relu (mask) b = Relu (mask) c = Relu (mask) d = Relu (mask) e = Relu (mask) f = Relu (mask)
          g = Relu (mask) h = Relu (mask) i = Relu (mask) }"""
    )
)  # fmt: skip
ALL = ("mask", "other_mask", "memory_mask", "fixed_mask")


def test_certain_axes() -> None:
    """The names of axes say which they are; two numbers may be those of something else."""
    both = "mask", "other_mask"
    found = hidden.places(MODEL, MODEL.graph.outputs, ALL)
    assert found == [
        (both, 0, 1), (both, 1, 0), None, None, None, None, (("memory_mask",), 0, 1), None,
        (("fixed_mask",), 2, 1),
    ]  # fmt: skip
    assert hidden.places(MODEL, MODEL.graph.outputs, ()) == [None] * 9


@pytest.mark.parametrize(
    ("sizes", "shapes", "expected"),
    [
        ([(3, 7), (1, 9)], [(7, 3, 4), (9, 1, 4)], (1, 0)),
        ([(3, 7), (3, 9)], [(3, 7, 4), (3, 9, 4)], None),
        ([(3, 7), (1, 7)], [(3, 7, 4), (1, 7, 4)], None),
        ([(3, 7), (1, 9)], [(3, 7, 7), (1, 9, 9)], None),
        ([(3, 7), (1, 9)], [(3, 7, 4), (1, 8, 4)], None),
    ],
)
def test_axes_by_their_sizes(sizes: Any, shapes: Any, expected: Any) -> None:
    """Each in several runs, as an axis that is no batch or sequence may have their sizes in one."""
    cases = [{"mask": np.ones(each)} for each in sizes]
    outputs = [[np.zeros(each)] for each in shapes]
    [found] = hidden.places(MODEL, MODEL.graph.outputs[7:8], ["mask"], cases, outputs)
    assert found == (expected and (("mask",), *expected))


def test_what_is_shown() -> None:
    """What any of several masks shows; sequences of nothing; all of a value of other sizes."""
    mask = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    case = {"mask": mask, "other_mask": mask * [1, 0, 0], "key_padding_mask": mask == 0}
    value = np.arange(9).reshape(3, 3)
    for names in (["mask"], ["key_padding_mask"], ["mask", "other_mask"]):
        for axes, array in (((0, 1), value), ((1, 0), value.T)):
            assert [*hidden.shown(array, case, ((*names,), *axes))] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert hidden.shown(value[:, :2], case, (("mask",), 0, 1)).shape == (3, 2)
    assert hidden.shown(value[0], case, (("mask",), 0, 1)).shape == (3,)
    assert hidden.shown(value, {}, (("mask",), 0, 1)) is value and hidden.shown([1], case, None) == [1]
