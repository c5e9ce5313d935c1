"""Tests of `twinop optimize` with input that is wrong: each message, and that no file is written."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from optimizing import parsed, pass_of, refusal, reported, weights
from typer.testing import CliRunner

from twinop.cli import app
from twinop.deploy import ort_runs
from twinop.deploy.ort_runs import Answer
from twinop.errors import ExportError
from twinop.export import export
from twinop.optimize import (
    OptimizeReport,
    comparison,
    equivalence,
    norms,
    optimize,
    passes,
    segments,
    verifier,
)
from twinop.optimize import graph as g

TEXT = "(float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parsed(TEXT, w=weights(4, 3)), tmp_path / "old.onnx")
    return tmp_path / "old.onnx"


def refused(source: Path, target: Path, **options: Any) -> str:
    with pytest.raises(ExportError) as error:
        optimize(source, target, **options)
    assert source == target or target.is_dir() or not target.exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "expected one of: float32, float16, bfloat16, float8"),
        ({"device": "tpu"}, "device='tpu': expected one of: cuda, cpu"),
        ({"padding": "left"}, "padding='left': expected right"),
        ({"without": ["linaer"]}, "without='linaer': expected some of: dequantize, unfuse_ort, einsum"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    assert message in refused(model, tmp_path / "new.onnx", **options)


def test_wrong_places(model: Path, tmp_path: Path) -> None:
    assert "belongs to the input; name another file" in refused(model, model)
    assert "is a folder; expected a file name" in refused(model, tmp_path)
    assert ".: is a folder; expected a file name such as model.onnx" in refused(model, Path())
    assert "a folder, not an .onnx file" in refused(tmp_path, tmp_path / "new.onnx")
    assert "cannot be written" in refused(model, tmp_path / "none" / "new.onnx")


def test_files_that_a_session_refuses(tmp_path: Path) -> None:
    """They are checked as there; weights may lie nowhere but beside the model."""
    (tmp_path / "in").mkdir()
    path, data = tmp_path / "in" / "old.onnx", tmp_path / "in" / "old.data"
    proto = parsed(TEXT, w=weights(4, 3))
    onnx.save(proto, path, save_as_external_data=True, location=data.name, size_threshold=0)
    data.write_bytes(b"x" * 10)
    assert "old.data is cut short (tensor w). Copy it again" in refused(path, tmp_path / "new.onnx")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../old.data"
    proto.graph.initializer[0].external_data[2].value = "10"
    path.write_bytes(proto.SerializeToString())
    data.rename(tmp_path / "old.data")
    assert "in ../old.data, outside of the model's folder. Put" in refused(path, tmp_path / "new.onnx")
    (tmp_path / "old.data").unlink()
    assert "old.data is missing (tensor w). Copy it again" in refused(path, tmp_path / "new.onnx")
    path.write_bytes(b"no model")
    assert "old.onnx: not a complete ONNX model" in refused(path, tmp_path / "new.onnx")


def test_a_node_that_no_cpu_runs_needs_no_other_inputs(tmp_path: Path) -> None:
    """Experts with a third matmul, as Mixtral's: ONNX Runtime only says so when they run."""
    text = """(float[N, 8] x, float[N, 2] r) => (float[N, 8] y) {
        y = com.microsoft.MoE <activation_type = "silu", k = 1> (x, r, a, "", b, "", a) }"""
    said = refusal(parsed(text, a=weights(2, 16, 8), b=weights(2, 8, 16)), tmp_path)
    assert "the original cannot be run on the CPU" in said and "MoE" in said and "inputs" not in said


def test_values_without_a_dtype_cannot_be_converted(tmp_path: Path) -> None:
    """Shape inference does not know nodes of others."""
    text = """(float[N, 4, 4] x) => (float[N, 4, 4] y) {
        a = MatMul (x, w) b = com.microsoft.Trilu (a) y = MatMul (b, w) }"""
    said = refusal(parsed(text, w=weights(4, 4)), tmp_path, dtype="bfloat16")
    assert "dtype='bfloat16': the dtypes of some values are not known" in said and "value_info" in said


