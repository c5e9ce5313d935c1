"""Constants of a written file are compared with the source's, whatever form a rewrite gave them."""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from optimizing import parsed

from twinop.optimize.equivalence import NotEquivalent
from twinop.optimize.segments import Part, Segment
from twinop.optimize.weight_check import check_weights

RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: object = np.float16) -> np.ndarray:
    if dtype == np.uint8:
        return RNG.integers(0, 256, shape, np.uint8)
    return RNG.standard_normal(shape).astype(dtype)  # type: ignore[call-overload]


def model_of(constants: dict[str, np.ndarray], text: str = "") -> ir.Model:
    """Makes a model whose nodes read all constants, and the nodes of a text in front."""
    reads = "\n".join(f"y_{name} = Identity({name})" for name in constants)
    outputs = ", ".join(f"float[A] y_{name}" for name in constants)
    proto = parsed(f"(float[N] x) => ({outputs}) {{ {text} {reads} }}")
    model = ir.from_proto(proto)
    for name, array in constants.items():
        value = next(u for node in model.graph for u in node.inputs if u is not None and u.name == name)
        value.const_value = ir.tensor(array, name=name)
        model.graph.register_initializer(value)
    return model


def segment(source: ir.Model, result: ir.Model, name: str = "the model") -> Segment:
    """Returns a segment of all nodes, also of those that nothing reads."""
    both = [[str(v.name) for node in model.graph for v in node.outputs] for model in (source, result)]
    return Segment(name, Part([], both[0]), Part([], both[1]), "")


def check(source: dict[str, np.ndarray], result: dict[str, np.ndarray], text: str = "") -> list[str]:
    original, written = model_of(source, text), model_of(result)
    return check_weights(original, written, [segment(original, written)])


def damaged(array: np.ndarray, at: int = 0) -> np.ndarray:
    """Returns an array with one byte off."""
    changed = np.array(array, order="C")
    changed.reshape(-1)[at:].view(np.uint8)[:1] ^= 1
    return changed


