"""A model and its rewritten form are cut into segments that correspond."""

import numpy as np
import onnx_ir as ir
from optimizing import parsed, weights

from twinop.deploy.ort_runs import run
from twinop.optimize.segments import Part, cut, extract

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


def _run(model: ir.Model, case: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(run(ir.to_proto(model).SerializeToString(), False, [case]).outputs[0])
