"""A model and its rewritten form are cut into segments that correspond."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from optimizing import nodes, optimized, parsed, pass_of, reported, weights

from twinop.deploy.ort_runs import NotRunnable, run
from twinop.errors import TwinopError
from twinop.optimize import decoders, inputs, optimize_folder
from twinop.optimize import graph as g
from twinop.optimize.cached_attention import SHARED_CACHES
from twinop.optimize.equivalence import relative_error
from twinop.optimize.load import load
from twinop.optimize.segments import Part, Segment, cut, extract

DECODER = Sizes(width=128, inner=256, heads=2, kv_heads=1, vocab=512)
_KIB = 1 << 10


def test_layers_of_a_decoder(tmp_path: Path) -> None:
    source = write(tmp_path / "old", DECODER, "float16", layers=4)
    report = optimize_folder(source, tmp_path / "new", device="cuda")
    original, result = (load(path) for path in (source / "model.onnx", report.path))
    segments = cut(original, result, 400 * _KIB)
    assert_same_results(original, result, segments)
    names = [segment.name.partition(" (")[0] for segment in segments]
    assert [name for name in names if "layer" in name] == [f"layer {i} of 4" for i in range(1, 5)], names
    kinds = [segment.kind for segment in segments if "layer" in segment.name]
    assert len({*kinds}) == 2 and len({*kinds[1:3]}) == 1, kinds
    # The products of the result compute the norms: only the sum crosses.
    assert {len(segment.result.inputs) for segment in segments if "layer" in segment.name} == {1}


def changed(model: ir.Model, change: Callable[[ir.Node], None], op_type: str, index: int) -> ir.Model:
    """Returns a copy of a model with one node changed."""
    other = model.clone()
    change(nodes(other, op_type)[index])
    return other


def _other_weight(node: ir.Node) -> None:
    assert node.inputs[1] is not None and node.inputs[1].const_value is not None
    tensor = node.inputs[1].const_value
    node.inputs[1].const_value = ir.tensor(tensor.numpy()[::-1].copy())


def _attribute(name: str, number: float | int) -> Callable[[ir.Node], None]:
    def change(node: ir.Node) -> None:
        node.attributes[name] = ir.convenience.convert_attribute(name, number)

    return change


def _other_table(node: ir.Node) -> None:
    assert node.inputs[7] is not None and node.inputs[7].const_value is not None
    array = node.inputs[7].const_value.numpy() * np.float32(0.5)
    node.replace_input_with(7, g.initializer(node.graph, array, "other"))  # type: ignore[arg-type]


def _bias(by: float) -> Callable[[ir.Node], None]:
    """Adds a bias in each layer, to the node another one."""

    def change(node: ir.Node) -> None:
        graph = node.graph
        assert graph is not None
        for each in [each for each in graph if each.op_type == "MatMul"][1:-1:5]:
            row = g.initializer(graph, np.full(128, 0.25 + by * (each is node), np.float32), "row")
            [use] = each.outputs[0].uses()
            use.node.replace_input_with(use.idx, g.add(use.node, "Add", [each.outputs[0], row]))

    return change


GQA, NORM = "GroupQueryAttention", "SkipSimplifiedLayerNormalization"


@pytest.mark.parametrize(
    ("change", "op_type", "index", "others"),
    [
        (_other_weight, "MatMul", 6, 0),
        (_attribute("local_window_size", 16), GQA, 1, 1),
        (_attribute("epsilon", 1e-3), NORM, 2, 1),
        (_other_table, GQA, 1, 1),
        (_bias(1), "MatMul", 6, 1),
        (_bias(0.1), "MatMul", 6, 0),
    ],
    ids=["a weight", "a window", "a scalar", "a table", "a larger bias", "a bias"],
)
@pytest.mark.parametrize("form", ["original", "result"])
def test_kinds(change: Any, op_type: str, index: int, others: int, form: str, decoder: ir.Model) -> None:
    """Layers differ in weights only, until one of them has another scalar, window, table or larger bias."""
    one, two = changed(decoder, change, op_type, index), decoder.clone()
    segments = cut(*((one, two) if form == "original" else (two, one)), most_bytes=800 * _KIB)
    kinds = [each.kind for each in segments if "layer" in each.name]
    assert len(kinds) == 6 and kinds[0] == kinds[2] == kinds[3] == kinds[4], [each.name for each in segments]
    assert (kinds[1] != kinds[0]) == bool(others)


@pytest.mark.parametrize("inverse", ["Reciprocal (r%d)", "Div (one, r%d)"], ids=["Reciprocal", "Div"])
def test_a_kind_has_gains_of_its_own(inverse: str) -> None:
    """Layers of RMS norms that only their gains and weights tell apart."""
    layer = f"""p%d = Mul (h%d, h%d) m%d = ReduceMean (p%d, last) e%d = Add (m%d, small) r%d = Sqrt (e%d)
        i%d = {inverse} n%d = Mul (h%d, i%d) g%d = Mul (n%d, gain%d) h%d = MatMul (g%d, w%d) """
    text = "".join(layer.replace("h%d = M", f"h{i + 1} = M").replace("%d", str(i)) for i in range(4))
    given = {f"{name}{i}": weights(*shape, seed=i) for i in range(4)
             for name, shape in (("gain", (32,)), ("w", (32, 32)))}  # fmt: skip
    given |= {"last": np.array([-1]), "small": np.float32(1e-5), "one": np.float32(1)}
    model = ir.from_proto(parsed(f"(float[N, 32] h0) => (float[N, 32] h4) {{ {text} }}", **given))
    kinds = [each.kind for each in cut(model, model.clone(), 5 * _KIB)]
    assert len(kinds) == 4 and len({*kinds[1:3]}) == 1, kinds


_OF_LARGE_INPUTS = "a%d = MatMul (h%d, w%d) b%d = Add (a%d, v%d) c%d = Relu (b%d)"
NUMBERS: dict[str, tuple[str, Callable[[float], np.ndarray]]] = {
    "nothing": (_OF_LARGE_INPUTS, lambda number: np.full(8, number, np.float32)),
    "a bias": (_OF_LARGE_INPUTS, lambda number: np.full(8, number, np.float32)),
    "a table": (_OF_LARGE_INPUTS, lambda number: np.full((4, 8), number, np.float32)),
    "a sum of frequencies": (
        "a%d = MatMul (h%d, w%d) p%d = MatMul (ones, v%d) b%d = Add (a%d, p%d) c%d = Relu (b%d)",
        lambda number: np.full((1, 8), number, np.float32),
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_of_a_layer_make_it_wrong(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only large inputs reach a number that is smaller in that layer: no segment's stream shows it."""

    def without_relu(work: g.RewriteContext) -> None:
        for node in work.nodes("Relu"):
            g.replace(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]

    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 300)
    monkeypatch.setattr("twinop.optimize.passes.PASSES", [pass_of("without_relu", without_relu)])
    text, numbers = NUMBERS[what]
    layer = f"{text} s%d = Mul (c%d, small) h%d_ = Tanh (s%d) "
    text = "".join(layer.replace("h%d_", f"h{at + 1}").replace("%d", str(at)) for at in range(4))
    given = {f"w{at}": weights(8, 8, seed=at) / 4 for at in range(4)}
    given |= {f"v{at}": numbers(20 if what != "nothing" and at == 2 else 9000) for at in range(4)}
    given |= {"small": np.float32(1e-4), "ones": np.ones((1, 1), np.float32)}
    proto = parsed(f"(float[N, 4, 8] h0) => (float[N, 4, 8] h4) {{ {text} }}", **given)
    report = reported(proto, tmp_path, device="cpu")
    assert [*report.reverted] == ["without_relu"] * (what != "nothing"), report
    assert what == "nothing" or "layer 3 of 4" in report.reverted["without_relu"]


