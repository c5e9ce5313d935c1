"""Changes one thing in the file of an optimised decoder, as a defect of a rewrite or of a writer would."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

_PRODUCTS = ("CustomLinear", "CustomLinearQ")
_GATED = ("CustomLinearSwiglu", "CustomLinearQSwiglu")


class Mutated:
    """An optimised decoder, by layers."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        self.nodes = self.model.graph.node
        self.weights = {each.name: each for each in self.model.graph.initializer}

    def save(self, path: Path) -> None:
        onnx.save(self.model, path)

    def attention(self, layer: int) -> NodeProto:
        return [node for node in self.nodes if node.op_type == "CustomAttentionCached"][layer]

    def gated(self, layer: int) -> NodeProto:
        return [node for node in self.nodes if node.op_type in _GATED][layer]

    def maker(self, name: str) -> NodeProto:
        return next(node for node in self.nodes if name in node.output)

    def reader(self, name: str) -> NodeProto:
        return next(node for node in self.nodes if name in node.input)

    def layer(self, layer: int) -> list[NodeProto]:
        """Returns the nodes of a layer with weights: qkv, o, gate and up, down, and norms that are nodes."""
        attention, gated = self.attention(layer), self.gated(layer)
        found = [
            self.maker(attention.input[0]),
            self.reader(attention.output[0]),
            gated,
            self.reader(gated.output[0]),
        ]
        makers = [self.maker(each.input[0]) for each in (found[0], gated)]
        return found + [node for node in makers if node.op_type in ("CustomRmsNorm", "CustomAddRmsNorm")]

    def constants(self, node: NodeProto) -> list[int]:
        """Returns the indices of a node's inputs that are weights."""
        return [index for index, name in enumerate(node.input) if name in self.weights]

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


def _exchange(a: NodeProto, b: NodeProto, fields: dict[str, list[int]]) -> None:
    for field, indices in fields.items():
        for index in indices:
            one, other = getattr(a, field), getattr(b, field)
            one[index], other[index] = other[index], one[index]


def swap_weights(model: Mutated, layer: int) -> None:
    qkv, _, _, down, *_ = model.layer(layer)
    _exchange(qkv, down, {"input": model.constants(qkv)})


def swap_gate_and_up(model: Mutated, layer: int) -> None:
    node = model.gated(layer)
    for index in model.constants(node):
        model.change(
            node.input[index], lambda array: array.__setitem__(..., np.roll(array, len(array) // 2, 0))
        )


def change_scale(model: Mutated, layer: int) -> None:
    """The last bit of one scale, or of one weight in 16 bits."""
    node = model.layer(layer)[1]
    model.change(node.input[model.constants(node)[-1]], lambda a: a.view(np.uint16).__ixor__(_one_bit(a)))


def _one_bit(array: np.ndarray) -> np.ndarray:
    mask = np.zeros(array.shape, np.uint16)
    mask[7, 1] = 1
    return mask


def _set(node: NodeProto, name: str, by: Callable[[float], float]) -> None:
    [attribute] = [each for each in node.attribute if each.name == name]
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = int(by(attribute.i))
    else:
        attribute.f = by(attribute.f)


def change_attribute(model: Mutated, layer: int) -> None:
    _set(model.attention(layer), "scale", lambda scale: scale * 1.1)


def change_eps(model: Mutated, layer: int) -> None:
    *_, node = [
        each for each in model.layer(layer) if each.op_type in (*_GATED, "CustomRmsNorm", "CustomAddRmsNorm")
    ]
    _set(node, "eps" if node.op_type.endswith("RmsNorm") else "rms_eps", lambda eps: eps * 10)


def change_window(model: Mutated, layer: int) -> None:
    _set(model.attention(layer), "window", lambda window: 8)


def leave_out_layer(model: Mutated, layer: int) -> None:
    instead = dict(zip(model.hidden(layer + 1), model.hidden(layer), strict=True))
    for node in model.nodes:
        node.input[:] = [instead.get(name, name) for name in node.input]


def exchange_layers(model: Mutated, layer: int) -> None:
    for one, other in zip(model.layer(layer), model.layer(layer + 1), strict=True):
        _exchange(one, other, {"input": model.constants(one)})


def exchange_caches(model: Mutated, layer: int) -> None:
    one, other = model.attention(layer), model.attention(layer + 1)
    _exchange(one, other, {"input": [1, 2], "output": [1, 2]})


def exchange_rows(model: Mutated, layer: int) -> None:
    """A row of q with one of k, and a row of k with one of v."""
    node, width = model.layer(layer)[0], 128

    def exchange(array: np.ndarray) -> None:
        array[[3, width + 3]] = array[[width + 3, 3]]
        array[[width + 5, width + 69]] = array[[width + 69, width + 5]]

    model.change(node.input[model.constants(node)[0]], exchange)


def change_gain(model: Mutated, layer: int) -> None:
    """One element of a norm's gain; where products have it, the column of the weight."""
    *_, norm = model.layer(layer)
    gated = model.gated(layer)
    name = norm.input[-1] if norm.op_type.endswith("RmsNorm") else gated.input[1]
    model.change(
        name, lambda array: array.reshape(-1, array.shape[-1])[:, 5].__imul__(array.dtype.type(1.02))
    )


def change_embedding(model: Mutated, layer: int) -> None:
    name = next(
        node.input[0] for node in model.nodes if node.op_type == "Gather" and node.input[0] in model.weights
    )
    model.change(name, lambda array: array.__setitem__(77, array[78]))


def change_head(model: Mutated, layer: int) -> None:
    node = model.maker("logits")
    model.change(node.input[model.constants(node)[0]], lambda array: array.__setitem__(77, array[78]))


def change_table(model: Mutated, layer: int) -> None:
    model.change(model.attention(layer).input[5], lambda array: array.__setitem__([6, 7], array[[7, 6]]))


MUTATIONS: dict[str, Callable[[Mutated, int], None]] = {
    "two weights of one layer swapped": swap_weights, "gate and up swapped": swap_gate_and_up,
    "one scale or weight off": change_scale, "one attribute changed": change_attribute,
    "one norm's eps": change_eps, "one window": change_window, "a layer left out": leave_out_layer,
    "two layers exchanged": exchange_layers, "caches of two layers exchanged": exchange_caches,
    "one row of q, k and v exchanged": exchange_rows, "one norm's gain": change_gain,
    "one row of the embedding": change_embedding, "one column of the head": change_head,
    "two rows of the rotary table": change_table,
}  # fmt: skip
