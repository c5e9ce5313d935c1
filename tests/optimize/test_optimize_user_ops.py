"""`twinop optimize` keeps a user's own ops: their nodes, types and function bodies."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser
from optimizing import nodes, weights

from twinop import deploy
from twinop.building.builder import build
from twinop.building.project import Options, find_project
from twinop.errors import ExportError
from twinop.optimize import OptimizeReport, optimize

HEADER = """
#pragma once
#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"

namespace twinop {

template <class F>
Status EachFloat(const Call& call, F&& f, int outputs = 1) {
  const Tensor& x = call.inputs[0];
  return DispatchFloat(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for (std::int64_t i = 0; i < x.numel; ++i) {
      auto value = f(ToCompute(x.as<const T>()[i]));
      for (int out = 0; out < outputs; ++out)
        Round(out == 0 ? value : -value, &call.outputs[out].as<T>()[i]);
    }
    return Status();
  });
}

inline Status LaunchBump(const Call& call) {
  float scale = call.attributes[0].f;
  return EachFloat(call, [=](auto x) { return x * x * scale; });
}
inline Status LaunchBoth(const Call& call) {
  const Tensor& w = call.inputs[1];
  float factor = w.present ? w.as<const float>()[0] : 2.0f;
  return EachFloat(call, [=](auto x) { return x * factor; }, 2);
}

TWINOP_CPU_OP(bump, Record("bump(Tensor x, float scale=0.5) -> Tensor"), LaunchBump)
TWINOP_CPU_OP(half_bump,
              Record("half_bump(Tensor x, float scale=0.5) -> Tensor").dtypes("float16; bfloat16"),
              LaunchBump)
TWINOP_CPU_OP(wide_bump, Record("wide_bump(Tensor x, float scale=0.5) -> Tensor").dtypes("float32"),
              LaunchBump)
TWINOP_CPU_OP(both,
              Record("both(Tensor x, Tensor? weight=None) -> (Tensor plus, Tensor minus)")
                  .dtypes("float32; float16 weight=float32")
                  .shapes("plus = x; minus = x"),
              LaunchBoth)

}  // namespace twinop
"""
BUMP = """< domain: "mine", opset_import: ["" : 20] > Custom{name} <scale: float = 0.5> (x) => (y) {{
    s = Constant <value_float: float = @scale> () z = Cast <to = {compute}> (x) square = Mul (z, z)
    t = Mul (square, s) y = Cast <to = {dtype}> (t) }}"""
BOTH = """< domain: "mine", opset_import: ["" : 20] > CustomBoth (x, weight) => (plus, minus) {
    z = Cast <to = 1> (x) p = Mul (z, weight) plus = CastLike (p, x) minus = Neg (plus) }"""
NET = """(float[N, 16] x) => (float[N, 16] y) { a = MatMul (x, w) b = Add (a, bias)
    c = mine.CustomBump <scale: float = 0.25> (b) y = LayerNormalization (c, gamma, beta) }"""


def bump(name: str = "Bump", dtype: int = 1) -> str:
    """A body as `twinop export` writes it: it computes in fp32, and rounds to the type of the calls."""
    return BUMP.format(name=name, compute=1, dtype=dtype)


def made(graph: str, *functions: str, opset: int = 20, **constants: Any) -> onnx.ModelProto:
    imports = f'["": {opset}, "mine": 1, "other": 1, "custom_domain": 1]'
    text = f"<ir_version: 10, opset_import: {imports}> g {graph}" + "".join(functions)
    if opset != 20:
        text = text.replace('["" : 20]', f'["" : {opset}]')
    model = parser.parse_model(text)
    arrays = {"w": weights(16, 16), "bias": weights(16), "gamma": weights(16, seed=1), "beta": weights(16)}
    for name, array in (arrays | constants).items():
        if array is not None and name in text:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project of the domain `mine`, as `twinop build` leaves it."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.h").write_text(HEADER)
    build(find_project([folder / "mine.h"]), folder / "build" / "libmine.so", Options(cpu=True))
    yield folder


@pytest.fixture
def library(project: Path) -> Path:
    return project / "build" / "libmine.so"


def optimized(model: Any, folder: Path, library: Path | None, **more: Any) -> tuple[OptimizeReport, ir.Model]:
    """Optimises a model for CUDA, and compares the result with it in a session."""
    onnx.save(model, folder / "old.onnx")
    report = optimize(folder / "old.onnx", folder / "new.onnx", device="cuda", library=library, **more)
    assert not report.reverted
    new = ir.load(folder / "new.onnx")
    assert not any(node.overload for node in new.graph.all_nodes())
    return report, new


def outputs(path: Path, library: Path | bool, **feeds: np.ndarray) -> list[np.ndarray]:
    session = deploy.session(path, ["CPUExecutionProvider"], library)
    wanted = {name: array.astype(session.inputs[name].numpy_dtype) for name, array in feeds.items()}
    return list(session.run(wanted).values())


def own(model: ir.Model) -> list[str]:
    """The user's own nodes, in the main graph and in subgraphs."""
    return [node.op_type for node in model.graph.all_nodes() if node.domain == "mine"]


