"""A change of a written file is found without that its layer is compared in all ways.

The layers of a decoder are of one kind, of which one layer is compared in all ways. The others run in a
stream, and their bytes are compared: that finds each of these mutations.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from onnx import NodeProto, numpy_helper

from twinop.optimize import decoders, optimize_folder, segments, verifier
from twinop.optimize.equivalence import NotEquivalent
from twinop.optimize.load import load

SIZES = Sizes(width=256, inner=256, vocab=512, context=64, table=512)
LAYERS, CHANGED = 4, 1
MOST_BYTES = 600 << 10  # of a layer in fp16
BYTES = {
    "one scale or weight off", "two layers exchanged", "one row of q, k and v exchanged", "one norm's gain",
    "one norm's eps", "one row of the embedding", "one column of the head",
}  # fmt: skip

_GATED, _NORMS = ("CustomLinearSwiglu", "CustomLinearQSwiglu"), ("CustomRmsNorm", "CustomAddRmsNorm")


class Mutated:
    """The file of an optimised decoder, by layers."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        self.nodes = self.model.graph.node
        self.weights = {each.name: each for each in self.model.graph.initializer}

    def of_type(self, *op_types: str) -> list[NodeProto]:
        return [node for node in self.nodes if node.op_type in op_types]

    def attention(self, layer: int) -> NodeProto:
        return self.of_type("CustomAttentionCached")[layer]

    def gated(self, layer: int) -> NodeProto:
        return self.of_type(*_GATED)[layer]

    def maker(self, name: str) -> NodeProto:
        return next(node for node in self.nodes if name in node.output)

    def reader(self, name: str) -> NodeProto:
        return next(node for node in self.nodes if name in node.input)

    def layer(self, layer: int) -> list[NodeProto]:
        """Returns the nodes of a layer with weights: qkv, o, gate and up, down, and norms that are nodes."""
        attention, gated = self.attention(layer), self.gated(layer)
        qkv = self.maker(attention.input[0])
        makers = [self.maker(each.input[0]) for each in (qkv, gated)]
        norms = [node for node in makers if node.op_type in _NORMS]
        return [qkv, self.reader(attention.output[0]), gated, self.reader(gated.output[0]), *norms]

    def constants(self, node: NodeProto) -> list[int]:
        """Returns the indices of a node's inputs that are weights."""
        return [index for index, name in enumerate(node.input) if name in self.weights]

    def weight(self, node: NodeProto, at: int = 0) -> str:
        return node.input[self.constants(node)[at]]

    def change(self, name: str, by: Callable[[np.ndarray], object]) -> None:
        array = np.array(numpy_helper.to_array(self.weights[name]))
        before = array.tobytes()
        by(array)
        assert array.tobytes() != before
        self.weights[name].CopyFrom(numpy_helper.from_array(array, name))

    def hidden(self, layer: int) -> list[str]:
        """Returns what a layer reads of the one before: its norm where a node computes it, and the sum."""
        first = self.layer(layer)[0]
        maker = self.maker(first.input[0])
        return [first.input[0], *([maker.output[1]] if maker.op_type == "CustomAddRmsNorm" else [])]


