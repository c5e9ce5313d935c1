"""Writes model files: beside the target first, so that a failure leaves nothing behind."""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from twinop.deploy import wire
from twinop.errors import ExportError, is_disk_error, option
from twinop.libraries.library import keep_checksum
from twinop.system import publish
from twinop.system.regular_file import require_utf8

from .weights import pieces

# protobuf ends at 2 GiB; half a GiB is left for everything that is not a weight.
EXTERNAL_DATA_BYTES = 1536 * 1024 * 1024
_SMALL = 256  # bytes of a weight that stays in the model
_ALIGNMENT = 4096  # of large weights in a file of data: ONNX Runtime maps pages


def check_target(target: Path, sources: Iterable[Path] = ()) -> None:
    """Raises ExportError unless a target is a regular file or new, and is not read."""
    if os.path.isdir(target):
        raise ExportError(f"{target}: is a folder; expected a file name such as {target / 'model.onnx'}")
    read = [os.stat(source) for source in sources if source.exists()]
    try:
        require_utf8(target)
        found = os.stat(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error.strerror}. Name another file") from error
    if not stat.S_ISREG(found.st_mode):
        raise ExportError(f"{target}: is a pipe, a socket or a device; expected a new file or one to replace")
    if any(os.path.samestat(found, each) for each in read):
        raise ExportError(f"{target}: belongs to the input; name another file to write")


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Makes a folder beside the target, so that a failed or interrupted export leaves nothing behind."""
    check_target(target)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(publish.work_folder(target.parent))
        except OSError as error:
            raise ExportError(
                f"{target}: cannot be written, {target.parent}: {error.strerror}. Name another folder, or "
                "make this one"
            ) from error
        try:
            yield folder
        except OSError as error:
            if not is_disk_error(error):
                raise
            raise ExportError(
                f"{target}: cannot be written: {error.strerror}. Free space on its disk, or name another "
                "folder"
            ) from error


def save(model: ir.Model, path: Path, external_data_bytes: int, checks: bool = True) -> list[Path]:
    """Writes and checks the model, large weights in a file of their own; returns the files, model last.
    onnx's `checks` refuse outputs without a shape, which run. ExportError: that, or too little disk space."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    size, free = sum(each.nbytes for each in weights if each is not None), shutil.disk_usage(path.parent).free
    if size > free:
        raise ExportError(
            f"{path.name} cannot be written: it takes {size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free "
            "on its disk. Free space there, or name another folder"
        )
    with other_weights(model):
        for value in values:
            if not value.is_graph_input() and not value.is_graph_output():
                value.metadata_props.clear()
        external = size >= external_data_bytes
        data = [_write_data(values, path)] if external else []
        _write_model(model, path, [] if external else [*model.graph.initializers.values()])
    checked = str(wire.view(path))
    try:
        if checks:
            onnx.checker.check_model(checked, full_check=True)
    except Exception as error:
        text = f"onnx.checker refuses the exported model: {error}"
        if "unsupported type: tensor(bfloat16)" in text and model.opset_imports.get("", 22) < 22:
            text += f". More operators take bfloat16 from opset 22 on: {option('opset', 22)}"
        raise ExportError(text) from error
    return [*data, path]


@contextmanager
def other_weights(model: ir.Model) -> Iterator[None]:
    """Gives a model its tensors again that its block replaces, to write it. Declared types of initializers go
    meanwhile: tools that change weights, such as quantize_dynamic, leave old ones behind."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    before = [(value.const_value, value.shape, value.type) for value in values]
    try:
        for value in values:
            if not value.is_graph_input() and not value.is_graph_output():
                value.shape = value.type = None
        yield
    finally:
        for value, (tensor, shape, kind) in zip(values, before, strict=True):
            value.const_value, value.shape, value.type = tensor, shape, kind


def _write_model(model: ir.Model, path: Path, values: Iterable[ir.Value]) -> None:
    """Writes a model's file, into which the large weights of these values go from where they are."""
    weights = dict[str, tuple[int, Callable[[], Iterable[Any]]]]()
    for value in values:
        tensor = value.const_value
        if tensor is not None and tensor.dtype is not ir.DataType.STRING and tensor.nbytes >= wire.LARGE:
            weights[str(value.name)] = tensor.nbytes, partial(pieces, tensor)
            value.const_value = _place(value, tensor, path, 0)
    proto = ir.to_proto(model)
    if model.model_version is not None:  # onnx_ir drops 0, and ONNX Runtime then shows the largest number
        proto.model_version = model.model_version
    for each in (each for each in proto.graph.initializer if each.name in weights):
        each.ClearField("external_data")
        each.ClearField("data_location")
    with path.open("wb") as file:
        wire.write(file, proto, weights)


def _place(value: ir.Value, tensor: ir.TensorProtocol, path: Path, start: int) -> ir.ExternalTensor:
    shape, name = ir.Shape(tensor.shape.numpy()), str(value.name)
    place = path.name, start, tensor.nbytes, tensor.dtype
    return ir.ExternalTensor(*place, shape=shape, name=name, base_dir=path.parent)


def _write_data(values: Sequence[ir.Value], path: Path) -> Path:
    """Writes the weights of a model, which then names them; the pass over them gives the file its name."""
    draft, digest, places = path.with_name(f"{path.name}.data"), hashlib.sha256(), []
    with draft.open("wb") as file:
        for value in values:
            tensor = value.const_value
            if tensor is None or tensor.dtype is ir.DataType.STRING or tensor.nbytes <= _SMALL:
                continue
            gap = -file.tell() % _ALIGNMENT if tensor.nbytes > wire.LARGE else 0
            places.append((value, tensor, file.tell() + gap))
            for piece in chain([memoryview(bytes(gap))], pieces(tensor)):
                digest.update(piece)
                file.write(piece)
    data = draft.replace(path.with_name(publish.data_name(path.stem, digest.hexdigest())))
    keep_checksum(data, digest.hexdigest())
    for value, tensor, start in places:
        value.const_value = _place(value, tensor, data, start)
    return data