def bodies(model: ir.Model) -> set[str]:
    return {name for domain, name, _ in model.functions if domain == "mine"}


def check_values(folder: Path, library: Path, accepted: float = 1e-5) -> None:
    """Compares the result with the source, and its function bodies with the library."""
    feeds = dict[str, np.ndarray]()
    for value in ir.load(folder / "old.onnx").graph.inputs:
        shape = [dim if isinstance(dim, int) else 3 for dim in value.shape or ()]
        feeds[str(value.name)] = np.asarray(np.random.default_rng(5).standard_normal(shape), np.float32)
    expected = outputs(folder / "old.onnx", library, **feeds)
    for how in (library, False):
        for a, b in zip(expected, outputs(folder / "new.onnx", how, **feeds), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), accepted, accepted)


def test_rewrites_around_a_user_op(tmp_path: Path, library: Path) -> None:
    report, model = optimized(made(NET, bump()), tmp_path, library)
    assert [node.op_type for node in model.graph] == ["CustomLinear", "CustomBump", "CustomLayerNorm"]
    [node] = nodes(model, "CustomBump")
    assert node.attributes["scale"].value == 0.25 and bodies(model) == {"CustomBump"}
    assert report.libraries[0] == library and report.libraries[1].name == "libcustom_ops.so"
    assert not report.inlined and f"libraries: {library}" in str(report)
    check_values(tmp_path, library)


def test_own_library(tmp_path: Path, project: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    report, model = optimized(made(NET, bump()), tmp_path, None)
    assert own(model) == ["CustomBump"] and report.libraries[0].samefile(library)


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report, model = optimized(made(NET, bump()), tmp_path, None)
    assert not own(model) and not bodies(model) and report.inlined == {"mine::CustomBump": 1}
    assert "1 mine::CustomBump: no library of mine was found. Name one with library=" in str(report)
    assert [path.name for path in report.libraries] == ["libcustom_ops.so"]


def test_no_library_and_no_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="no library has mine::CustomBump, and the model has no function"):
        optimized(made(NET), tmp_path, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(float[N] x) => (float[N] y) { y = mine.CustomBump (x, x) }", "2 inputs; it takes 1"),
        ("(float[N] x) => (float[N] y) { y, z = mine.CustomBump (x) }", "outputs y, z; the node must name"),
        ("(float[N] x) => (float[N] y) { y = mine.CustomHalfBump (x) }", "no kernel for these dtypes: x is"),
    ],
)
def test_node_that_does_not_fit_its_record(text: str, said: str, tmp_path: Path, library: Path) -> None:
    with pytest.raises(ExportError, match=f"does not fit libmine.so:\n.*{said}"):
        optimized(made(text), tmp_path, library)


BRANCHES = """(float[N, 16] x, bool flag) => (float[N, 16] y) { a = MatMul (x, w) b = Add (a, bias)
    y = If (flag) < then_branch = then_graph () => (float[N, 16] t) { t = mine.CustomBump (b) },
    else_branch = else_graph () => (float[N, 16] e) { e = mine.CustomBump <scale: float = 2.0> (b) } > }"""
LOOP = """(float[3, 16] x) => (float[3, 16] y) { count = Constant <value_int: int = 2> ()
    true = Constant <value = bool {1}> () a = MatMul (x, w) b = Add (a, bias) y = Loop (count, true, b) <
    body = once (int64 i, bool go, float[3, 16] before) => (bool on, float[3, 16] after)
    { on = Identity (go) after = mine.CustomBump (before) } > }"""
WRAPPER = """< domain: "other", opset_import: ["" : 20, "mine" : 1] > CustomTwice (x) => (y) {
    half = mine.CustomBump <scale: float = 0.125> (x) y = Add (half, half) }"""
RELU = """< domain: "custom_domain", opset_import: ["" : 20] > CustomRelu (x) => (y) { y = Relu (x) }"""
SQUARE = """< domain: "other", opset_import: ["" : 20, "custom_domain" : 1] > Square (x) => (y) {
    r = custom_domain.CustomRelu (x) y = Mul (r, r) }"""
CALLS = """< domain: "mine", opset_import: ["" : 20, "other" : 1, "mine" : 1] >
    CustomNewer <scale: float> (x) => (y) { s = other.Square (x) y = mine.CustomBump (s) }"""
