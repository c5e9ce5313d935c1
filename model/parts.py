"""Prepares models to run without a file: their graph, and their large weights where these are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from twinop.deploy.ort_runs import Parts

from .weights import Stored, is_held, sizes

_LARGE = 16 * 1024  # bytes. Shape inference reads smaller ones (shapes, axes) from the graph.


def parts(model: ir.Model) -> Parts:
    """Returns a model for `ort_runs.run`. Its large weights are neither read nor copied."""
    if any(map(_large, [*model.graphs()][1:])):  # ONNX Runtime takes those of the main graph only
        model = model.clone()
        _move_to_main_graph(model)
    weights = {str(value.name): value.const_value for value in _large(model.graph)}
    with _replaced(model, {name: _stub(name, tensor) for name, tensor in weights.items() if tensor}):
        proto = ir.to_proto(model)
    unread = {name for name in weights if not _is_read(model.graph.initializers[name])}
    for index in reversed(range(len(proto.graph.initializer))):  # ONNX Runtime does not know these any more
        if proto.graph.initializer[index].name in unread:
            del proto.graph.initializer[index]
    sent = {name: _sent(tensor) for name, tensor in weights.items() if name not in unread}
    return Parts(proto.SerializeToString(), sent)


def _large(graph: ir.Graph) -> list[ir.Value]:
    """Returns the initializers that do not become a part of the model's bytes."""
    return [
        value
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None
        and tensor.dtype is not ir.DataType.STRING
        and tensor.nbytes > _LARGE
        and (_is_read(value) or not value.is_graph_input())
    ]


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _move_to_main_graph(model: ir.Model) -> None:
    names = {str(value.name) for graph in model.graphs() for value in graph.initializers.values()}
    names |= {str(value.name) for node in model.graph.all_nodes() for value in node.outputs}
    for index, graph in enumerate([*model.graphs()][1:]):
        for value in _large(graph):
            if value.is_graph_input():
                continue
            del graph.initializers[str(value.name)]
            name = f"{value.name}_of_{index}"
            while name in names:
                name += "_"
            names.add(name)
            value.name = name
            model.graph.register_initializer(value)


@contextmanager
def _replaced(model: ir.Model, stubs: dict[str, ir.TensorProtocol]) -> Iterator[None]:
    """Gives a model other tensors while it is serialised: stubs, and small ones that lie in files.

    Declared types of initializers go meanwhile: tools that change weights leave old ones behind.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    before = [(value.const_value, value.shape, value.type) for value in values]
    try:
        for value in values:
            tensor = value.const_value
            if value.graph is model.graph and str(value.name) in stubs:
                value.const_value = stubs[str(value.name)]
            elif tensor is not None and not isinstance(tensor, ir.StringTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=str(value.name))
            if not value.is_graph_input() and not value.is_graph_output():
                value.shape = value.type = None
        yield
    finally:
        for value, (tensor, shape, kind) in zip(values, before, strict=True):
            value.const_value, value.shape, value.type = tensor, shape, kind


def _stub(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("given", None, None, tensor.dtype, shape=shape, name=name)


def stored(tensor: Any) -> Any:
    """Returns a tensor of a file that another process can read, too; others as they are."""
    if isinstance(tensor, ir.ExternalTensor):
        return Stored(Path(tensor.path).absolute(), tensor.offset or 0, tensor.dtype, sizes(tensor))
    return tensor


def _sent(tensor: Any) -> Any:
    """Returns what the other process makes an array of."""
    return tensor.numpy() if is_held(tensor) else stored(tensor)