def halves(array: np.ndarray) -> None:
    array[:] = np.roll(array, len(array) // 2, 0)


def last_bit(array: np.ndarray) -> None:
    array.view(np.uint16)[7, 1] ^= 1


def column(array: np.ndarray) -> None:
    array.reshape(-1, array.shape[-1])[:, 5] *= array.dtype.type(1.02)


def copied_row(array: np.ndarray) -> None:
    array[77] = array[78]


def rows_of_table(array: np.ndarray) -> None:
    array[[6, 7]] = array[[7, 6]]


def rows_of_qkv(array: np.ndarray) -> None:
    """A row of q with one of k, and a row of k with one of v."""
    array[[3, 131]] = array[[131, 3]]
    array[[133, 197]] = array[[197, 133]]


def exchange(one: Any, other: Any, indices: list[int]) -> None:
    for index in indices:
        one[index], other[index] = other[index], one[index]


def number(node: NodeProto, name: str, by: Callable[[float], float]) -> None:
    [attribute] = [each for each in node.attribute if each.name == name]
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = int(by(attribute.i))
    else:
        attribute.f = by(attribute.f)


def swap_weights(model: Mutated, layer: int) -> None:
    qkv, _, _, down, *_ = model.layer(layer)
    exchange(qkv.input, down.input, model.constants(qkv))


def swap_gate_and_up(model: Mutated, layer: int) -> None:
    for index in model.constants(node := model.gated(layer)):
        model.change(node.input[index], halves)


def change_eps(model: Mutated, layer: int) -> None:
    *_, node = [each for each in model.layer(layer) if each.op_type in _GATED + _NORMS]
    number(node, "eps" if node.op_type in _NORMS else "rms_eps", lambda eps: eps * 10)


def leave_out_layer(model: Mutated, layer: int) -> None:
    instead = dict(zip(model.hidden(layer + 1), model.hidden(layer), strict=True))
    for node in model.nodes:
        node.input[:] = [instead.get(name, name) for name in node.input]


def exchange_layers(model: Mutated, layer: int) -> None:
    for one, other in zip(model.layer(layer), model.layer(layer + 1), strict=True):
        exchange(one.input, other.input, model.constants(one))


def exchange_caches(model: Mutated, layer: int) -> None:
    one, other = model.attention(layer), model.attention(layer + 1)
    exchange(one.input, other.input, [1, 2])
    exchange(one.output, other.output, [1, 2])


def change_gain(model: Mutated, layer: int) -> None:
    """One element of a norm's gain; where products have it, the column of the weight."""
    *_, norm = model.layer(layer)
    model.change(norm.input[-1] if norm.op_type in _NORMS else model.gated(layer).input[1], column)


def change_embedding(model: Mutated, layer: int) -> None:
    tables = [node.input[0] for node in model.of_type("Gather") if node.input[0] in model.weights]
    model.change(tables[0], copied_row)


MUTATIONS: dict[str, Callable[[Mutated, int], None]] = {
    "two weights of one layer swapped": swap_weights,
    "gate and up swapped": swap_gate_and_up,
    "one scale or weight off": lambda m, i: m.change(m.weight(m.layer(i)[1], -1), last_bit),
    "one attribute changed": lambda m, i: number(m.attention(i), "scale", lambda scale: scale * 1.1),
    "one norm's eps": change_eps,
    "one window": lambda m, i: number(m.attention(i), "window", lambda _: 8),
    "a layer left out": leave_out_layer,
    "two layers exchanged": exchange_layers,
    "caches of two layers exchanged": exchange_caches,
    "one row of q, k and v exchanged": lambda m, i: m.change(m.weight(m.layer(i)[0]), rows_of_qkv),
    "one norm's gain": change_gain,
    "one row of the embedding": change_embedding,
    "one column of the head": lambda m, i: m.change(m.weight(m.maker("logits")), copied_row),
    "two rows of the rotary table": lambda m, i: m.change(m.attention(i).input[5], rows_of_table),
}
Optimised = Callable[[str], tuple[Path, Callable[[Path], None]]]


@pytest.fixture(scope="module")
def optimised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Optimised]:
    """Returns a decoder's optimised file, and what compares all segments of a file with the original's."""
    made = dict[str, tuple[Path, Callable[[Path], None]]]()
    run = verifier.Verifier._run_segments

    def optimise(precision: str) -> tuple[Path, Callable[[Path], None]]:
        if precision not in made:
            folder, kept = tmp_path_factory.mktemp(precision), list[tuple[verifier.Verifier, ir.Model]]()

            def remember(self: verifier.Verifier, parts: Any, original: ir.Model, written: ir.Model) -> None:
                kept.append((self, original))
                run(self, parts, original, written)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(verifier.Verifier, "_run_segments", remember)
                source = write(folder / "old", SIZES, precision, LAYERS)
                report = optimize_folder(source, folder / "new", device="cuda")
            assert report.fused["attention over a cache"] == LAYERS and not report.reverted
            [(used, original)] = kept

            def verify(path: Path) -> None:
                decoders.make_runnable(written := load(path))
                parts = verifier.cut(original, written)
                verifier.check_weights(original, written, parts)
                run(used, parts, original, written)

            made[precision] = folder / "new/model.onnx", verify
        return made[precision]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "cut", partial(segments.cut, most_bytes=MOST_BYTES))
        yield optimise


@pytest.mark.parametrize("precision", ["float16", "int4"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str, precision: str, optimised: Optimised, tmp_path: Path) -> None:
    path, verify = optimised(precision)
    mutated = Mutated(path)
    MUTATIONS[name](mutated, CHANGED)
    onnx.save(mutated.model, tmp_path / "model.onnx")
    with pytest.raises(NotEquivalent) as found:
        verify(tmp_path / "model.onnx")
    assert str(found.value).startswith("differs in ") or name not in BYTES, found.value


@pytest.mark.parametrize("precision", ["float16", "int4"])
def test_the_same_file_passes(precision: str, optimised: Optimised, tmp_path: Path) -> None:
    path, verify = optimised(precision)
    onnx.save(onnx.load(path), tmp_path / "model.onnx")
    verify(tmp_path / "model.onnx")