def test_inputs(model: Path, tmp_path: Path) -> None:
    given = tmp_path / "inputs.npz"
    given.write_bytes(b"none")
    assert "cannot be read as .npz" in refused(model, tmp_path / "new.onnx", inputs_file=given)
    np.savez(given, z=np.zeros(3))
    assert "has z; the model also takes x" in refused(model, tmp_path / "new.onnx", inputs_file=given)


def test_inputs_that_break_a_promise(tmp_path: Path) -> None:
    text = """(float[N, T, 4] x, float[N, T] mask) => (float[N, T, 4] y) {
        m = Unsqueeze (mask, axis) y = Mul (x, m) }"""
    given, mask = tmp_path / "inputs.npz", np.array([[0, 1, 1]], np.float32)
    np.savez(given, x=np.ones((1, 3, 4), np.float32), mask=mask)
    said = refusal(parsed(text, axis=np.array([2])), tmp_path, inputs_file=given, padding="right")
    assert "a mask hides the first token of a sequence, and padding='right' promises" in said


@pytest.mark.parametrize(
    ("text", "opset", "message"),
    [
        ("r = RandomNormalLike (x) a = Add (x, r) y = MatMul (a, w)", 20, "random numbers (RandomNormalLike"),
        ("d = Dropout (x, half, yes) y = MatMul (d, w)", 20, "draws random numbers (Dropout)"),
        ("d = Dropout (x, half, t) y = MatMul (d, w)", 20, "draws random numbers (Dropout)"),
        ('c = Relu (x) y = Resize <mode="nearest"> (c, third)', 10, "converts opset 10, which may change it"),
    ],
)
def test_results_that_differ_without_any_rewrite(text: str, opset: int, message: str, tmp_path: Path) -> None:
    constants = {"half": np.float32(0.5), "yes": np.array(True), "third": np.array([1, 0.4], np.float32)}
    text = f"(float[3, 8] x, bool t) => (float[3, N] y) {{ {text} }}"
    model = parsed(text, opset, w=weights(8, 4), **constants)
    assert message in refusal(model, tmp_path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    proto = parsed("(float[4] x) => (float[4] y) { y = Relu (x) y = Neg (x) }")
    assert "cannot read it: Output 'y' is redeclared in the current graph scope" in refusal(proto, tmp_path)
    del proto.graph.node[1:]
    proto.graph.initializer.add(name="t", data_type=77, dims=[1])
    assert "cannot read it: 77 is not a valid DataType. Check" in refusal(proto, tmp_path)
    del proto.graph.initializer[:]
    proto.graph.output[0].type.map_type.key_type = onnx.TensorProto.STRING  # of a ZipMap
    assert "zipmap=False" in refusal(proto, tmp_path)


@pytest.mark.parametrize("rows", [4, 600])  # ONNX Runtime takes the last small one, and the first large one
def test_initializers_of_one_name(rows: int, tmp_path: Path) -> None:
    """The same one twice is one."""
    model = parsed(TEXT.replace("[N, 4]", f"[N, {rows}]"), w=weights(rows, 3))
    model.graph.initializer.append(model.graph.initializer[0])
    assert reported(model, tmp_path).fused == {"linear": 1}
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weights(rows, 3, seed=1), "w"))
    assert "two initializers w of other" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(int64[N] ids) => (float[N, 4] y) { y = Gather (t, ids) }", "index into a table without rows"),
        ("(float x) => (float y) { y = MatMul (x, w) }", "input x has no shape.*export the model again"),
        ("(float[N, 4] x) => (float[N, 4] y) { y = Reshape (x, shape) }", "generated inputs.*inputs_file"),
        ("(float[N, 4] x) => (float[N, 4] y) { y = their.domain.Theirs (x) }", "Theirs"),
        ("(float[N, 4] x) => (float[N, 4] y) { z = Relu (x) }", "the model returns y, which is no graph"),
        ("(float[4] x) => (float[4] y, float[4] y) { y = Neg (x) }", "y is listed twice; list it once"),
    ],
)
def test_models_that_are_refused(text: str, said: str, tmp_path: Path) -> None:
    given = {"t": np.zeros((0, 4), np.float32), "shape": np.array([1000, 4]), "w": weights(4, 3)}
    proto = parsed(text, **{name: array for name, array in given.items() if re.search(rf"\W{name}\b", text)})
    proto.opset_import.append(onnx.helper.make_opsetid("their.domain", 1))
    if "no shape" in said:
        proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert re.search(said, refusal(proto, tmp_path))


