"""Tests that weights in files are read in windows and strips as NumPy computes the whole."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from twinop.model import weights
from twinop.model.weights import Recipe, Stored

FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGE", 0)
    monkeypatch.setattr(weights, "_STRIP", 40)


@pytest.fixture
def store(tmp_path: Path) -> Callable[[np.ndarray], Stored]:
    def put(array: np.ndarray, dtype: ir.DataType | None = None) -> Stored:
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.data"
        tensor = ir.tensor(array, dtype=dtype)
        path.write_bytes(b"another" + tensor.tobytes())
        return Stored(path, 7, tensor.dtype, array.shape)

    return put


def _check(tensor: ir.TensorProtocol, expected: np.ndarray) -> None:
    """Asserts that all ways to read a tensor give the same numbers."""
    assert isinstance(tensor, Stored | Recipe)
    assert tensor.dtype.numpy() == expected.dtype and weights.sizes(tensor) == expected.shape
    pickled = pickle.dumps(tensor)
    assert len(pickled) < 2000
    for each in (tensor, pickle.loads(pickled)):
        np.testing.assert_array_equal(each.numpy(), expected)
        assert each.tobytes() == ir.tensor(expected, dtype=tensor.dtype).tobytes()
        flat = np.concatenate([strip.reshape(-1) for strip in weights.strips(each)])
        np.testing.assert_array_equal(flat, expected.reshape(-1))
        assert b"".join(map(bytes, weights.pieces(each))) == each.tobytes()
        if expected.ndim:
            rows = weights.read(each, [(1, 2), *((0, size) for size in expected.shape[1:])])
            np.testing.assert_array_equal(rows, expected[1:2])
    assert max(strip.nbytes for strip in weights.strips(tensor)) <= max(40, expected.itemsize)


@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 3, 4), (33,)])
@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BOOL", "INT4", "UINT4", "FLOAT4E2M1"])
def test_stored(store: Callable[..., Stored], shape: tuple[int, ...], dtype: str) -> None:
    kind = ir.DataType[dtype]
    array = RNG.integers(0, 2 if dtype == "BOOL" else 7, shape).astype(kind.numpy())
    tensor = store(array, kind)
    _check(tensor, array)
    _check(weights.transpose(tensor, range(len(shape))[::-1]) if len(shape) > 1 else tensor, array.T)


def test_recipes(store: Callable[..., Stored]) -> None:
    a, b = RNG.standard_normal((6, 10)).astype(np.float32), RNG.standard_normal((6, 4)).astype(np.float32)
    x, y = store(a), store(b)
    _check(weights.transpose(x), a.T)
    _check(weights.join([x, y], -1), np.concatenate([a, b], 1))
    _check(weights.join([weights.transpose(x), weights.transpose(y)]), np.concatenate([a.T, b.T]))
    _check(weights.part(x, 1, 3, 8), a[:, 3:8])
    _check(weights.part(weights.join([x, y], 1), 1, 8, 12), np.concatenate([a, b], 1)[:, 8:12])
    _check(weights.reshape(x, (3, 2, 2, 5)), a.reshape(3, 2, 2, 5))
    folded = weights.reshape(weights.transpose(x), (5, 2, 6))
    _check(weights.transpose(folded, (1, 2, 0)), a.T.reshape(5, 2, 6).transpose(1, 2, 0))
    _check(weights.cast(x, FLOAT16), a.astype(np.float16))
    _check(weights.cast(weights.transpose(x), BFLOAT16), a.T.astype(BFLOAT16.numpy()))
    _check(weights.elementwise("Mul", x, ir.tensor(b[:, :1])), a * b[:, :1])
    _check(weights.elementwise("Add", x, ir.tensor(a[0])), a + a[0])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_dequantised(store: Callable[..., Stored], axis: int, has_zeros: bool) -> None:
    integers, sizes = RNG.integers(0, 16, (6, 8)).astype(np.uint8), (3, 8) if axis == 0 else (6, 4)
    scales = RNG.standard_normal(sizes).astype(np.float16)
    zeros = RNG.integers(0, 16, sizes).astype(np.uint8)
    given = [store(integers, ir.DataType.UINT4), store(scales), store(zeros, ir.DataType.UINT4)]
    less = zeros.repeat(2, axis).astype(np.float32) if has_zeros else 0
    expected = ((integers - less) * scales.repeat(2, axis).astype(np.float32)).astype(np.float16)
    tensor = weights.dequantized(given if has_zeros else given[:2], axis, 2)
    _check(tensor, expected)
    _check(weights.transpose(tensor), expected.T)


def test_narrow_keeps_finite_numbers_finite() -> None:
    array = np.array([1e6, -np.inf, np.inf, np.nan, -1e30, 65519.0], np.float32)
    expected = np.array([65504, -np.inf, np.inf, np.nan, -65504, 65504], np.float16)
    np.testing.assert_array_equal(weights.narrow(array, FLOAT16), expected)
    assert weights.narrow(np.float32(-1e9), FLOAT16) == -65504
    assert np.isfinite(weights.narrow(np.full(3, np.finfo(np.float32).min), BFLOAT16)).all()


def test_statistics(store: Callable[..., Stored]) -> None:
    array = RNG.standard_normal((6, 10)).astype(np.float32)
    array[3, 4] = -9
    stored = store(array)
    assert weights.largest(stored) == 9
    for axis in (0, 1):
        rows = np.moveaxis(array, axis, 0)
        np.testing.assert_allclose(weights.row_norms(stored, axis), np.linalg.norm(rows, axis=1), rtol=1e-6)
        np.testing.assert_array_equal(weights.row_maxima(stored, axis), np.abs(rows).max(1))
    integers = np.array([[-128, 3], [7, -1]], np.int8)
    assert weights.largest(store(integers)) == 128
    assert weights.largest(store(integers[:, :0])) == 0
    narrow = array.astype(np.float16)
    narrow[2, 1], narrow[4, 5], narrow[4, 6] = -np.inf, np.nan, np.inf
    np.testing.assert_array_equal(weights.row_maxima(store(narrow), 0), np.abs(narrow).max(1))
    large = np.full((2, 10), 6e4, np.float16)  # whose squares fp16 does not have
    np.testing.assert_allclose(weights.row_norms(store(large), 0), 6e4 * 10**0.5, rtol=1e-3)
    assert not weights.fits(stored, FLOAT16)
    rounded = array.astype(np.float16).astype(np.float32)
    rounded[0, 0] = np.finfo(np.float32).min  # of a mask
    assert weights.fits(store(rounded), FLOAT16)


def test_equal_tensors(store: Callable[..., Stored]) -> None:
    array = RNG.standard_normal((9, 30)).astype(np.float32)
    stored, again = store(array), store(array)
    assert weights.key(weights.transpose(stored)) == weights.key(weights.transpose(stored))
    assert weights.key(stored) != weights.key(again) and weights.same(stored, again)
    assert weights.same(weights.transpose(stored), store(np.ascontiguousarray(array.T)))
    for index in ((0, 0), (4, 15), (8, 29)):
        other = array.copy()
        other[index] += 1
        assert not weights.same(stored, store(other))
    assert not weights.same(stored, weights.reshape(again, (30, 9)))
    zeros = np.zeros((2, 3), np.float32)
    assert not weights.same(store(zeros), store(-zeros))
