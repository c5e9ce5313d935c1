"""A model and its rewritten form are cut into segments that correspond."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from optimizing import parsed, weights
from same_names import accepted_case
from segment_chains import run_beside, run_chain, run_part

from twinop.deploy.ort_runs import run
from twinop.optimize import optimize_folder
from twinop.optimize.equivalence import relative_error
from twinop.optimize.load import load
from twinop.optimize.segments import Part, Segment, cut, extract

_CHAIN = """(float[N, 4] x, float[N, 4] cache) => (float[N, 4] y, float[N, 4] new_cache) {
    scale = ReduceMax<keepdims: int = 1>(cache)
    a = MatMul(x, w1)
    b = Relu(a)
    new_cache = Add(cache, b)
    c = MatMul(b, w2)
    y = Mul(c, scale)
}"""


def test_a_part_is_a_model_of_its_own() -> None:
    model = ir.from_proto(parsed(_CHAIN, w1=weights(4, 4), w2=weights(4, 4, seed=1)))
    parts = [Part([], ["b", "new_cache"]), Part(["b"], ["y"])]
    models = [extract(model, part) for part in parts]
    inputs = [[value.name for value in each.graph.inputs] for each in models]
    assert inputs == [["x", "cache"], ["b", "cache"]]
    w2 = models[1].graph.initializers["w2"].const_value
    assert [*models[1].graph.initializers] == ["w2"] and w2 is model.graph.initializers["w2"].const_value
    case = {name: weights(3, 4, seed=index) for index, name in enumerate(("x", "cache"), 2)}
    y, new_cache = _run(model, case)
    b, found_cache = _run(models[0], case)
    [found_y] = _run(models[1], {"b": b, "cache": case["cache"]})
    assert np.array_equal(new_cache, found_cache) and np.array_equal(y, found_y)


def test_a_small_model_is_one_segment() -> None:
    model = ir.from_proto(parsed(_CHAIN, w1=weights(4, 4), w2=weights(4, 4, seed=1)))
    [segment] = cut(model, model.clone())
    assert segment.original == segment.result == Part([], ["y", "new_cache"])


DECODER = Sizes(width=128, inner=256, heads=2, kv_heads=1, vocab=512)
_KIB = 1 << 10


@pytest.mark.parametrize(
    ("precision", "device", "layer"),
    [("float16", "cuda", 400 * _KIB), ("int4", "cuda", 130 * _KIB), ("float32", "cpu", 800 * _KIB)],
)
def test_layers_of_a_decoder(precision: str, device: str, layer: int, tmp_path: Path) -> None:
    source = write(tmp_path / "old", DECODER, precision, layers=4)
    report = optimize_folder(source, tmp_path / "new", device=device)
    original, result = (load(path) for path in (source / "model.onnx", report.path))
    segments = cut(original, result, layer)
    assert_same_results(original, result, segments)
    names = [segment.name for segment in segments]
    assert [name for name in names if "layer" in name] == [f"layer {i} of 4" for i in range(1, 5)], names
    kinds = [segment.kind for segment in segments if "layer" in segment.name]
    assert len({*kinds}) == 2 and len({*kinds[1:3]}) == 1, kinds


def assert_same_results(original: ir.Model, result: ir.Model, segments: list[Segment]) -> None:
    """Asserts that chains of both forms compute what the models compute, and the result also from each part
    of the original."""
    for model in (original, result):
        ir.external_data.load_to_model(model)
    case = accepted_case(original, result)
    outputs = [str(value.name) for value in original.graph.outputs]
    wholes = [run_part(model, Part([], outputs), case) for model in (original, result)]
    chains = [
        run_chain(model, [getattr(each, form) for each in segments], case)
        for model, form in ((original, "original"), (result, "result"))
    ]
    for chain, whole in zip(chains, wholes, strict=True):
        assert all(np.array_equal(chain[name], whole[name]) for name in outputs)
    for name, array in run_beside(result, segments, chains[0]).items():
        error = relative_error(chains[0][name].astype(np.float32), array.astype(np.float32))
        assert error < (1e-5 if chains[0][name].dtype == np.float32 else 1e-2), (name, error)


def _run(model: ir.Model, case: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(run(ir.to_proto(model).SerializeToString(), False, [case]).outputs[0])
