"""ort_runs.Parts and Earlier: models that run without a file, their large weights from where these are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from twinop.deploy import ort_runs
from twinop.deploy.ort_runs import Earlier
from twinop.errors import ExportError
from twinop.libraries.library import find_library
from twinop.model.parts import parts
from twinop.record.op_spec import DOMAIN

N = 160  # a weight [N, N] is a large one, also in 8 bits
rng = np.random.default_rng(0)
X = rng.standard_normal((4, N)).astype(np.float32)
W = rng.standard_normal((N, N)).astype(np.float32)


def constant(array: Any, name: str = "w", dtype: ir.DataType | None = None) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(array, dtype=dtype, name=name))


def model_of(
    nodes: Sequence[ir.Node],
    weights: Sequence[ir.Value],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value] | None = None,
    functions: Sequence[ir.Function] = (),
) -> ir.Model:
    graph = ir.Graph(
        inputs, outputs or nodes[-1].outputs, nodes=nodes, initializers=weights,
        opset_imports={"": 21, "com.microsoft": 1, "f": 1, DOMAIN: 1}, name="g",
    )  # fmt: skip
    return ir.Model(graph, ir_version=10, functions=functions)


def x_value(array: np.ndarray = X, name: str = "x") -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return ir.Value(name=name, type=kind, shape=ir.Shape([None] * array.ndim))


def outputs_of(model: ir.Model, case: Mapping[str, Any], library: Any = False) -> list[Any]:
    made = parts(model)
    assert made.weights, "a large weight was made a part of the graph"
    assert len(made.graph) < 16 * 1024
    return ort_runs.run(made, library, [case]).outputs[0]


def one_product(weight: ir.Value, *between: str) -> ir.Model:
    """x @ w, with nodes that fold between the weight and the product."""
    x, nodes, value = x_value(), [], weight
    for op_type in between:
        attributes = {"to": ir.DataType.FLOAT} if op_type == "Cast" else {}
        nodes.append(ir.node(op_type, [value], attributes))
        value = nodes[-1].outputs[0]
    nodes.append(ir.node("MatMul", [x, value]))
    return model_of(nodes, [weight], [x])


@pytest.mark.parametrize(
    ("weight", "between", "expected"),
    [
        (W, (), W),
        (W, ("Transpose", "Neg"), -W.T),
        (W.astype(np.float16), ("Cast",), W.astype(np.float16)),
        (W.astype(ml_dtypes.bfloat16), ("Cast",), W.astype(ml_dtypes.bfloat16)),
        (W.astype(ml_dtypes.float8_e4m3fn), ("Cast",), W.astype(ml_dtypes.float8_e4m3fn)),
        (np.asfortranarray(W), (), W),
    ],
    ids=["fp32", "folded", "fp16", "bf16", "fp8", "in another order"],
)
def test_a_weight_is_seen(weight: np.ndarray, between: tuple[str, ...], expected: np.ndarray) -> None:
    [found] = outputs_of(one_product(constant(weight), *between), {"x": X})
    np.testing.assert_allclose(found, X @ expected.astype(np.float32), rtol=1e-4, atol=1e-4)


def test_weights_that_are_inputs_outputs_empty_or_not_read() -> None:
    given, empty, unread = constant(W), constant(np.zeros((0, N), np.float32), "empty"), constant(W, "unread")
    texts = ir.Value(name="texts", const_value=ir.StringTensor([b"a"] * 9999, shape=ir.Shape([9999])))
    given.type, given.shape, x = ir.TensorType(ir.DataType.FLOAT), ir.Shape([N, N]), x_value()
    joined = ir.node("Concat", [x, empty], {"axis": 0})
    same, told = ir.node("MatMul", [joined.outputs[0], given]), ir.node("Identity", [texts])
    outputs = [same.outputs[0], told.outputs[0], given]
    model = model_of([joined, same, told], [given, empty, unread, texts], [x, given], outputs)
    made = parts(model)
    assert [*made.weights] == ["w"]
    for case, expected in (({"x": X}, W), ({"x": X, "w": 2 * W}, 2 * W)):
        product, words, back = ort_runs.run(made, False, [case]).outputs[0]
        np.testing.assert_allclose(product, X @ expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(back, expected)
        assert words.tolist() == ["a"] * 9999


def test_external_data_is_read_by_the_other_process(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\0" * 20 + W.tobytes() + np.float32(2).tobytes())
    shape, at, kind = ir.Shape([N, N]), tmp_path / "data", ir.DataType.FLOAT
    large = ir.ExternalTensor("data", 20, W.nbytes, kind, shape=shape, name="w", base_dir=tmp_path)
    small = ir.ExternalTensor(at, 20 + W.nbytes, 4, kind, shape=ir.Shape([]), name="s", base_dir=tmp_path)
    weight, scale, x = ir.Value(name="w", const_value=large), ir.Value(name="s", const_value=small), x_value()
    scaled = ir.node("Mul", [weight, scale])
    model = model_of([scaled, ir.node("MatMul", [x, scaled.outputs[0]])], [weight, scale], [x])
    [found] = outputs_of(model, {"x": X})
    np.testing.assert_allclose(found, X @ W * 2, rtol=1e-4, atol=1e-3)
    assert large.raw is None and weight.const_value is large  # nothing is mapped here


@pytest.mark.parametrize("prepack", [True, False])
def test_the_librarys_kernels_see_constants(prepack: bool) -> None:
    x, weight = x_value(), constant(W)
    model = model_of([ir.node("CustomLinear", [x, weight], domain=DOMAIN)], [weight], [x])
    library = find_library("custom_ops")
    [[found]] = ort_runs.run(parts(model), library, [{"x": X}], prepack=prepack).outputs
    np.testing.assert_allclose(found, X @ W.T, rtol=1e-4, atol=1e-4)
    assert ort_runs.run(parts(model), None, [{"x": X}]).libraries  # it is found, too


def test_an_output_of_an_earlier_case_is_an_input() -> None:
    made = parts(one_product(constant(W)))
    name = "val_0"
    cases: list[dict[str, Any]] = [{"x": X}, {"x": X * 2}, {"x": Earlier(0, name)}, {"x": Earlier(2, name)}]
    first, _, third, fourth = (each for [each] in ort_runs.run(made, False, cases).outputs)
    np.testing.assert_allclose(third, first @ W, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(fourth, third @ W, rtol=1e-4, atol=1)


def test_an_earlier_case_that_failed_is_named() -> None:
    cases: list[dict[str, Any]] = [{"x": X[:, 1:]}, {"x": Earlier(0, "val_0")}]
    made = parts(one_product(constant(W)))
    assert ort_runs.run(made, False, cases, required=0).outputs == [[], []]
    with pytest.raises(ExportError, match="x did not run"):
        ort_runs.run(made, False, [*cases, {"x": X}][1:], required=1)
