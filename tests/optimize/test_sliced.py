"""optimize/sliced.py: nodes with large weights run alone, slice by slice."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from optimizing import parsed
from quantised_weights import weight_of

from twinop.deploy import ort_runs
from twinop.libraries.library import find_library
from twinop.model import weights
from twinop.model.parts import parts
from twinop.optimize import sliced

K, N = 64, 192
rng = np.random.default_rng(0)
LIBRARY = find_library("custom_ops")


def normal(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return (rng.standard_normal(shape) / 4).astype(dtype)


ZERO = weight_of(N, K, 4, 32, True)
GIVEN = {name: tensor.numpy() for name, tensor in zip("wsz", ZERO.given.values(), strict=True)}
LINEAR = "custom_domain.CustomLinear"
FORM = f"K={K}, N={N}, bits=4, block_size=32"
PRODUCTS: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "MatMul": ("MatMul(x, w)", {"w": normal(K, N)}),
    "Gemm": ("Gemm<transB=1>(x, w, b)", {"w": normal(N, K), "b": normal(N)}),
    "Gemm of one bias": ("Gemm(x, w, b)", {"w": normal(K, N), "b": normal(1)}),
    "MatMulNBits, zero points": (
        f"com.microsoft.MatMulNBits<{FORM}>(x, w, s, z)",
        {name: array.reshape(-1) if name in "sz" else array for name, array in GIVEN.items()},
    ),
    "linear": (f'{LINEAR}<activation="gelu">(x, w, b, r)', {"w": normal(N, K), "b": normal(N)}),
    "a gate": (f"{LINEAR}Swiglu(x, w, b)", {"w": normal(2 * N, K), "b": normal(2 * N)}),
    "linear_q": (f"{LINEAR}Q<bits=4, block=32>(x, w, s, z, b, r)", {**GIVEN, "b": normal(N)}),
    "dequantised": (
        """MatMul(x, t) ; d = DequantizeLinear<axis=1, block_size=32>(w, s, z) f = Cast<to=1>(d)
        h = Cast<to=10>(f) t = Transpose<perm=[1, 0]>(h)""",
        {"w": rng.integers(0, 255, (N, K)).astype(np.uint8), "s": normal(N, K // 32) / 64,
         "z": rng.integers(100, 150, (N, K // 32)).astype(np.uint8)},
    ),
}  # fmt: skip


def model_of(text: str, constants: dict[str, np.ndarray]) -> ir.Model:
    model = ir.from_proto(parsed(text, **constants))
    model.graph.opset_imports[""] = 21  # has DequantizeLinear in blocks
    return model


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "MOST_BYTES", 2000)
    monkeypatch.setattr(sliced, "_SLICE_BYTES", 3000)
    monkeypatch.setattr(weights, "LARGE", 1000)


def runs_alone(monkeypatch: pytest.MonkeyPatch) -> list[ir.Model]:
    """Collects the models that run."""
    seen = list[ir.Model]()

    def watched(model: ir.Model) -> ort_runs.Parts:
        seen.append(model)
        return parts(model)

    monkeypatch.setattr(sliced, "parts", watched)
    return seen


@pytest.mark.parametrize("name", PRODUCTS)
def test_slices_are_the_whole(name: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    product, constants = PRODUCTS[name]
    product, _, before = product.partition(";")
    text = f"(float16[B, {K}] a, float16[B, {N}] r) => (float16[B, M] c, float16[B, {K}] x)"
    model = model_of(f"{text} {{ {before} x = Mul(a, a)  y = {product}  c = Neg(y) }}", constants)
    cases = [{"a": normal(5, K), "r": normal(5, N)}, {"a": normal(1, K), "r": normal(1, N)}]
    expected = ort_runs.run(parts(model), LIBRARY, cases).outputs
    seen = runs_alone(monkeypatch)
    found = sliced.run(model, cases, LIBRARY)
    assert len(seen) >= 2 + 3  # what is before and behind it, and slices
    largest = max(value.const_value.nbytes for value in seen[1].graph.initializers.values())  # type: ignore[union-attr]
    assert largest < constants["w"].nbytes / 2
    for outputs, each in zip(expected, found, strict=True):
        assert [*each] == ["c", "x"]
        for whole, joined in zip(outputs, each.values(), strict=True):
            np.testing.assert_allclose(joined.astype(np.float32), whole.astype(np.float32), atol=1e-2)


def test_a_cast_that_overflows_is_the_session_s(small: None) -> None:
    """A recipe would clip the numbers."""
    text = f"(float[B, {K}] x) => (float[B, M] y)"
    body = "h = Cast<to=10>(w) f = Cast<to=1>(h) y = MatMul(x, f)"
    model = model_of(f"{text} {{ {body} }}", {"w": normal(K, N, dtype=np.float32) * 1e6})
    case = {"x": np.ones((1, K), np.float32)}
    [[expected]] = ort_runs.run(parts(model), None, [case]).outputs
    [found] = sliced.run(model, [case], None)
    assert not np.isfinite(expected).all()
    np.testing.assert_array_equal(found["y"], expected)


ROWS = 500
TABLES: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "transposed": ("t = Transpose<perm=[1, 0]>(w)  y = Gather(t, ids)", {"w": normal(K, ROWS)}),
    "in 4 bits": (
        "t = Reshape(w, shape)  y = com.microsoft.GatherBlockQuantized<bits=4, block_size=32, gather_axis=0, "
        "quantize_axis=1>(t, ids, s)",
        {
            "w": rng.integers(0, 255, (ROWS, 2, 16)).astype(np.uint8), "s": normal(ROWS, 2),
            "shape": np.array([ROWS, K // 2]),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_of_a_computed_table_only_rows_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, constants = TABLES[name]
    model = model_of(f"(int64[B, S] ids) => (float16[B, S, {K}] c) {{ {text}  c = Neg(y) }}", constants)
    cases = [{"ids": np.array([[3, 499, 3, -1]])}, {"ids": np.array([[7]])}]
    expected = ort_runs.run(parts(model), None, cases).outputs
    monkeypatch.setattr(sliced, "_COMPUTED_TABLE", 0)
    monkeypatch.setattr(weights, "LARGE", 1000)  # a transpose is then a recipe
    monkeypatch.setattr(weights.Recipe, "numpy", None)  # nobody computes all of it
    found = sliced.run(model, cases, None)
    for outputs, each in zip(expected, found, strict=True):
        np.testing.assert_array_equal(each["c"], outputs[0])
