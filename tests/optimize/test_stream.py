"""optimize/stream.py: every segment of a written file is compared with the original's, one at a time."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import decoder_graphs
import numpy as np
import onnx_ir as ir
import pytest
from optimizing import nodes, parsed

from twinop.deploy.ort_process import SERVER
from twinop.errors import ExportError
from twinop.optimize import decoders, sliced
from twinop.optimize.equivalence import ACCEPTED, NotEquivalent
from twinop.optimize.load import load
from twinop.optimize.segments import Part, Segment, cut
from twinop.optimize.stream import stream
from twinop.record.tolerance import MAX_USABLE_ERROR


def change(model: ir.Model, name: str, by: Callable[[np.ndarray], np.ndarray]) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    array = by(np.array(value.const_value.numpy()))
    value.const_value = ir.tensor(array, dtype=value.const_value.dtype, name=name)


def swapped_rows(array: np.ndarray, at: int) -> np.ndarray:
    array[[at, at + 1]] = array[[at + 1, at]]
    return array


def set_window(model: ir.Model, window: int) -> None:
    [_, attention, _] = nodes(model, "GroupQueryAttention")
    attention.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window)


@pytest.mark.parametrize(("window", "changed"), [(12, 13), (1024, 1023)])
def test_a_window_within_the_prompt(window: int, changed: int, tmp_path: Path) -> None:
    path = decoder_graphs.write(tmp_path / "old", decoder_graphs.Sizes(), "float16", 3) / "model.onnx"
    original, result = load(path), load(path)
    for model in (original, result):
        decoders.set_sizes(model)
        set_window(model, window)
    segments = cut(original, result, most_bytes=480 << 10)
    seen = list[tuple[int, int]]()
    found = stream(
        segments, original, result, None, "float16",
        progress=lambda index, count: seen.append((index, count)),
    )  # fmt: skip
    assert found.error == found.own_error == 0.0 < found.own_noise < 0.1
    assert seen == [(index, len(segments)) for index in range(len(segments))]
    set_window(result, changed)
    with pytest.raises(NotEquivalent, match="^layer 2 of 3"):
        stream(segments, original, result, None, "float16")


WIDTH = 64
rng = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (rng.standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(dtype)


def cut_at(model: ir.Model, *names: Sequence[str]) -> list[Segment]:
    """Cuts a model where some values cross."""
    borders = [[], *map(list, names), [str(value.name) for value in model.graph.outputs]]
    parts = [Part(before, after) for before, after in pairwise(borders)]
    return [Segment(f"part {index}", part, part, "") for index, part in enumerate(parts)]


def a_unet() -> tuple[ir.Model, list[Segment]]:
    """Down and up again, with a skip: sizes must be even."""
    constants = {
        "w0": normal(8, 4, 3, 3) / 2, "w1": normal(16, 8, 3, 3) / 2, "w2": normal(16, 8, 2, 2) / 2,
        "w3": normal(4, 16, 3, 3) / 2, "scale": 1 + normal(16), "bias": normal(16),
    }  # fmt: skip
    text = """
        a = Conv<pads=[1, 1, 1, 1]>(x, w0)  b = Relu(a)
        c = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(b, w1)
        n = InstanceNormalization(c, scale, bias)  d = Sigmoid(n)  e = Mul(n, d)
        f = ConvTranspose<strides=[2, 2]>(e, w2)  s = Concat<axis=1>(f, b)
        y = Conv<pads=[1, 1, 1, 1]>(s, w3)
    """
    model = ir.from_proto(parsed(f"(float[B, 4, H, W] x) => (float[B, 4, H, W] y) {{ {text} }}", **constants))
    return model, cut_at(model, ["b"], ["e", "b"])


def test_another_model_runs_on_one_case() -> None:
    original, segments = a_unet()
    result = original.clone()
    found = stream(segments, original, result, None, "float32")
    assert found.error == found.own_error == 0 < found.own_noise < 1e-4
    change(result, "w2", lambda array: swapped_rows(array, 3))
    with pytest.raises(NotEquivalent, match="^part 2: "):
        stream(segments, original, result, None, "float32")


def test_ctrl_c_ends_the_run_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(*_: Any, **__: Any) -> None:
        SERVER.run(time.sleep, 600)  # type: ignore[arg-type]  # it never gets to what is no list

    def interrupt(index: int, count: int) -> None:
        raise KeyboardInterrupt

    original, segments = a_unet()
    monkeypatch.setattr(sliced, "run", sleep)
    with pytest.raises(KeyboardInterrupt):
        stream(segments, original, original, None, "float32", progress=interrupt)


def test_sizes_are_tried_until_the_original_runs() -> None:
    original, segments = a_unet()
    value = original.graph.inputs[0]
    value.shape = ir.Shape(["B", 4, "S", "S"])
    seen = list[int]()
    stream(segments, original, original, None, "float32", progress=lambda index, count: seen.append(index))
    assert seen == [0, 1, 2]  # 32 is even


EXPERTS = 24


def experts() -> ir.Model:
    """Two of many experts are chosen for each token; some are chosen for none."""
    text = """
        logits = MatMul(x, router)  biased = Add(logits, few)  shares = Softmax<axis=-1>(biased)
        top, index = TopK(shares, two)  w = Gather(weights, index)
        u = Unsqueeze(x, axes)  v = MatMul(u, w)  share = Unsqueeze(top, last)
        scaled = Mul(v, share)  y = ReduceSum<keepdims=0>(scaled, last2)
    """
    few = np.where(np.arange(EXPERTS) < 4, 0, -100).astype(np.float32)
    constants = {
        "router": normal(WIDTH, EXPERTS), "few": few, "two": np.array([2], np.int64),
        "weights": normal(EXPERTS, WIDTH, WIDTH),
        "axes": np.array([1, 2], np.int64), "last": np.array([2, 3], np.int64),
        "last2": np.array([1, 2], np.int64),
    }  # fmt: skip
    return ir.from_proto(parsed(f"(float[B, {WIDTH}] x) => (float[B, {WIDTH}] y) {{ {text} }}", **constants))


def test_each_expert_is_forced_once() -> None:
    original = experts()
    segments, result = cut_at(original), original.clone()
    stream(segments, original, result, None, "float32")
    change(result, "weights", lambda array: np.concatenate([array[:21], swapped_rows(array[21:], 0)]))
    with pytest.raises(NotEquivalent, match="^part 0: "):
        stream(segments, original, result, None, "float32")


def half(text: str, **given: np.ndarray) -> ir.Model:
    return ir.from_proto(parsed(f"(float16[B, {WIDTH}] x) => (float16[B, {WIDTH}] y) {{ {text} }}", **given))


def test_numbers_near_the_end_of_fp16_are_refused() -> None:
    one = {"one": np.float16(1)}
    original = half("a = Mul(x, one)  y = Relu(a)", **one)
    for scale, is_refused in ((2000.0, False), (15000.0, True)):
        scales = {"up": np.float16(scale), "down": np.float16(1 / scale)}
        result = half("b = Mul(x, up)  c = Mul(b, down)  y = Relu(c)", **scales)
        if not is_refused:
            stream(cut_at(original), original, result, None, "float16")
            continue
        with pytest.raises(NotEquivalent, match="part 0: b reaches .* more than half of what float16 has"):
            stream(cut_at(original), original, result, None, "float16")
    large = half("a = Mul(x, up)  b = Mul(a, down)  y = Relu(b)", **scales)  # the original has them, too
    other = half("d = Mul(x, up)  b = Mul(d, down)  y = Relu(b)", **scales)
    stream(cut_at(large), large, other, None, "float16")


def test_what_fails_is_named() -> None:
    original = half("y = Relu(x)")
    fails = half("z = Concat<axis=1>(x, x)  w = MatMul(z, x)  y = Relu(w)")
    with pytest.raises(NotEquivalent, match="^part 0: the result fails: "):
        stream(cut_at(original), original, fails, None, "float16")
    with pytest.raises(ExportError, match="^part 0: the original fails: "):
        stream(cut_at(original), fails, original, None, "float16")


def test_what_accumulates_is_compared_at_the_outputs() -> None:
    """Each part has an error that is accepted, and all of them together do not."""
    names = [f"v{i}" for i in range(12)]
    text = "".join(f" {b} = Mul({a}, one)" for a, b in pairwise(["x", *names]))
    original = half(f"{text} y = Abs(v11)", one=np.float16(1))
    result = half(f"{text} y = Abs(v11)", one=np.float16(1.00195))
    with pytest.raises(NotEquivalent, match="part .*: y differs .* after all segments before"):
        stream(cut_at(original, *([name] for name in names)), original, result, None, "float16")


def test_the_outputs_of_a_chaotic_model_may_differ_as_much_as_its_own() -> None:
    """Each part makes a difference larger, so that the original's own noise is above what is usable."""
    names = [f"v{i}" for i in range(5)]
    text = "".join(f" m{b} = Mul({a}, k) {b} = Sin(m{b})" for a, b in pairwise(["x", *names]))
    original, result = (half(f"{text} y = Abs(v4)", k=np.float16(k)) for k in (3.5, 3.502))
    segments = cut_at(original, *([name] for name in names))
    streamed = stream(segments, original, result, None, "float16")
    assert streamed.own_noise > MAX_USABLE_ERROR and streamed.own_error > ACCEPTED["float16"]