@pytest.mark.parametrize(("device", "op"), [("cpu", "MatMul"), ("cpu", "Add"), ("cuda", "Add")])
def test_nothing_recognised(device: str, op: str, tmp_path: Path) -> None:
    """The file is the original, and that is not an error. The report says that the CPU gains nothing."""
    text = f"(float[2, 2] x) => (float[2, 2] y) {{ a = Identity (x) y = {op} (a, w) }}"
    onnx.save(parsed(text, w=weights(2, 2)), tmp_path / "old.onnx")
    line = ["optimize", str(tmp_path / "old.onnx"), "-o", str(tmp_path / "new.onnx"), "--device", device]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "nothing was fused: the file is the original" in result.output
    assert ("  nothing gained: ONNX Runtime runs the original as fast" in result.output) == (device == "cpu")
    assert [node.op_type for node in onnx.load(tmp_path / "new.onnx").graph.node] == ["Identity", op]


def test_export_optimises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, as the command does; a file that cannot be optimised is written as it is."""
    layers, given, path = torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(2, 4), tmp_path / "net.onnx"
    options: dict[str, Any] = {"exporter": "torchscript", "dynamic": {"input": [0]}, "device": "cuda"}
    said = "optimised for ONNX Runtime; optimize=False keeps the exporter's nodes"
    report = export(layers, given, path, **options, optimize=False)
    assert list(report.nodes) == ["Gemm"] and report.optimized is None and said not in report.notes
    report = export(layers.bfloat16(), given.bfloat16(), path, **options)
    assert report.optimized is not None and report.optimized.fused == {"linear+bias": 1}
    assert said in report.notes
    assert list(report.nodes) == ["custom_domain.CustomLinear"] and report.custom_ops == ["CustomLinear"]
    assert [node.op_type for node in onnx.load(path).graph.node] == ["CustomLinear"]
    assert export(layers.float(), given, path, bodies=False, **options).optimized is None
    with pytest.raises(ExportError, match="optimising needs function bodies"):
        export(layers, given, path, optimize=True, bodies=False, **options)

    for error, note in (
        (ExportError("it cannot be read"), "not optimised: it cannot be read"),
        (KeyError("x"), "not optimised: KeyError: 'x'; this is a defect of twinop, please report it"),
    ):
        monkeypatch.setattr("twinop.optimize.source.load", Mock(side_effect=error))
        report = export(layers, given, path, optimize=True, **options)
        assert report.optimized is None and report.notes[-1] == note
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Gemm"]
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


@pytest.fixture
def segmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts small models, too."""
    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 100)
    monkeypatch.setattr(verifier, "cut", partial(segments.cut, most_bytes=100))


def layers(folder: Path, op: str, **given: Any) -> OptimizeReport:
    """Optimises four layers of one kind."""
    nodes = [f"a{i} = MatMul (h{i}, w{i}) h{i + 1} = {op} (a{i})" for i in range(4)]
    given = {f"w{i}": weights(8, 8, seed=i) for i in range(4)} | given
    return reported(parsed(f"(float[N, 8] h0) => (float[N, 8] h4) {{ {' '.join(nodes)} }}", **given), folder)


def wrong(work: Any) -> None:
    for node in work.nodes("Relu"):
        node.op_type = "Neg"


