"""optimize/stream.py: every segment of a written file is compared with the original's, one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoder_graphs
import numpy as np
import onnx_ir as ir
import pytest

from twinop.optimize import decoders
from twinop.optimize.cached_attention import SHARED_CACHES
from twinop.optimize.equivalence import NotEquivalent
from twinop.optimize.load import load
from twinop.optimize.segments import Part, Segment
from twinop.optimize.stream import stream

LAYERS = 3
SIZES = decoder_graphs.Sizes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the file of a decoder by its precision."""
    root = tmp_path_factory.mktemp("decoders")

    def path(precision: str) -> Path:
        if not (root / precision).exists():
            decoder_graphs.write(root / precision, SIZES, precision, LAYERS)
        return root / precision / "model.onnx"

    return path


def segments_of_decoder() -> list[Segment]:
    """Cuts a decoder of `decoder_graphs` by hand."""

    def before(i: int) -> list[str]:
        if i in (0, LAYERS):
            return ["/embedded"] if i == 0 else [f"/model.layers.{i}.final_norm_layernorm"]
        return [f"/model.layers.{i}.input_layernorm", f"/model.layers.{i}.input_layernorm/sum"]

    caches = [[f"present.{i}.{kind}" for kind in ("key", "value")] for i in range(LAYERS)]
    parts = [("embedding", Part([], before(0)))]
    parts += [(f"layer {i}", Part(before(i), before(i + 1) + caches[i])) for i in range(LAYERS)]
    parts += [("head", Part(before(LAYERS), ["logits"]))]
    return [Segment(name, part, part, "") for name, part in parts]


def pair(path: Path) -> tuple[ir.Model, ir.Model]:
    found = load(path), load(path)
    for model in found:
        decoders.set_sizes(model)
    return found


DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int4": "float16"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
def test_a_decoder_is_what_it_is(folder: Callable[[str], Path], precision: str, shared: bool) -> None:
    original, result = pair(folder(precision))
    original.graph.meta[SHARED_CACHES] = shared
    seen = list[tuple[int, int]]()
    found = stream(
        segments_of_decoder(), original, result, None, DTYPES[precision],
        progress=lambda index, count: seen.append((index, count)),
    )  # fmt: skip
    assert found.error == found.own_error == 0.0 < found.own_noise < 0.1
    assert seen == [(index, LAYERS + 2) for index in range(LAYERS + 2)]


def weight(model: ir.Model, name: str) -> ir.Value:
    return model.graph.initializers[name]


def change(model: ir.Model, name: str, by: Callable[[np.ndarray], np.ndarray]) -> None:
    value = weight(model, name)
    assert value.const_value is not None
    array = by(np.array(value.const_value.numpy()))
    value.const_value = ir.tensor(array, dtype=value.const_value.dtype, name=name)


def swapped_weights(model: ir.Model, suffix: str) -> None:
    gate, up = (weight(model, f"model.layers.1.mlp.{each}_proj.MatMul.{suffix}") for each in ("gate", "up"))
    gate.const_value, up.const_value = up.const_value, gate.const_value


def swapped_rows(array: np.ndarray, at: int) -> np.ndarray:
    array[[at, at + 1]] = array[[at + 1, at]]
    return array


def swapped_columns(array: np.ndarray, at: int) -> np.ndarray:
    return swapped_rows(array.T, at).T


def one_larger(array: np.ndarray) -> np.ndarray:
    array[3] += np.asarray(0.1, array.dtype)
    return array


def node(model: ir.Model, name: str) -> ir.Node:
    return next(each for each in model.graph if each.outputs[0].name == name)


def another_number(model: ir.Model, name: str, attribute: str, number: Any) -> None:
    kind = ir.AttrFloat32 if isinstance(number, float) else ir.AttrInt64
    node(model, name).attributes[attribute] = kind(attribute, number)


def exchanged_caches(model: ir.Model) -> None:
    first, second = (node(model, f"/model.layers.{i}.attn") for i in (1, 2))
    for index in (3, 4):
        a, b = first.inputs[index], second.inputs[index]
        first.replace_input_with(index, b)
        second.replace_input_with(index, a)


Q, KV = SIZES.heads * SIZES.head, SIZES.kv_heads * SIZES.head
ATTENTION = "/model.layers.1.attn"
QKV = "model.layers.1.attn.qkv_proj.MatMul.weight"
DEFECTS: dict[str, tuple[str, str, Callable[[ir.Model], None]]] = {
    "gate and up swapped": ("float16", "layer 1", lambda m: swapped_weights(m, "weight")),
    "gate and up swapped in 4 bits": ("int4", "layer 1", lambda m: swapped_weights(m, "weight_Q4")),
    "two columns of q": ("float16", "layer 1", lambda m: change(m, QKV, lambda a: swapped_columns(a, 5))),
    "two columns of k": ("float16", "layer 1", lambda m: change(m, QKV, lambda a: swapped_columns(a, Q + 5))),
    "two columns of v": (
        "float16", "layer 1", lambda m: change(m, QKV, lambda a: swapped_columns(a, Q + KV + 5))
    ),
    "two rows of v in 4 bits": (
        "int4", "layer 1", lambda m: change(m, f"{QKV}_Q4", lambda a: swapped_rows(a, Q + KV + 5))
    ),
    "scales of a row": (
        "int4", "layer 1", lambda m: change(m, f"{QKV}_scales", lambda a: swapped_rows(a, Q + 5))
    ),
    "a scale of attention": ("float16", "layer 1", lambda m: another_number(m, ATTENTION, "scale", 0.13)),
    "a window": ("float16", "layer 1", lambda m: another_number(m, ATTENTION, "local_window_size", 12)),
    "an epsilon": (
        "float32", "layer 1",
        lambda m: another_number(m, "/model.layers.1.post_attention_layernorm", "epsilon", 1e-2),
    ),
    "a norm's gain": (
        "float16", "layer 0",
        lambda m: change(m, "model.layers.1.input_layernorm.weight", one_larger),
    ),
    "caches of two layers exchanged": ("float16", "layer 1", exchanged_caches),
    "two columns of the head": (
        "float16", "head", lambda m: change(m, "lm_head.MatMul.weight", lambda a: swapped_columns(a, 9))
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_and_its_layer_named(folder: Callable[[str], Path], defect: str) -> None:
    precision, where, spoil = DEFECTS[defect]
    original, result = pair(folder(precision))
    spoil(result)
    with pytest.raises(NotEquivalent, match=f"^{where}: "):
        stream(segments_of_decoder(), original, result, None, DTYPES[precision])