Q, K, V = draw(64, 96), draw(16, 96), draw(16, 96)
W = draw(96, 48)
GAIN = (1 + 0.2 * RNG.standard_normal(96)).astype(np.float16)
CODES = draw(64, 3, 16, dtype=np.uint8)
ROWS = np.arange(64 * 96).reshape(64, 96).astype(np.float32)
FORMS = {
    "as it is": ({"w": W}, W),
    "packed blocks in another shape": ({"w": CODES}, CODES.reshape(64, 48)),
    "cast to 16 bits": ({"w": ROWS}, ROWS.astype(ml_dtypes.bfloat16)),
    "cast, and clipped": ({"w": ROWS * 1e5}, np.clip(ROWS * 1e5, -65504, 65504).astype(np.float16)),
    "widened": ({"w": W}, W.astype(np.float32)),
    "transposed": ({"w": W}, W.T),
    "joined rows": ({"q": Q, "k": K, "v": V}, np.concatenate([Q, K, V])),
    "joined transposes": ({"q": Q, "k": W}, np.concatenate([W.T, Q])),
    "joined columns": ({"q": Q, "r": Q * 2}, np.concatenate([Q * 2, Q], 1)),
    "times a gain": ({"w": W, "gain": GAIN}, W.T * GAIN),
    "joined, times a gain": ({"q": Q, "k": K, "gain": GAIN}, np.concatenate([K, Q]) * GAIN),
    "stacked gains": ({"a": GAIN, "b": GAIN[::-1].copy()}, np.stack([GAIN, GAIN[::-1]])),
    "a bias that is not there": ({"a": GAIN, "b": GAIN * 2}, np.concatenate([GAIN, 0 * GAIN[:16], GAIN * 2])),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_the_sources_numbers(name: str) -> None:
    source, result = FORMS[name]
    assert check(source, {"r": result, **{key: each for key, each in source.items() if key == "gain"}}) == []


@pytest.mark.parametrize("at", [0, 1003, -1])
@pytest.mark.parametrize("name", FORMS)
def test_one_byte_of_it_is_off(name: str, at: int) -> None:
    source, result = FORMS[name]
    with pytest.raises(NotEquivalent, match="differs in the model: r "):
        check(source, {"r": damaged(np.ascontiguousarray(result), at % result.size)})


def test_rows_of_zeros_do_not_hide_an_order() -> None:
    """Each row of zeros is like the others."""
    rows = Q.copy()
    rows[::2] = 0
    assert check({"w": rows}, {"r": rows}) == []
    changed = rows.copy()
    changed[[2, 3]] = rows[[3, 2]]
    with pytest.raises(NotEquivalent, match="r differs from w in line 2"):
        check({"w": rows}, {"r": changed})


def test_parts_where_the_original_splits() -> None:
    text = "p = MatMul(x, w) a, b = Split<axis = -1, num_outputs = 2>(p)"
    source = model_of({"w": W}, text)
    halves = {"a": W[:, :24].T, "b": np.ascontiguousarray(W[:, 24:])}
    written = model_of(halves)
    assert check_weights(source, written, [segment(source, written)]) == []
    others = model_of({"a": W[:, :20], "b": W[:, 20:]})
    assert sorted(check_weights(source, others, [segment(source, others)])) == ["a", "b", "w"]


def test_what_nodes_compute_from_constants() -> None:
    """A gain to which the original adds 1."""
    one = np.ones((), np.float32)
    gain = draw(96, dtype=np.float32)
    text = "plus = Add(gain, one)"
    assert check({"gain": gain, "one": one}, {"r": gain + one}, text) == []
    with pytest.raises(NotEquivalent, match="r differs from plus in line 5"):
        changed = gain + one
        changed[5] *= 1.01
        check({"gain": gain, "one": one}, {"r": changed}, text)


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_a_batch_norm_in_a_convolution(kind: str) -> None:
    shape = (48, 32, 3, 3) if kind == "Conv" else (32, 48, 3, 3)
    w, b, gain, shift, mean = (draw(*each, dtype=np.float32) for each in (shape, (48,), (48,), (48,), (48,)))
    variance = np.abs(draw(48, dtype=np.float32)) + 1
    source = {"w": w, "b": b, "gain": gain, "shift": shift, "mean": mean, "variance": variance}
    text = f"c = {kind}(x, w, b) n = BatchNormalization(c, gain, shift, mean, variance)"
    scale = gain / np.sqrt(variance + np.float32(1e-5))
    folded = w * (scale[:, None, None, None] if kind == "Conv" else scale[None, :, None, None])
    bias = (b - mean) * scale + shift
    assert check(source, {"r": folded, "s": bias}, text) == []
    folded[3, 3] *= 1.001
    with pytest.raises(NotEquivalent, match="r differs"):
        check(source, {"r": folded, "s": bias}, text)


def test_what_is_not_known_is_returned() -> None:
    """The weights that it may come from are, too: nothing else holds them."""
    assert check({"w": Q}, {"r": np.tanh(Q.astype(np.float32)) + 1}) == ["r", "w"]
    assert check({"w": Q}, {"w": Q, "ones": np.ones((4, 1), np.float16), "sizes": np.arange(3)}) == []


@pytest.mark.parametrize("of", [0, 1])
def test_a_row_that_was_not_there_is_all_one_number(of: int) -> None:
    """The bias of a matmul that had none, and the gain of such a norm."""
    row = np.full(96, of, np.float16)
    assert not check({"w": W}, {"w": W, "row": row})
    row[70] += np.float16(0.01)
    with pytest.raises(NotEquivalent, match="row is the same number again and again, but for element 70"):
        check({"w": W}, {"w": W, "row": row})


@pytest.mark.parametrize(
    ("rows", "text", "is_unread"),
    [
        ("N", "p = MatMul (x, w) y, z = Split <axis = -1, num_outputs = 2> (p)", True),
        ("N", "p = MatMul (x, w) q = Add (p, p) y = Slice (q, i0, i24, i2)", True),
        ("N", "p = MatMul (x, w) a, b = Split <axis = 0> (p, parts) y = Concat <axis = 0> (a, b)", False),
        ("48", "p = MatMul (x, w) y = Slice (p, i0, i24, i0)", False),
        ("N", "p = MatMul (x, w) q = MatMul (p, w) a = Slice (p, i0, i24, i2) y = Add (q, a)", False),
    ],
    ids=["split", "slice of a sum", "symbolic rows", "rows", "two products"],
)
def test_a_part_that_nothing_reads_may_be_missing(rows: str, text: str, is_unread: bool) -> None:
    given = {"i0": [0], "i2": [2], "i24": [24], "parts": [1, 2]}
    proto = parsed(
        f"(float[{rows}, 3, 96] x) => (float[R, 3, C] y) {{ {text} }}",
        w=W.astype(np.float32), **{name: np.array(numbers) for name, numbers in given.items()},
    )  # fmt: skip
    source = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    parts = Segment("the model", Part([], ["y"]), Part([], ["y_r"]), "")
    whole, first, last = (
        model_of({"r": W.astype(np.float32).T[:end][start:]}) for start, end in [(0, 48), (0, 24), (24, 48)]
    )
    assert check_weights(source, whole, [parts]) == []
    for model, is_enough in ((first, is_unread), (last, False)):
        with nullcontext() if is_enough else pytest.raises(NotEquivalent, match="lacks w, or a part of it"):
            check_weights(source, model, [parts])


def test_a_weight_is_missing() -> None:
    with pytest.raises(NotEquivalent, match="differs in the model: it lacks k, or a part of it"):
        check({"q": Q, "k": draw(64, 96)}, {"r": Q})


HIDDEN = np.triu(np.ones((64, 64), bool), 1)


@pytest.mark.parametrize("low", [None, -np.inf, -1e4, np.finfo(np.float32).min])
def test_a_mask_may_be_missing(low: float | None) -> None:
    """Causal attention holds none. One that holds other numbers, too, is a weight, and so are zeros."""
    mask = HIDDEN if low is None else np.where(HIDDEN, low, 0).astype(np.float32)
    assert check({"w": Q, "mask": mask}, {"w": Q}) == []
    for other in () if low is None else (mask + np.float32(1e-3), 0 * HIDDEN.astype(np.float32)):
        with pytest.raises(NotEquivalent, match="it lacks mask"):
            check({"w": Q, "mask": other}, {"w": Q})


def test_equal_weights_may_be_one() -> None:
    assert check({"a": Q, "b": Q.copy()}, {"r": Q}) == []
