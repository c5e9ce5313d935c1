"""Reads a model to check it: finds its custom nodes, with the element types that are known there."""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import external_data_helper

from twinop.record.names import BUILT_IN
from twinop.record.op_spec import DOMAIN
from twinop.system.regular_file import read_regular, real_path, require_utf8

from . import wire
from .errors import ModelError

_MOST_BYTES = 2 << 30  # of a protobuf message
_LARGE = 1024  # bytes. Type inference needs the values of small initializers only (shapes, axes).
_HOLD_TENSORS = {
    "GraphProto", "FunctionProto", "NodeProto", "AttributeProto", "SparseTensorProto", "TensorProto",
}  # fmt: skip
ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto


@dataclass(frozen=True)
class CustomNode:
    """A node of a custom-op library."""

    proto: onnx.NodeProto
    label: str  # the node as error messages name it
    types: Mapping[str, int]  # ONNX's element types of the values in the node's scope, by name

    @property
    def node_type(self) -> tuple[str, str]:
        """The domain and the type (`OpSpec.node_type`)."""
        return self.proto.domain, self.proto.op_type


@dataclass
class Model:
    """A model as it was given, for ONNX Runtime, and a copy without its weights."""

    name: str  # as error messages name it
    proto: onnx.ModelProto = field(default_factory=onnx.ModelProto)  # the copy
    path: Path | None = None  # the file
    data: bytes = b""  # the model, if it is not a file
    folder: Path | None = None  # of external data
    confined: bool = False  # external data outside the folder was refused
    given: Collection[str] = ()  # initializers whose data the session's options have: no file is named
    nodes: list[CustomNode] = field(default_factory=list)

    @property
    def bodies(self) -> set[tuple[str, str]]:
        """The domain and type of the ops that have a function body in the model and need no library."""
        return {(function.domain, function.name) for function in self.proto.functions}

    @property
    def metadata(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in self.proto.metadata_props}


def load_model(
    source: ModelSource, folder: Path | None = None, *, confined: bool = False, given: Collection[str] = ()
) -> Model:
    """Reads a model, of a path, bytes or a ModelProto, whose external data is then in `folder`.

    If `confined`, external data outside of the model's folder is refused, also behind a symbolic link.
    `given` are the initializers that the session's options have (`Model.given`). ModelError: the file is
    missing or not a complete ONNX model, or its external data is missing or elsewhere.
    """
    if isinstance(source, onnx.ModelProto):
        with suppress(ValueError):  # some of protobuf's versions refuse what none can read
            source = source.SerializeToString()
    if isinstance(source, onnx.ModelProto) or (isinstance(source, bytes) and len(source) > _MOST_BYTES):
        raise ModelError("the model is over 2 GB: save it with external data and pass its path")
    if isinstance(source, bytes):
        loaded = Model("the model", data=source, folder=folder, confined=confined, given=given)
        return _parsed(loaded, source)
    path = Path(source)
    model = Model(str(path), path=path, folder=path.parent, confined=confined)
    return _parsed(model, read_model(path, wire.without_weights))


def read_model(path: Path, read: Callable[..., bytes] = read_regular) -> bytes:
    """Returns the bytes of a model's file, or what `read` makes of them; ModelError: it cannot be read."""
    if not os.path.isfile(path):  # Path.is_file raises OSError for a name that is too long
        what = "not a regular file" if os.path.exists(path) else "no such file"
        what = "a folder, not an .onnx file" if os.path.isdir(path) else what
        raise ModelError(f"{path}: {what}. Expected a model such as twinop export writes")
    try:
        require_utf8(path)
        return read(path, most=_MOST_BYTES)
    except OSError as error:
        cure = ""
        if error.errno == errno.EFBIG:  # protobuf's limit
            cure = ". An ONNX file ends at 2 GB: save it with its weights in another file (external data)"
        raise ModelError(f"{path}: cannot be read: {error.strerror}{cure}") from error


def _parsed(model: Model, data: bytes) -> Model:
    if data[4:8] == b"ORTM":
        raise ModelError(
            f"{model.name}: in ONNX Runtime's own format (.ort), whose nodes twinop does not check. Give the "
            ".onnx file, or open this one in plain ONNX Runtime with register_custom_ops_library"
        )
    damaged = f"{model.name}: not a complete ONNX model"
    try:
        model.proto.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"{damaged} ({error}). Copy or export it again") from error
    if not model.proto.HasField("graph") or not model.proto.opset_import:
        raise ModelError(f"{damaged}: it has no graph or no opset. Copy or export it again")
    try:
        _require_text(model.proto)
        for tensor in tensors(model.proto):
            if external_data_helper.uses_external_data(tensor) and tensor.name not in model.given:
                _check_external(model, tensor)
        model.nodes = list(custom_nodes(model.proto))
    except (OSError, TypeError, ValueError, RecursionError) as error:  # names that are no text, or no file's
        raise ModelError(f"{damaged}: {error}. Copy or export it again") from error
    for tensor in model.proto.graph.initializer:
        if tensor.ByteSize() > _LARGE and not external_data_helper.uses_external_data(tensor):
            for content in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
                tensor.ClearField(content)
    return model