def test_a_file_in_fp16_becomes_one_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment of it differs from the file's by the rounding of fp16."""
    monkeypatch.setattr("twinop.optimize.segments.MOST_BYTES", 8000)
    layers = " ".join(f"a{at} = MatMul (h{at}, w{at}) h{at + 1} = Relu (a{at})" for at in range(4))
    given = {f"w{at}": 3 * weights(64, 64, seed=at).astype(np.float16) for at in range(4)}
    proto = parsed(f"(float16[N, 64] h0) => (float16[N, 64] y) {{ {layers} y = Softmax (h4) }}", **given)
    report, _ = optimized(proto, tmp_path, dtype="float32")
    assert report.fused == {"linear+relu": 4} and report.compared["segments"] > 2
    assert report.error > 1e-4


def test_names_decide_nothing(decoder: ir.Model) -> None:
    """The same model with other names, and its nodes in another order, is cut at the same places."""
    names = dict[str, str]()
    other = decoder.clone()
    for value in (*other.graph.initializers.values(), *(v for node in other.graph for v in node.outputs)):
        if value.name and not value.is_graph_output():
            names[f"v{len(names) * 7919 % 1009}"] = value.name
            value.name = f"v{(len(names) - 1) * 7919 % 1009}"
    for index, node in enumerate(other.graph):
        node.name = f"n{index * 7919 % 1009}"
    moved = [*other.graph]
    other.graph.remove(moved)
    other.graph.extend(moved[::-1])
    other.graph.sort()
    cuts = [cut(each, each.clone(), 800 * _KIB) for each in (decoder, other)]
    for one, two in zip(*cuts, strict=True):
        assert one.name.partition(" (")[0] == two.name.partition(" (")[0] and one.kind == two.kind
        renamed = [names.get(each, each) for each in (*two.result.inputs, *two.result.outputs)]
        assert {*one.result.inputs, *one.result.outputs} == {*renamed}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    folder = write(tmp_path_factory.mktemp("decoder") / "old", DECODER, "float32", layers=6)
    model = load(folder / "model.onnx")
    ir.external_data.load_to_model(model)
    return model


