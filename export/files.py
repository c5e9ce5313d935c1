"""Writes model files: beside the target first, so that a failure leaves nothing behind."""

import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from twinop.errors import ExportError

# protobuf ends at 2 GiB; half a GiB is left for everything that is not a weight.
EXTERNAL_DATA_BYTES = 1536 * 1024 * 1024


def data_path(target: Path) -> Path:
    """Returns the file of the large weights of a model in `target`."""
    return target.with_name(f"{target.name}.data")


def check_target(target: Path, sources: Iterable[Path] = ()) -> None:
    """Raises ExportError unless a target and its weights are regular files or new, and none is read."""
    if os.path.isdir(target):
        raise ExportError(f"{target}: is a folder; expected a file name such as {target / 'model.onnx'}")
    read = [os.stat(source) for source in sources if source.exists()]
    for path in (target, data_path(target)):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ExportError(f"{path}: cannot be written: {error.strerror}. Name another file") from error
        if stat.S_ISDIR(found.st_mode):
            raise ExportError(f"{path}: cannot be written: is a folder. Name another file, or remove it")
        if not stat.S_ISREG(found.st_mode):
            raise ExportError(
                f"{path}: is a pipe, a socket or a device; expected a new file or one to replace"
            )
        if any(os.path.samestat(found, each) for each in read):
            raise ExportError(f"{path}: belongs to the input; name another file to write")


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Makes a folder beside the target, so that a failed or interrupted export leaves nothing behind."""
    check_target(target)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".twinop-export-", dir=target.parent)
    except OSError as error:
        raise ExportError(
            f"{target}: cannot be written, {target.parent}: {error.strerror}. Name another folder, or make "
            "this one"
        ) from error
    with _until_terminated(), folder as name:
        yield Path(name)


@contextmanager
def _until_terminated() -> Iterator[None]:
    """Lets SIGTERM end the process as an exit does, which removes temporary folders."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def save(model: ir.Model, path: Path, external_data_bytes: int) -> list[Path]:
    """Writes and checks the model, large weights in a file of their own; returns the files, model last."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    external = sum(tensor.nbytes for tensor in weights if tensor is not None) >= external_data_bytes
    data = [data_path(path)] if external else []
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    kinds = [
        (value, value.shape, value.type)
        for value in values
        if not value.is_graph_input() and not value.is_graph_output()
    ]
    try:
        for value, *_ in kinds:  # tools that change weights, such as quantize_dynamic, keep their value_info
            value.shape = value.type = None
            value.metadata_props.clear()
        ir.save(model, path, format="protobuf", external_data=data[0].name if data else None)
    except OSError as error:
        raise ExportError(f"{path.name}: cannot be written: {error.strerror or error}") from error
    finally:
        for value, shape, kind in kinds:
            value.shape, value.type = shape, kind
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"onnx.checker refuses the exported model: {error}") from error
    return [*data, path]


def rename(files: Sequence[Path], target: Path) -> list[Path]:
    """Renames what `save` has written, also within the model."""
    data = [data_path(target) for _ in files[:-1]]
    if data:
        model = onnx.load(files[-1], load_external_data=False)
        for entry in (entry for tensor in model.graph.initializer for entry in tensor.external_data):
            entry.value = data[0].name if entry.key == "location" else entry.value
        onnx.save(model, files[-1])
    for old, new in zip(files, (*data, target), strict=True):
        os.replace(old, new)
    return [*data, target]


def publish(files: Sequence[Path], folder: Path) -> None:
    """Moves files into their folder; existing ones are replaced."""
    for file in files:
        try:
            os.replace(file, folder / file.name)
        except OSError as error:
            raise ExportError(f"{folder / file.name}: cannot be written: {error.strerror}") from error
