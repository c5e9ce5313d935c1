"""Reads a model's file, and refuses what twinop cannot optimise."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from twinop.deploy import wire
from twinop.deploy.custom_nodes import load_model
from twinop.errors import ExportError, TwinopError
from twinop.model import weights
from twinop.model.calls import name_standard_domain
from twinop.model.weights import Stored
from twinop.system.quiet import quiet

from . import graph as g

FILES = "files of external data"
_BODIES_IR_VERSION = 8  # the first with function bodies
Held = Mapping[str, weights.Held]


def load(path: Path, held: Held = MappingProxyType({})) -> ir.Model:
    """Reads a model, and sorts its nodes. Large weights stay in their files (`Stored`), or are held in memory
    and have no numbers there. ExportError: the file is not a model, or its weights are missing."""
    read_proto(path)
    try:
        with quiet():  # onnx_ir warns of what `_check_values` refuses
            model = ir.from_proto(proto := wire.read(path))
        for graph in [model.graph, *(function.graph for function in model.functions.values())]:
            graph.sort()  # ONNX Runtime takes nodes in any order, and its converter to float16 writes them so
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # onnx_ir names each message that it was reading
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [type(cause).__name__])[0][:200].partition(". Please")[0]
        how = " with zipmap=False (skl2onnx)" if reason.startswith("Map") else ""
        raise ExportError(
            f"{path}: onnx_ir cannot read it: {reason}. Check it with onnx.checker.check_model, or export "
            f"the model again{how}"
        ) from error
    _check_initializers(path, proto)
    for node in model.graph.all_nodes():
        node.device_configurations = ()  # ONNX Runtime does not read them
        if node.op_type == "MeanVarianceNormalization" and node.domain in ("", "ai.onnx"):
            node.attributes.setdefault("axes", ir.AttrInt64s("axes", [0, 2, 3]))  # onnx's inference lacks it
        for value in node.outputs if node.domain == "com.microsoft.nchwc" else ():
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)  # its only one; no inference has it
    name_standard_domain(model)
    for domain in {node.domain for node in model.graph.all_nodes()} - model.graph.opset_imports.keys():
        known = [each.since_version for each in onnx.defs.get_all_schemas() if each.domain == domain]
        model.graph.opset_imports[domain] = max(known, default=1)  # as ONNX Runtime does
    _name_sizes(model)
    _forget_shapes(model)
    if not len(model.graph) and not model.graph.outputs:
        raise ExportError(f"{path}: is not an ONNX model: it has no nodes and no outputs")
    attributes = (each for node in model.graph.all_nodes() for each in node.attributes.values())
    if any(isinstance(each.value, ir.ExternalTensor) for each in attributes):
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _place_weights(path, model, held)
    _check_values(path, model)
    return model


def reopen(path: Path) -> ir.Model:
    """Reads a model that twinop has written, as it is; large weights stay in their files, as in `load`."""
    model = ir.from_proto(wire.read(path))
    _place_weights(path, model)
    return model


def read_proto(path: Path) -> onnx.ModelProto:
    """Reads a model without its weights, with the checks that a session makes; ExportError: they fail."""
    try:
        return load_model(path).proto
    except (TwinopError, OSError) as error:
        raise ExportError(str(error)) from error


def _check_initializers(path: Path, proto: onnx.ModelProto) -> None:
    """Raises ExportError for two initializers of one name and other numbers: ONNX Runtime takes either."""
    known, names = dict[str, object](), Counter(each.name for each in proto.graph.initializer)
    for each in (each for each in proto.graph.initializer if names[each.name] > 1):
        tensor = ir.from_proto(each)
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = path.parent
        content = tensor.dtype, tensor.shape, tensor.tobytes()
        if known.setdefault(each.name, content) != content:
            raise ExportError(
                f"{path}: has two initializers {each.name} of other numbers, and ONNX Runtime takes either. "
                "Remove one, or export the model again"
            )


def _place_weights(path: Path, model: ir.Model, held: Held = MappingProxyType({})) -> None:
    """Lets large external data stay in its files, also behind links, as in Hugging Face's cache, and reads
    the rest; ExportError: the data lies in another folder, or ends before its tensor does."""
    files = set[Path]()
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        tensor = value.const_value
        _check_bytes(path, tensor)
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = _placed(path, tensor, files, held.get(str(value.name)))
    inner = (node for function in model.functions.values() for node in function.all_nodes())
    for node in (*model.graph.all_nodes(), *inner):
        for name, attribute in [*node.attributes.items()]:
            _check_bytes(path, attribute.value)
            if isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _placed(path, attribute.value, files))
    model.meta[FILES] = files - {path}


def _check_bytes(path: Path, tensor: object) -> None:
    """Raises ExportError for a tensor whose bytes in the model's file do not fit its dtype and shape."""
    if not isinstance(tensor, ir.ExternalTensor | ir.TensorProtoTensor):
        return
    kind, is_outside = tensor.dtype, isinstance(tensor, ir.ExternalTensor)
    if kind is ir.DataType.UNDEFINED or (kind is ir.DataType.STRING and is_outside):
        raise ExportError(f"{path}: {tensor.name} is of dtype {kind.name.lower()}. Export the model again")
    if isinstance(tensor.raw, onnx.TensorProto) and tensor.raw.HasField("raw_data"):
        _require_bytes(path, tensor, len(tensor.raw.raw_data), "its raw_data")