def unloadable(work: Any) -> None:
    for node in work.nodes("Relu"):
        node.op_type = "GlobalLpPool"


@pytest.mark.parametrize("broken", [wrong, unloadable])
def test_a_wrong_rewrite_is_reverted(broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", [norms.Norms, pass_of("broken", broken), *passes.PASSES[5:]])
    text = "(float[N, 4, 4, 4] x) => (float[N, 4, 4, 4] y) { a = Relu(x) b = MatMul(a, w) y = Identity(b) }"
    report = reported(parsed(text, w=weights(4, 4)), tmp_path)
    assert list(report.reverted) == ["broken"] and report.fused == {"linear": 1}
    assert "this is a defect of twinop" in report.reverted["broken"] and "reverted: broken" in str(report)


@pytest.mark.parametrize("most_bytes", [100, 1 << 20])
def test_a_failing_one_is_reverted(most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing has been compared yet: a model of several segments."""

    def fails(work: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", most_bytes)
    monkeypatch.setattr(passes, "PASSES", [pass_of("other", fails)])
    text = "(float[N, 8] x) => (float[N, 8] y) { a = MatMul (x, w) b = Relu (a) y = MatMul (b, v) }"
    proto = parsed(text, w=weights(8, 8), v=weights(8, 8, seed=1))
    report = reported(proto, tmp_path, device="cpu")
    assert report.reverted == {"other": "fails: KeyError: 'x': this is a defect of twinop, please report it"}


def test_an_output_of_nothing_in_a_known_layer(tmp_path: Path, segmented: None) -> None:
    """The last layer is not compared on other inputs: its weights alone differ."""
    report = layers(tmp_path, "Tanh", w3=np.full((8, 8), np.nan, np.float32))
    assert report.fused == {"linear": 4}
    assert report.notes == ["output h4 has no finite number for any of the inputs: it was not compared"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_rewrite_that_only_fails_in_the_written_file_is_reverted(
    is_seen: bool, tmp_path: Path, segmented: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one kind: one is compared before it is written. Its bytes show it, or that it runs."""

    def damages(work: Any) -> None:
        weight = work.op_nodes("linear")[2].inputs[1]
        changed = np.array(weight.const_value.numpy())
        changed[0, 0] *= -1.5
        weight.const_value = ir.tensor(changed)

    def harmless(work: Any) -> None:
        for node in work.nodes("Relu"):
            node.replace_input_with(0, g.add(node, "Identity", [node.inputs[0]]))

    if not is_seen:
        monkeypatch.setattr(verifier, "check_weights", lambda *given: [])
    rewrites = [pass_of("harmless", harmless), *passes.PASSES, pass_of("damages", damages)]
    monkeypatch.setattr(passes, "PASSES", rewrites)
    report = layers(tmp_path, "Relu")
    assert [*report.reverted] == ["damages"] and report.fused == {"linear": 4}, report
    said = "differs in layer 3 of 4" if is_seen else "layer 3 of 4"
    assert f"the written model {said}" in report.reverted["damages"]
    monkeypatch.setattr(passes, "PASSES", [*rewrites, pass_of("again", damages)])
    said = refused(tmp_path / "old.onnx", tmp_path / "other.onnx", device="cuda")
    assert "layer 3 of 4" in said and "this is a defect of twinop" in said


def test_a_runtime_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as MatMulNBits with blocks of 512 in ONNX Runtime 1.23, which reads other memory each time."""
    numbers = itertools.count()

    def run(*args: Any, **options: Any) -> Answer:
        answer = ort_runs.run(*args, **options)
        return replace(answer, outputs=[[y + next(numbers) for y in ys] for ys in answer.outputs])

    for module in (equivalence, comparison):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(passes, "PASSES", [pass_of("other", wrong)])
    said = refusal(parsed("(float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"), tmp_path, device="cpu")
    assert "the model without any rewrite differs" in said and "it may be rounding, or ONNX Runtime" in said
