"""What padding masks hide is not compared, and everything else is."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import exported, parsed, pass_of, weights

from twinop.optimize import OptimizeReport, optimize, passes, segments
from twinop.optimize import graph as g

CHAIN = """(float[B, S, 32] x, int64[B, S] mask) => (float[B, S, 32] y OTHERS) {
    m = Cast <to = 1> (mask) u = Unsqueeze (m, last) a = MatMul (x, w0) b = Add (a, u) c = MatMul (b, w1)
    d = Mul (c, u) e = Sub (c, d) f = Add (d, e) z = MatMul (f, w2) y = Add (z, u)
    p = ReduceMax <keepdims = 0> (y, one) t = Transpose <perm = [1, 0, 2]> (y) }"""
CONSTANTS = {f"w{i}": weights(32, 32, seed=i) for i in range(3)}
CONSTANTS |= {"last": np.array([-1]), "one": np.array([1])}
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


def test_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a promise, masks hide each end, and attention shows that they do."""
    source = exported("bert", tmp_path)
    report = changed(source, monkeypatch, changing("hidden"))
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


def test_segments_on_inputs_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment that sees the mask, and what accumulates up to the outputs; "b" crosses."""
    monkeypatch.setattr(segments, "MOST_BYTES", 4200)
    mask = np.array([[1, 1, 1, 0, 0, 0], [1] * 6])
    np.savez(tmp_path / "given.npz", x=weights(2, 6, 32, seed=7), mask=mask)
    options: dict[str, Any] = {"padding": "right", "inputs_file": tmp_path / "given.npz"}
    report = changed(chain(tmp_path), monkeypatch, changing("hidden", "b"), **options)
    assert report.compared["segments"] == 3 and not report.reverted and NOTE in report.notes
    report = changed(chain(tmp_path), monkeypatch, changing("shown", "b"), **options)
    assert [*report.reverted] == ["changes"]