SEVERAL = """(float[N, 16] x) => (float[N, 16] y) { k = mine.CustomBump (bias) a = mine.CustomBump (x)
    b = mine.CustomBump (x) c = Add (a, b) d = Add (c, k) y = LayerNormalization (d, gamma, beta) }"""
OWN_LINEAR = """< domain: "mine", opset_import: ["" : 20] > CustomLinear (x, w) => (y) {
    z = MatMul (x, w) y = Neg (z) }"""
NAMED = """(float[N, 16] x) => (float[N, 16] y) {
    a = mine.CustomLinear (x, w) b = Gelu (a) y = LayerNormalization (b, gamma, beta) }"""
MASK = """(float[2, 4, 8, 16] q, float[2, 4, 8, 16] k, float[2, 4, 8, 16] v, float[2, 1, 8, 8] m)
    => (float[2, 4, 8, 16] y) { mask = mine.CustomBump <scale: float = -1.0> (m)
    t = Transpose <perm: ints = [0, 1, 3, 2]> (k) s = MatMul (q, t) d = Mul (s, quarter)
    e = Add (d, mask) p = Softmax <axis: int = -1> (e) y = MatMul (p, v) }"""
NEWER, AROUND = NET.replace("CustomBump", "CustomNewer"), ("CustomLinear", "CustomLayerNorm")
# The graph, its functions, the dtype, the user's nodes and what they read, other nodes, and the difference.
KEPT: dict[str, tuple[str, list[str], str | None, list[str], tuple[str, ...], float]] = {
    "the library lacks it": (NEWER, [bump("Newer")], None, ["CustomNewer FLOAT"], AROUND, 1e-5),
    "alone": (
        "(float[N, 16] x) => (float[N, 16] y) { y = mine.CustomBump (x) }",
        [bump()], "float16", ["CustomBump FLOAT16"], (), 2e-3,
    ),
    "in an If": (BRANCHES, [bump()], None, 2 * ["CustomBump FLOAT"], AROUND[:1], 1e-5),
    "in a Loop": (LOOP, [bump()], "float16", ["CustomBump FLOAT"], AROUND[:1], 2e-2),
    # One body serves the node of the main graph, in 16 bits, and that of a subgraph, in fp32.
    "before a Loop and in it": (
        LOOP.replace("b = Add (a, bias)", "c = Add (a, bias) b = mine.CustomBump (c)"),
        [bump()], "float16", ["CustomBump FLOAT16", "CustomBump FLOAT"], AROUND[:1], 2e-2,
    ),
    "in another function": (
        NET.replace("mine.CustomBump <scale: float = 0.25>", "other.CustomTwice"),
        [WRAPPER, bump()], None, ["CustomBump FLOAT"], ("CustomLinear", "CustomAddLayerNorm"), 1e-5,
    ),
    # What has a library stays, also in the body of a user op; the rest of the body is inlined.
    "calls others": (NEWER, [CALLS, SQUARE, RELU, bump()], None, ["CustomNewer FLOAT"], AROUND, 1e-5),
    "several of one input, a constant": (SEVERAL, [bump()], None, 3 * ["CustomBump FLOAT"], AROUND[1:], 1e-5),
    "with a name of twinop's": (
        NAMED, [OWN_LINEAR], None, ["CustomLinear FLOAT"], ("CustomGelu", "CustomLayerNorm"), 1e-5,
    ),
    "a mask, not computed in order to classify it": (MASK, [bump()], None, ["CustomBump FLOAT"], (), 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_user_op_stays(name: str, tmp_path: Path, library: Path) -> None:
    graph, functions, dtype, kept, others, accepted = KEPT[name]
    proto = made(graph, *functions, quarter=np.float32(0.25))
    report, model = optimized(proto, tmp_path, library, dtype=dtype)
    mine = [node for node in model.graph.all_nodes() if node.domain == "mine"]
    assert [f"{node.op_type} {node.inputs[0] and node.inputs[0].dtype}" for node in mine] == kept
    text = "".join(functions)
    named = {each: re.findall(rf'domain: "{each}"[^>]*>\s*(\w+)', text) for each in ("mine", "other")}
    assert bodies(model) == {*named["mine"]}
    assert report.inlined == {f"other::{each}": 1 for each in named["other"]}
    assert ("custom_domain", "CustomRelu", "") in model.functions or RELU not in functions
    assert {*others} <= {node.op_type for node in model.graph if node.domain != "mine"}
    assert (report.libraries[0] == library) == (bump() in functions)
    check_values(tmp_path, library, accepted)


def test_outputs_and_optional_inputs(tmp_path: Path, library: Path) -> None:
    text = """(float[N, 16] x) => (float[N, 16] y) { a = MatMul (x, w) b = Add (a, bias)
        p, m = mine.CustomBoth (b, weight) s = Add (m, x) n = LayerNormalization (s, gamma, beta)
        y = Add (n, p) }"""
    weight = np.array([3], np.float32)
    report, model = optimized(made(text, BOTH, weight=weight), tmp_path, library)
    assert own(model) == ["CustomBoth"] and nodes(model, "CustomLinear", "CustomAddLayerNorm")
    assert report.libraries[0] == library
    check_values(tmp_path, library)
    absent = made(text.replace("(b, weight)", "(b)"))
    assert own(optimized(absent, tmp_path, library)[1]) == ["CustomBoth"]
    # In 16 bits, the library has this op with weights in fp32 only.
    _, model = optimized(made(text, BOTH, weight=weight), tmp_path, library, dtype="float16")
    [node] = nodes(model, "CustomBoth")
    assert [value.dtype for value in node.inputs if value] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]
    check_values(tmp_path, library, accepted=5e-3)


@pytest.mark.parametrize("opset", [17, 22, 25])
def test_other_opsets(opset: int, tmp_path: Path, library: Path) -> None:
    functions = [bump()] if opset >= 20 else []
    _, model = optimized(made(NET, *functions, opset=opset), tmp_path, library)
    assert own(model) == ["CustomBump"] and nodes(model, "CustomLinear", "CustomLayerNorm")
    assert len(bodies(model)) == len(functions)


def test_body_in_an_old_opset(tmp_path: Path, library: Path) -> None:
    with pytest.raises(ExportError, match="opset 17: the function body of mine::CustomBump cannot be conv"):
        optimized(made(NET, bump(), opset=17), tmp_path, library)


def half(model: onnx.ModelProto, dtype: type = np.float16) -> onnx.ModelProto:
    """The same model with tensors of 16 bits."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array: np.ndarray = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


@pytest.mark.parametrize("name", ["Bump", "HalfBump"])
def test_a_model_in_16_bits(name: str, tmp_path: Path, library: Path) -> None:
    """The trial in fp32 runs an op that has no kernel for fp32, in its own dtype."""
    model = half(made(NET.replace("CustomBump", f"Custom{name}"), bump(name, 10)))
    report, new = optimized(model, tmp_path, library)
    assert [node.op_type for node in new.graph] == ["CustomLinear", f"Custom{name}", "CustomLayerNorm"]
    assert bodies(new) == {f"Custom{name}"} and report.dtype == "float16"
    check_values(tmp_path, library, accepted=1e-2)
    # And as bfloat16, which both have.
    _, new = optimized(model, tmp_path, library, dtype="bfloat16")
    assert own(new) == [f"Custom{name}"] and not nodes(new, "Cast")
    check_values(tmp_path, library, accepted=1e-1)


def test_a_part_in_another_dtype_stays_so(tmp_path: Path, library: Path) -> None:
    """An op in fp32 of a model in fp16, and one in fp16 of a model in fp32."""
    text = NET.replace("c = mine.CustomBump <scale: float = 0.25> (b)", "{}")
    inner = "h = Cast <to = {0}> (b) k = mine.Custom{2} (h) c = Cast <to = {1}> (k)"
    wide = half(made(text.replace("{}", inner.format(1, 10, "WideBump")), bump("WideBump")))
    _, new = optimized(wide, tmp_path, library)
    [first] = nodes(new, "CustomWideBump")[0].inputs[:1]
    assert first is not None and first.dtype is ir.DataType.FLOAT
    check_values(tmp_path, library, accepted=1e-2)
    for name in ("Bump", "HalfBump"):
        narrow = made(text.replace("{}", inner.format(10, 1, name)), bump(name, 10))
        _, new = optimized(narrow, tmp_path, library)
        [node] = nodes(new, f"Custom{name}")
        assert node.inputs[0] is not None
        assert node.inputs[0].dtype is node.outputs[0].dtype is ir.DataType.FLOAT16
        assert len(nodes(new, "Cast")) == 2 and nodes(new, "CustomLinear", "CustomLayerNorm")
        check_values(tmp_path, library, accepted=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "has"),
    [("WideBump", "float16", "float32"), ("HalfBump", "float32", "float16; bfloat16")],
)
def test_library_without_the_dtype(name: str, dtype: str, has: str, tmp_path: Path, library: Path) -> None:
    model = made(NET.replace("CustomBump", f"Custom{name}"), bump(name, 1 if dtype == "float16" else 10))
    model = model if dtype == "float16" else half(model)
    with pytest.raises(ExportError) as error:
        optimized(model, tmp_path, library, dtype=dtype)
    text = str(error.value)
    assert f"needs mine::Custom{name} in {dtype}, and {library} has it for {has}" in text
    assert "build it again" in text and not (tmp_path / "new.onnx").exists()