MODELS = {
    "a UNet": (
        """(float[B, 4, H, W] x, float[B, 8] time) => (float[B, 4, H, W] y) {
        t0 = MatMul (time, wt) t1 = Sigmoid (t0) t2 = Mul (t0, t1) t = Unsqueeze (t2, last2)
        a0 = Conv <pads=[1, 1, 1, 1]> (x, w0) a = Add (a0, t)
        b0 = Conv <pads=[1, 1, 1, 1], strides=[2, 2]> (a, w1) b1 = Sigmoid (b0) b2 = Mul (b0, b1)
        bt = ReduceMean <keepdims=0> (t2) b = Add (b2, bt)
        n = InstanceNormalization (b, scale, bias) d = Sigmoid (n) e = Mul (n, d)
        f0 = ConvTranspose <strides=[2, 2]> (e, w2) f = Add (f0, bt) s = Concat <axis=1> (f, a)
        y = Conv <pads=[1, 1, 1, 1]> (s, w3) }""",
        {"wt": (8, 16), "w0": (16, 4, 3, 3), "w1": (32, 16, 3, 3), "w2": (32, 16, 2, 2), "w3": (4, 32, 3, 3),
         "scale": (32,), "bias": (32,)},
        12 * _KIB,
    ),
    "nothing repeats": (
        """(float[B, 16] x) => (float[B, 99] y) { a = MatMul (x, w0) b = Relu (a)
        c = LayerNormalization (b, g) d = MatMul (c, w1) e = Sigmoid (d) f = MatMul (e, w2) h = Softmax (f)
        i = MatMul (h, w3) j = Tanh (i) y = MatMul (j, w4) }""",
        {"w0": (16, 40), "g": (40,), "w1": (40, 24), "w2": (24, 64), "w3": (64, 8), "w4": (8, 99)},
        6 * _KIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_other_models(name: str, tmp_path: Path) -> None:
    """A skip and a vector that all read cross, and layers of which none is like another."""
    text, shapes, most = MODELS[name]
    given = {key: weights(*shape, seed=seed) for seed, (key, shape) in enumerate(shapes.items())}
    optimized(parsed(text, last2=np.array([2, 3]), **given), tmp_path)
    original, result = load(tmp_path / "old.onnx"), load(tmp_path / "fast.onnx")
    segments = cut(original, result, most)
    assert len(segments) > 3
    assert_same_results(original, result, segments)


Values = dict[str, np.ndarray]


def run_part(model: ir.Model, part: Part, given: Values) -> Values:
    """Runs a part of a model on values by name, and returns its outputs."""
    taken, case = extract(model, part), {}
    for value in taken.graph.inputs:
        array = given[str(value.name)]
        case[str(value.name)] = array if value.dtype is None else array.astype(value.dtype.numpy())
    proto = ir.to_proto(taken).SerializeToString()
    return dict(zip(part.outputs, run(proto, None, [case], optimize=False).outputs[0], strict=True))


def run_chain(model: ir.Model, parts: list[Part], case: Values) -> Values:
    """Runs parts of a model in order; returns all that they return."""
    found = dict(case)
    for part in parts:
        found |= run_part(model, part, found)
    return found


def accepted_case(model: ir.Model, result: ir.Model) -> inputs.Case:
    """Returns inputs that a model with its weights in memory accepts, and its optimised form, too."""
    model.graph.meta[SHARED_CACHES] = any(node.op_type == "CustomAttentionCached" for node in result.graph)
    decoders.set_sizes(model)
    steps, may_hide = decoders.runs(model)
    for each in [*steps, *inputs.SIZES]:
        case = inputs.generate(model, each, hide="right" if may_hide else "nothing")
        try:
            _run(model, case)
        except (NotRunnable, TwinopError) as error:
            reason = error
        else:
            return case
    raise AssertionError(f"no inputs fit the model: {reason}")


def assert_same_results(original: ir.Model, result: ir.Model, segments: list[Segment]) -> None:
    """Asserts that chains of both forms compute what the models compute, and the result also from each part
    of the original."""
    for model in (original, result):
        ir.external_data.load_to_model(model)
    case = accepted_case(original, result)
    outputs = [str(value.name) for value in original.graph.outputs]
    wholes = [run_part(model, Part([], outputs), case) for model in (original, result)]
    forms = (original, "original"), (result, "result")
    parts = {form: [getattr(each, form) for each in segments] for _, form in forms}
    chains = [run_chain(model, parts[form], case) for model, form in forms]
    for chain, whole in zip(chains, wholes, strict=True):
        assert all(np.array_equal(chain[name], whole[name]) for name in outputs)
    for segment in segments:
        for name, array in run_part(result, segment.result, chains[0]).items():
            error = relative_error(chains[0][name].astype(np.float32), array.astype(np.float32))
            assert error < (1e-5 if chains[0][name].dtype == np.float32 else 1e-2), (name, error)


def _run(model: ir.Model, case: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(run(ir.to_proto(model).SerializeToString(), False, [case]).outputs[0])