def _require_text(proto: onnx.ModelProto) -> None:
    """Raises TypeError for a name that is not UTF-8, which protobuf gives as bytes."""
    entries = [*proto.metadata_props, *proto.opset_import, *proto.functions, *proto.graph.input]
    names = [getattr(entry, key, "") for entry in entries for key in ("key", "value", "domain", "name")]
    for node in custom_nodes(proto, lambda node: True):
        names += [node.proto.name, *node.node_type, *node.proto.input, *node.proto.output]
        names += [text for each in node.proto.attribute for text in (each.name, each.ref_attr_name)]
    if bad := next((name for name in names if isinstance(name, bytes)), None):
        raise TypeError(f"the name {bad!r:.80} is not UTF-8")


def tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Yields all tensors of a model: initializers and attributes, in subgraphs and functions too."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for entry, value in message.ListFields():
        if entry.message_type is not None and entry.message_type.name in _HOLD_TENSORS:
            for part in (value,) if isinstance(value, Message) else value:
                yield from tensors(part)


def _check_external(model: Model, tensor: onnx.TensorProto) -> None:
    what = f"tensor {tensor.name}" if tensor.name else "a tensor"
    try:
        info = external_data_helper.ExternalDataInfo(tensor)
        end = (info.offset or 0) + (info.length or 0)
    except ValueError as error:
        raise ModelError(
            f"{model.name}: its external_data entry is invalid ({what}): {error}. Export it again"
        ) from error
    if model.folder is None:
        raise ModelError(
            f"{model.name} keeps {tensor.name} in the file {info.location}: pass the model's path"
        )
    if "_ORT_MEM_ADDR_" in info.location or min(info.offset or 0, info.length or 0) < 0:
        raise ModelError(
            f"{model.name} keeps {what} in {info.location!r} at {info.offset}: ONNX Runtime could read "
            "memory of the process there. Export it again"
        )
    path = model.folder / info.location
    if model.confined and (
        "\0" in info.location
        or Path(info.location).is_absolute()
        or not real_path(path).is_relative_to(real_path(model.folder))
    ):
        raise ModelError(
            f"{model.name} keeps {what} outside of its folder, in {info.location!r}, or names the file by an "
            "absolute path. External data must lie beside the model: copy the file there, and export the "
            "model again if it names another place"
        )
    size = path.stat().st_size if path.is_file() else -1
    if size < end:
        state = "is missing" if size < 0 else "is cut short"
        raise ModelError(f"{model.name}: its data file {path} {state} ({what}). Copy it again")


def is_custom(node: onnx.NodeProto) -> bool:
    """Returns whether a node needs a custom-op library: `Custom...` of a domain that is not ONNX's own."""
    if node.domain == DOMAIN:
        return True
    return node.op_type.startswith("Custom") and bool(node.domain) and not BUILT_IN.fullmatch(node.domain)


def custom_nodes(
    proto: onnx.ModelProto, wanted: Callable[[onnx.NodeProto], bool] = is_custom
) -> Iterator[CustomNode]:
    """Yields the wanted nodes of the graph, of its subgraphs (If, Loop, Scan) and of functions."""
    everywhere = nodes_of_graph(proto)
    for function in proto.functions:
        types = {value.name: value.type.tensor_type.elem_type for value in function.value_info}
        everywhere += _in_nodes(function.node, types, f" in function {function.domain}::{function.name}")
    return (node for node in everywhere if wanted(node.proto))


def nodes_of_graph(proto: onnx.ModelProto) -> list[CustomNode]:
    """Returns all nodes of the graph and of its subgraphs, without those of functions."""
    return list(_in_graph(proto.graph, {}, ""))


def _in_graph(graph: onnx.GraphProto, outer: Mapping[str, int], place: str) -> Iterator[CustomNode]:
    values = [*graph.input, *graph.value_info, *graph.output]
    types = dict(outer) | {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    yield from _in_nodes(graph.node, types, place)


def _in_nodes(nodes: Iterable[onnx.NodeProto], types: Mapping[str, int], place: str) -> Iterator[CustomNode]:
    for index, node in enumerate(nodes):
        name = f"node '{node.name}'" if node.name else f"node {index}"
        yield CustomNode(node, f"{name} ({node.op_type}){place}", types)
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
            for graph in graphs:
                yield from _in_graph(graph, types, f" in {attribute.name} of {name} ({node.op_type}){place}")
