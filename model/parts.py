"""Prepares models to run without a file: their graph, and their large weights where these are."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import LiftSubgraphInitializersToMainGraphPass

from twinop.deploy.ort_runs import Parts

from .files import other_weights
from .weights import Stored, is_held, sizes

_LARGE = 16 * 1024  # bytes. Shape inference reads smaller ones (shapes, axes) from the graph.


def parts(model: ir.Model) -> Parts:
    """Returns a model for `ort_runs.run`. Its large weights are neither read nor copied."""
    if any(map(_large, [*model.graphs()][1:])):  # ONNX Runtime takes those of the main graph only
        model = model.clone()
        LiftSubgraphInitializersToMainGraphPass()(model)
    weights = {str(value.name): value.const_value for value in _large(model.graph) if value.const_value}
    with other_weights(model):
        for value in (value for graph in model.graphs() for value in graph.initializers.values()):
            tensor, name = value.const_value, str(value.name)
            if value.graph is model.graph and name in weights:
                kind, shape = weights[name].dtype, ir.Shape(weights[name].shape.numpy())
                value.const_value = ir.ExternalTensor("given", None, None, kind, shape=shape, name=name)
            elif tensor is not None and not isinstance(tensor, ir.StringTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
        proto = ir.to_proto(model)
    unread = {name for name in weights if not _is_read(model.graph.initializers[name])}
    for index in reversed(range(len(proto.graph.initializer))):  # ONNX Runtime does not know these any more
        if proto.graph.initializer[index].name in unread:
            del proto.graph.initializer[index]
    sent = {  # what the other process makes an array of
        name: each.numpy() if is_held(each) else stored(each)
        for name, each in weights.items()
        if name not in unread
    }
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


def stored(tensor: Any) -> Any:
    """Returns a tensor of a file that another process can read, too; others as they are."""
    if isinstance(tensor, ir.ExternalTensor):
        return Stored(Path(tensor.path).absolute(), tensor.offset or 0, tensor.dtype, sizes(tensor))
    return tensor