def _require_bytes(path: Path, tensor: ir.TensorProtocol, has: int, where: object) -> None:
    if has != tensor.nbytes or min(tensor.shape.numpy(), default=0) < 0:
        raise ExportError(
            f"{path}: {tensor.name} has {tensor.nbytes} bytes, and {where} has {has} for it. Copy the "
            "file again, or export the model again"
        )


def _placed(
    path: Path, tensor: ir.ExternalTensor, files: set[Path], held: weights.Held | None = None
) -> ir.TensorProtocol:
    file, start = path.parent / tensor.location, tensor.offset or 0
    real = file.resolve()
    if not file.is_symlink() and not real.is_relative_to(path.parent.resolve()):
        raise ExportError(
            f"{path}: its weights are in {str(tensor.location)[:200]}, outside of the model's folder. "
            "Put the file beside the model"
        )
    has = min(tensor.nbytes if tensor.length is None else tensor.length, real.stat().st_size - start)
    _require_bytes(path, tensor, has, tensor.location)
    files.add(file)
    stored = held or Stored(real, start, tensor.dtype, tensor.shape.numpy(), tensor.name)
    if weights.is_large(stored):
        return stored
    return ir.tensor(np.array(stored.numpy()), dtype=stored.dtype, name=stored.name)


def _name_sizes(model: ir.Model) -> None:
    """Makes sizes of -1 unknown, as in ONNX Runtime, and names the unknown ones of inputs."""
    values = [*model.graph.inputs, *model.graph.outputs]
    values += [output for node in model.graph.all_nodes() for output in node.outputs]
    for value in values:
        if any(isinstance(dim, int) and dim < 0 for dim in value.shape or ()):
            value.shape = ir.Shape([None if str(dim).startswith("-") else dim for dim in g.dims(value) or ()])
    for value in model.graph.inputs:
        if None in (shape := g.dims(value) or []):
            names = [f"{value.name}_{axis}" if dim is None else dim for axis, dim in enumerate(shape)]
            value.shape = ir.Shape(names)


def _forget_shapes(model: ir.Model) -> None:
    """Removes declared shapes inside the graph, to be inferred anew: ONNX Runtime ignores wrong ones."""
    results = {output for node in model.graph.all_nodes() for output in node.outputs}
    for value in results - {*model.graph.outputs}:
        value.shape = None
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and not value.is_graph_input():  # which users may replace
                value.shape = ir.Shape(value.const_value.shape.numpy())


def _check_values(path: Path, model: ir.Model) -> None:
    for value in model.graph.inputs:
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise ExportError(
                f"{path}: input {value.name} is {value.type}, and twinop reads tensors only. Export the "
                "model with tensors as inputs"
            )
        if value.type is None or (value.shape is None and value.dtype is not None):
            lacks = "no type" if value.type is None else "no shape, not even the number of its dimensions"
            raise ExportError(
                f"{path}: input {value.name} has {lacks}. Declare it, or export the model again: twinop "
                "cannot tell what its nodes compute"
            )
    for name, count in Counter(value.name for value in model.graph.outputs).items():
        if count > 1:
            raise ExportError(f"{path}: output {name} is listed twice; list it once")
    reads = [("the model returns", used) for used in model.graph.outputs]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if any(each.type is ir.AttributeType.TYPE_PROTO for each in node.attributes.values()):
            raise ExportError(
                f"{path}: {node.op_type} makes {node.outputs[0].name} without a value, and twinop reads no "
                "such optionals. Export the model with tensors"
            )
        reads += [(f"{node.op_type} reads", used) for used in node.inputs if used is not None]
    for reader, used in reads:
        if not (used.producer() or used.is_graph_input() or used.is_initializer()):
            raise ExportError(
                f"{path}: {reader} {used.name}, which is no graph input, initializer or node output. "
                "twinop does not support sparse initializers: if it is one, make it dense"
            )


def separate_names(model: ir.Model) -> None:
    """Gives the values of all graphs different names: shape inference finds values by their names, and ONNX
    allows branches of an If, or bodies of loops, to use a name for different values."""
    taken, used = set[str](), Counter[str]()
    for graph in model.graphs():  # the main graph comes first, and its names stay
        outputs = (output for node in graph for output in node.outputs)
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs)):
            name = str(value.name)
            while value.name in taken:
                used[name] += 1
                value.name = f"{name}_{used[name]}"
            taken |= {str(value.name)} if value.name else set()
    g.reserve_names(model)


def make_constant(model: ir.Model) -> int:
    """Makes the initializers of a model of IR version 3 constants, as ONNX Runtime does, and counts them:
    there, all are inputs as well. Since version 4, those that are inputs may be overridden."""
    if model.ir_version >= 4:
        return 0
    inputs = model.graph.inputs
    given = [value for value in inputs if value.is_initializer()]
    for value in given:
        inputs.remove(value)
    model.ir_version = _BODIES_IR_VERSION
    return len(given)
