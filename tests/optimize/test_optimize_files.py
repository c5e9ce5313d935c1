"""`twinop optimize` with files in unusual forms: what it reads and where it writes; and without torch."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import warm_python
from optimizing import joined, nodes, optimized, parsed, types, weights
from other_sizes import assert_same
from typer.testing import CliRunner

from twinop.cli import app
from twinop.errors import ExportError
from twinop.model import files
from twinop.model.attach import attach_bodies
from twinop.optimize import optimize

TEXT = "(float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }"


def external(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "old.onnx"
    onnx.save(model, path, save_as_external_data=True, location="old.data", size_threshold=0)
    return path


def message(source: Path, target: Path) -> str:
    with pytest.raises(ExportError) as error:
        optimize(source, target)
    return str(error.value)


def test_external_data_behind_links(tmp_path: Path) -> None:
    """Hugging Face's cache keeps the files elsewhere, under other names."""
    for file in (external(tmp_path, parsed(TEXT, w=weights(4, 3))), tmp_path / "old.data"):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / file.name).symlink_to(file.rename(tmp_path / "blobs" / file.suffix[1:]))
    report = optimize(tmp_path / "snapshot" / "old.onnx", tmp_path / "fast.onnx", device="cuda")
    assert report.fused == {"linear": 1}


def test_external_data_of_a_model_that_stays_as_it_is(tmp_path: Path) -> None:
    text = "(float[N, 4] x) => (float[N, 4] y) { y = Mul (x, w) }"
    source = external(tmp_path, parsed(text, w=weights(4)))
    (tmp_path / "new").mkdir()
    optimize(source, tmp_path / "new" / "fast.onnx", device="cuda")
    for file in (source, tmp_path / "old.data"):
        file.unlink()
    assert ort.InferenceSession(tmp_path / "new" / "fast.onnx").run(None, {"x": np.ones((1, 4), np.float32)})


def test_a_target_that_must_not_be_replaced(tmp_path: Path) -> None:
    source = external(tmp_path, parsed(TEXT, w=weights(4, 3)))
    assert "old.data: belongs to the input; name another" in message(source, tmp_path / "old.data")
    (tmp_path / "new.onnx").symlink_to("old.data")
    assert "new.onnx: belongs to the input" in message(source, tmp_path / "new.onnx")
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: is a pipe, a socket or a device; expected a new file" in message(source, tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s"))
        assert "is a pipe, a socket or a device" in message(source, tmp_path / "s")
    assert "File name too long. Name another file" in message(source, tmp_path / ("a" * 300))
    assert "no such file" in message(tmp_path / ("a" * 300), tmp_path / "other.onnx")
    assert "opens paths of UTF-8 only" in message(source, tmp_path / "\udcff")


def test_a_model_that_onnx_does_not_allow(tmp_path: Path) -> None:
    untyped = parsed(TEXT, w=weights(4, 3))
    untyped.graph.input[0].ClearField("type")
    sparse = parsed(TEXT)
    numbers, places = map(onnx.numpy_helper.from_array, (weights(2), np.arange(2)))
    numbers.name = "w"
    sparse.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(numbers, places, [4, 3]))
    for model, text in ((untyped, "input x has no type"), (sparse, "MatMul reads w, which is no graph")):
        onnx.save(model, tmp_path / "old.onnx")
        assert text in message(tmp_path / "old.onnx", tmp_path / "new.onnx")


def test_a_function_of_the_user(tmp_path: Path) -> None:
    """In twinop's domain, too. In 16 bits, it is converted like the graph."""
    body = "(a) => (b) { c = Cast <to=1> (a) d = Relu (c) e = Cast <to=TO> (d) b = Add (e, a) }"
    text = (
        """<ir_version: 10, opset_import: ["": 20, "custom_domain": 1]>
        g (KIND[N, 4] x) => (KIND[N, 3] y) { h = custom_domain.Mine (x) y = MatMul (h, w) }
        <domain: "custom_domain", opset_import: ["": 20]> Mine"""
        + body
    )
    for kind, dtype in (("float", ir.DataType.FLOAT), ("float16", ir.DataType.FLOAT16)):
        proto = onnx.parser.parse_model(text.replace("KIND", kind).replace("TO", str(dtype.value)))
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights(4, 3).astype(dtype.numpy()), "w"))
        report, model = optimized(proto, tmp_path)
        assert report.fused == {"linear": 1} and not nodes(model, "Mine")
        assert model.graph.inputs[0].dtype is dtype
        assert {key[1] for key in model.functions} == {"CustomLinear"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_optimised_model_again(dtype: str, tmp_path: Path) -> None:
    text = "(float[N, 64] x) => (float[N, 64] y) { a = MatMul (x, w) b = Relu (a) y = Mul (b, s) }"
    _, first = optimized(parsed(text, w=weights(64, 64), s=weights(64)), tmp_path, dtype=dtype)
    again = tmp_path / "again.onnx"
    assert optimize(tmp_path / "fast.onnx", again).dtype == dtype
    assert types(ir.load(again)) == types(first) and len(ir.load(again).functions) == 1


def test_ir_version_3(tmp_path: Path) -> None:
    """All of its initializers are inputs, which ONNX Runtime takes as constants."""
    text = "(float[N, 4] x, float[4, 3] w) => (float[N, 3] y) { y = MatMul (x, w) }"
    proto = parsed(text, 8, 3, w=weights(4, 3))
    report, model = optimized(proto, tmp_path)
    assert report.fused == {"linear": 1} and [value.name for value in model.graph.inputs] == ["x"]
    assert report.notes == ["IR version 3: its 1 initializers are constants, as in ONNX Runtime"]
    assert ort.InferenceSession(tmp_path / "fast.onnx").run(None, {"x": np.ones((1, 4), np.float32)})

    proto.ir_version = 4
    report, model = optimized(proto, tmp_path)
    assert [value.name for value in model.graph.inputs] == ["x", "w"] and not report.notes


def test_a_file_that_only_onnx_refuses_stays_as_it_is(tmp_path: Path) -> None:
    """Constants of opset 8 are floats. ONNX Runtime takes others, too."""
    text = "(bool[4] x) => (bool[4] y) { c = Constant <value = bool[1] {1}> () y = And (x, c) }"
    proto = parsed(text, 8, 4)
    report, model = optimized(proto, tmp_path, device="cpu")
    assert report.same and [node.op_type for node in model.graph] == ["Constant", "And"]


def test_a_file_in_16_bits_that_crashes_onnxruntime_is_said_to(tmp_path: Path) -> None:
    """ONNX Runtime 1.31.1 crashes on a matmul of what was transposed. Only the fp32 form is compared."""
    nodes = "t = Transpose <perm = [1, 0, 2]> (x) y = MatMul (t, w)"
    text = f"(float16[N, M, 4] x) => (float16[M, N, 3] y) {{ {nodes} }}"
    report, _ = optimized(parsed(text, w=weights(4, 3).astype(np.float16)), tmp_path, device="cpu")
    [note] = report.notes
    assert report.same and "the original: " in note and "crashes (SIGSEGV) when it optimizes" in note


def test_the_other_name_of_the_standard_domain(tmp_path: Path) -> None:
    proto = parsed("(float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }", w=weights(4, 3))
    proto.opset_import[0].domain = "ai.onnx"
    _, model = optimized(proto, tmp_path)
    assert types(model) == {"CustomLinear": 1} and "ai.onnx" not in model.opset_imports
    proto = parsed("(float[N, 4] x) => (float[N, 4] y) { y = custom_domain.CustomRelu (x) }")
    proto.opset_import[0].domain = "ai.onnx"
    assert [function.name for function in attach_bodies(proto).functions] == ["CustomRelu"]


def test_imports_and_functions_that_onnx_runtime_does_not_need(tmp_path: Path) -> None:
    """Domains without an import have the newest version. A function that no node calls goes."""
    text = """<ir_version: 10, opset_import: ["": 17]>
    g (float[N, 4] x) => (float[N, 4] y) { a = ai.onnx.ml.LabelEncoder <keys_floats: floats = [1.0],
      values_floats: floats = [2.0]> (x) y = com.microsoft.Gelu (a) }
    <domain: "mine", opset_import: ["": 17]> Unused (a) => (b) { b = Relu (a) }"""
    _, model = optimized(onnx.parser.parse_model(text), tmp_path)
    assert types(model) == {"LabelEncoder": 1, "CustomGelu": 1} and model.opset_imports["ai.onnx.ml"] > 1
    assert {key[1] for key in model.functions} == {"CustomGelu"}


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_an_output_without_a_shape(dtype: str | None, tmp_path: Path) -> None:
    """onnx.checker wants one, and ONNX's inference has none for this node."""
    text = "(float[N, 4, 6] x) => (float[N, 4, 6] y) { y = GroupNormalization <num_groups=2> (x, s, s) }"
    proto = parsed(text, 21, s=weights(4))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    _, model = optimized(proto, tmp_path, dtype=dtype)
    assert len(model.graph.outputs[0].shape or ()) == 3


def test_sizes_of_minus_one_are_unknown_and_nodes_have_no_order(tmp_path: Path) -> None:
    proto = parsed("(float[N, 4] x) => (float[N, 3] y) { y = Relu (h) h = MatMul (x, w) }", w=weights(4, 3))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    _, model = optimized(proto, tmp_path)
    assert types(model) == {"CustomLinear": 1} and model.graph.inputs[0].shape == ir.Shape(["x_0", 4])


def test_what_a_model_and_an_output_say_of_themselves_is_kept(tmp_path: Path) -> None:
    proto = parsed(TEXT, w=weights(4, 3))
    proto.model_version = 0  # without it ONNX Runtime shows the largest number
    proto.graph.output[0].doc_string = "logits"
    proto.graph.output[0].metadata_props.add(key="unit", value="nat")
    _, model = optimized(proto, tmp_path)
    assert model.graph.outputs[0].doc_string == "logits" and model.model_version == 0
    assert model.graph.outputs[0].metadata_props == {"unit": "nat"}


@pytest.mark.parametrize("rank", [0, 1])
def test_inputs_with_a_value_take_other_sizes(rank: int, tmp_path: Path) -> None:
    """As adapters do: they come as empty matrices, or small ones, which a call replaces."""
    text = """(float[N, 4] x, float[4, R] a, float[R, 4] b) => (float[N, 4] y) {
        h = Relu (x) p = MatMul (h, a) q = MatMul (p, b) z = Add (h, q) y = Sigmoid (z) }"""
    arrays = {"a": np.zeros((4, rank), np.float32), "b": np.zeros((rank, 4), np.float32)}
    optimized(parsed(text, **arrays), tmp_path)
    assert_same(tmp_path, x=(2, 4))
    assert_same(tmp_path, x=(2, 4), a=(4, 3), b=(3, 4))


OVERRIDDEN: Any = {  # what computes, an initializer that is an input, and another value of it
    "times 1": ("a = Mul (x, s)", "float", 1.0, 3.0),
    "over 1": ("a = Div (x, s)", "float", 1.0, 3.0),
    "plus 0": ("a = Add (s, x)", "float", 0.0, 3.0),
    "minus 0": ("a = Sub (x, s)", "float", 0.0, 3.0),
    "bound": ("b = Max (x, low) a = Max (b, s)", "float", -1.0, 0.5),
    "clip": ("b = Relu (x) a = Clip (b, s)", "float", 0.0, 0.5),
    "Gemm": ("a = Gemm (x, square, s)", "float[8]", np.zeros(8), np.ones(8)),
    "Conv": ("c = Unsqueeze (x, last) d = Conv (c, cube, s) a = Squeeze (d, last)",
             "float[8]", np.zeros(8), np.ones(8)),
    "weight": ("a = MatMul (x, s)", "float[8, 8]", np.eye(8), weights(8, 8)),
    "norm": ("a = LayerNormalization (x, s)", "float[8]", np.ones(8), weights(8)),
    "reshape": ("b = Reshape (x, s) a = ReduceSum (b, first)", "int64[2]", [-1, 8], [-1, 4]),
    "slice": ("b = Slice (x, s, end, last) a = ReduceSum <keepdims=1> (b, last)", "int64[1]", [0], [4]),
    "dropout": ("a, m = Dropout (x, s) ", "float", 0.0, 0.5),
    "sizes": ("b = Expand (x, s) a = ReduceSum <keepdims=0> (b, first)", "int64[3]", [1, 1, 8], [2, 1, 8]),
}  # fmt: skip


def overridden(name: str) -> onnx.ModelProto:
    """A model with an initializer s that is an input."""
    text, kind, default, _ = OVERRIDDEN[name]
    arrays: dict[str, Any] = {"low": np.float32(-2), "square": weights(8, 8), "cube": weights(8, 8, 1)}
    arrays |= {"last": np.array([-1]), "end": np.array([8]), "first": np.array([0]), "w": weights(8, 8)}
    arrays["s"] = np.array(default, np.int64 if kind.startswith("int") else np.float32)
    proto = parsed(f"(float[8, 8] x, {kind} s) => (float[M, N] y) {{ {text} y = MatMul (a, w) }}", **arrays)
    if name in ("slice", "reshape", "sizes"):
        proto.graph.node[-1].CopyFrom(onnx.helper.make_node("Relu", ["a"], ["y"]))
    return proto


@pytest.mark.parametrize(("device", "dtype"), [("cuda", None), ("cuda", "float16"), ("cpu", None)])
def test_initializers_that_are_inputs_stay(device: str, dtype: str | None, tmp_path: Path) -> None:
    proto = joined({name: overridden(name) for name in OVERRIDDEN})
    _, model = optimized(proto, tmp_path, device=device, dtype=dtype)
    given = {f"{name}/s" for name in OVERRIDDEN}
    assert given <= {str(value.name) for value in model.graph.inputs} and given <= {*model.graph.initializers}
    x = {f"{name}/x": weights(8, 8, seed=3) for name in OVERRIDDEN}
    others = {
        f"{name}/s": np.array(other, np.int64 if kind.startswith("int") else np.float32)
        for name, (_, kind, _, other) in OVERRIDDEN.items()
    }
    for feeds in (x, x | others):
        assert_same(tmp_path, 1e-5, 2e-2 if dtype else 1e-5, **feeds)


def test_an_input_that_is_an_output(tmp_path: Path) -> None:
    text = "(float[N, 4] x) => (float[N, 3] y, float[N, 4] x) { y = MatMul (x, w) }"
    for dtype in (None, "float16"):
        _, model = optimized(parsed(text, w=weights(4, 3)), tmp_path, dtype=dtype)
        assert model.graph.outputs[1] is model.graph.inputs[0] and model.graph.inputs[0].name == "x"
        assert model.graph.inputs[0].dtype is ir.DataType[(dtype or "float").upper()]


@pytest.mark.parametrize(
    ("domain", "name", "kept", "opset"),
    [
        ("com.microsoft", "QuickGelu", "QuickGelu", 20),
        ("com.microsoft", "QuickGelus", "Neg", 17),
        ("ai.onnx.ml", "Binarizer", "Binarizer", 17),
        ("", "Abs", "Abs", 20),
    ],
)
def test_function_named_as_an_op(domain: str, name: str, kept: str, opset: int, tmp_path: Path) -> None:
    """ONNX Runtime ignores the body where it has an op of that name itself."""
    op = f"{domain}.{name}" if domain else name
    text = f"(float[N, 8] x) => (float[N, 3] y) {{ a = {op} (x) y = MatMul (a, w) }}"
    proto = parsed(text, opset, w=weights(8, 3))
    proto.opset_import.extend([onnx.helper.make_opsetid(domain, 1)] if domain == "ai.onnx.ml" else [])
    body = [onnx.helper.make_node("Neg", ["x"], ["y"])]
    opsets = [onnx.helper.make_opsetid("", opset)]
    proto.functions.append(onnx.helper.make_function(domain, name, ["x"], ["y"], body, opsets))
    report, model = optimized(proto, tmp_path)
    assert report.fused == {"linear": 1} and kept in types(model)
    assert all(key[0] == "custom_domain" for key in model.functions)


def test_a_function_of_another_opset(tmp_path: Path) -> None:
    """ONNX Runtime reads it as one of the model's: until opset 12 this is a softmax over two axes."""
    body = '<domain: "l", opset_import: ["": 12]> F (a) => (b) { b = Softmax (a) }'
    text = f"(float[N, 3, 8] x) => (float[N, 3, 4] y) {{ a = l.F (x) y = MatMul (a, w) }} {body}"
    proto = parsed(text, w=weights(8, 4))
    proto.opset_import.append(onnx.helper.make_opsetid("l", 1))
    report, _ = optimized(proto, tmp_path)
    assert report.notes == ["l::F: read as opset 20, not 12, as in ONNX Runtime"] and report.fused
    assert_same(tmp_path, 1e-6, 1e-5, x=weights(2, 3, 8))


SHARED_NAMES = {
    "If": """t = If (c) <
        then_branch = a () => (float[K] o) { r = Relu (h) s = Shape (r) f = Reshape (r, minus) o = Neg (f) },
        else_branch = b () => (float[K] o) { r = Reshape (h, minus) s = Shape (r) f = Reshape (r, s)
            o = Tanh (f) }>""",
    "Loop": """u = Loop (three, , h) <body = l (int64 i, bool m, float[N, 4] r) => (bool go, float[N, 4] o) {
        go = Identity (m) s = Shape (r) o = Tanh (r) }> f0 = Reshape (u, minus)
        t = Loop (three, , f0) <body = l2 (int64 i, bool m, float[K] r) => (bool go, float[K] o) {
        go = Identity (m) s = Shape (r) f = Reshape (r, s) o = Neg (f) }>""",
    "nested": """t = If (c) < then_branch = a () => (float[K] o) {
        o = If (c) <then_branch = d () => (float[K] q) { r = Relu (h) q = Reshape (r, minus) },
        else_branch = e () => (float[K] q) { r = Shape (h) f = Cast <to=1> (r) q = Neg (f) }> },
        else_branch = b () => (float[K] o) { r = Cast <to=11> (h) q = Cast <to=1> (r)
        o = Reshape (q, minus) }>""",
    "initializers": """t = If (c) <
        then_branch = a () => (float[K] o) <int64[1] r = {-1}> { f = Neg (h) o = Reshape (f, r) },
        else_branch = b () => (float[K] o) <float[4] r = {1, 2, 3, 4}> { f = Mul (h, r)
            o = Reshape (f, minus) }>""",
}


@pytest.mark.parametrize("body", SHARED_NAMES.values(), ids=SHARED_NAMES)
def test_values_of_one_name_in_several_graphs(body: str, tmp_path: Path) -> None:
    """They may have other ranks and dtypes, as in optimum's merged decoders."""
    text = f"(float[N, 4] x, bool c) => (float[K] y) {{ h = MatMul (x, w) {body} y = Identity (t) }}"
    given = {"w": weights(4, 4), "minus": np.array([-1]), "three": np.array(3)}
    report, _ = optimized(parsed(text, **given), tmp_path)
    assert report.fused == {"linear": 1}
    for choice in (True, False):
        assert_same(tmp_path, 1e-5, 1e-6, x=(3, 4), c=np.array(choice))


def test_sequences(tmp_path: Path) -> None:
    """Sequences as outputs are compared."""
    given = parsed("(seq(float[N, 4]) x, int64 i) => (float[N, 4] y) { y = SequenceAt (x, i) }")
    optional = parsed("(optional(float[N, 4]) x) => (float[N, 4] y) { y = OptionalGetElement (x) }")
    for proto in (given, optional):
        onnx.save(proto, tmp_path / "old.onnx")
        said = message(tmp_path / "old.onnx", tmp_path / "new.onnx")
        assert "input x is " in said and "twinop reads tensors only" in said
    text = "(float[N, 4] x) => (seq(float[N, 3]) y) { a = MatMul (x, w) y = SequenceConstruct (a, a) }"
    report, _ = optimized(parsed(text, w=weights(4, 3)), tmp_path)
    assert report.fused
    text = """(float[N, 6] x, int64 n) => (seq(float[N, M]) y) {
        o = Constant <value_int = 1> () a = MatMul (x, w) m = Max (n, o)
        y = SplitToSequence <axis=1> (a, m) }"""
    report, _ = optimized(parsed(text, w=weights(6, 3)), tmp_path)  # onnxscript fails on such a node
    assert report.fused


def test_names_that_are_not_text(tmp_path: Path) -> None:
    raw = parsed("(float[N, 4] x) => (float[N, 4] qqqq) { qqqq = Relu (x) }").SerializeToString()
    (tmp_path / "old.onnx").write_bytes(raw.replace(b"qqqq", b"\xff\xfe\xff\xfe"))
    assert "is not UTF-8. Copy or export it again" in message(tmp_path / "old.onnx", tmp_path / "new.onnx")


@pytest.mark.parametrize("limit", [0, 10**9])
def test_weights_are_written_once(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was compared is the result."""
    monkeypatch.setattr("twinop.model.weights.LARGE", 0)
    saved = list[Path]()

    def save(model: ir.Model, path: Path, external_data_bytes: int) -> list[Path]:
        saved.append(path)
        return files.save(model, path, limit)

    monkeypatch.setattr("twinop.optimize.optimizer.save", save)
    source = external(tmp_path, parsed(TEXT, w=weights(4, 3)))
    report = optimize(source, tmp_path / "fast.onnx", device="cuda")
    assert len(saved) == 1 and report.fused == {"linear": 1}
    assert len([*tmp_path.glob("fast.*.data")]) == (limit == 0)
    assert_same(tmp_path, x=(2, 4))


@pytest.mark.parametrize(("gpu", "device", "other"), [(False, "cpu", "cuda"), (True, "cuda", "cpu")])
def test_device(gpu: bool, device: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for CUDA takes longer on a CPU. The last line of the report says which one it is for."""
    monkeypatch.setattr("twinop.optimize.optimizer.has_gpu", lambda: gpu)
    onnx.save(parsed(TEXT, w=weights(4, 3)), tmp_path / "old.onnx")
    report = optimize(tmp_path / "old.onnx", tmp_path / "new.onnx")
    assert report.device == device and ("linear" in report.fused) == gpu
    said = f"  optimised for {device}; device='{other}' optimises it for {other}"
    assert str(report).splitlines()[-1] == said
    asked = optimize(tmp_path / "old.onnx", tmp_path / "new.onnx", device=other)
    assert str(asked).splitlines()[-1].startswith(f"  optimised for {other}; ")
    half = optimize(tmp_path / "old.onnx", tmp_path / "new.onnx", dtype="float16", invariant=True)
    assert half.device == "cuda"  # the only one with that promise


@pytest.mark.parametrize(("command", "kilobytes"), [("optimize", 9), ("pack --genai", 1), ("pack", 9)])
def test_a_limit_of_file_sizes_is_no_defect(command: str, kilobytes: int, tmp_path: Path) -> None:
    """As a full disk, wherever it is met: one message, exit code 1, and nothing is left."""
    source = tmp_path / "in"
    source.mkdir()
    text = "(float[N, 64] x) => (float[N, 64] y) { a = MatMul (x, w) y = Relu (a) }"
    onnx.save(parsed(text, w=weights(64, 64)), source / "model.onnx")
    (source / "genai_config.json").write_text('{"model": {"decoder": {"filename": "model.onnx"}}}')
    given = source if "genai" in command else source / "model.onnx"
    device = [] if command == "pack" else ["--device", "cpu"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, hard))
    try:
        line = [*command.split(), str(given), "-o", str(tmp_path / "out"), *device]
        done = CliRunner().invoke(app, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.exit_code == 1 and "cannot be written: " in done.output, done.output
    assert "File too large" in done.output and "defect" not in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


WITHOUT = """
import sys
from twinop.optimize import optimize
print(optimize(*sys.argv[1:], device="cpu").fused)
assert "torch" not in sys.modules
"""


def test_without_torch(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    text = "(float[2, 8] x) => (float[2, 8] y) { s = Sigmoid (x) g = Mul (x, s) y = Mul (g, x) }"
    onnx.save(parsed(text), source)
    command = [sys.executable, "-c", WITHOUT, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "swiglu" in done.stdout, done.stderr
    assert [node.op_type for node in onnx.load(target).graph.node] == ["CustomSwiglu"]


ENDS = (
    ("comparing with the original", signal.SIGINT),
    ("running all segments", signal.SIGTERM),
)
_KILLED_AT = """
import os, signal, sys
from functools import partial
from twinop.optimize import optimize, segments, verifier
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
verifier.cut = partial(segments.cut, most_bytes=100)
def progress(step, done=0, total=0):
    if step.startswith(sys.argv[3]):
        os.kill(os.getpid(), int(sys.argv[4]))
try:
    optimize(sys.argv[1], sys.argv[2], device="cpu", progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def write_model(folder: Path) -> Path:
    """Writes a model whose weights lie in a file of their own."""
    folder.mkdir()
    text = """(float[N, 64] x) => (float[N, 64] y) {
        a = MatMul (x, w0) b = LayerNormalization <axis = -1> (a, g)
        c = MatMul (b, w1) d = LayerNormalization <axis = -1> (c, g) y = Neg (d) }"""
    given = {f"w{i}": weights(64, 64, seed=i) / 8 for i in range(2)} | {"g": np.ones(64, np.float32)}
    proto, path = parsed(text, **given), folder / "model.onnx"
    onnx.save(proto, path, location="model.data", save_as_external_data=True, size_threshold=256)
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_ends_at_a_step(tmp_path: Path) -> None:
    """Each over the file of an earlier run. Ctrl-C leaves nothing at all."""
    source, target = write_model(tmp_path / "source"), tmp_path / "new/fast.onnx"
    given = files_in(source.parent)

    def run(at: str, how: int) -> int:
        return warm_python.run(["-c", _KILLED_AT, source, target, at, str(how)]).returncode

    target.parent.mkdir()
    optimize(source, target, device="cpu")
    whole = files_in(target.parent)
    for step, how in ENDS:
        assert run(step, int(how)) == {signal.SIGTERM: -15, signal.SIGINT: 130}[how], step
        found = files_in(target.parent)
        assert {name: found.get(name) for name in whole} == whole  # the target, and its data
        assert how == signal.SIGTERM or found == whole
    optimize(source, target, device="cpu")
    assert files_in(target.parent) == whole  # and no folder of an interrupted run
    assert files_in(source.parent) == given
