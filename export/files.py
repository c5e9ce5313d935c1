"""Writes model files: beside the target first, so that a failure leaves nothing behind."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from twinop.errors import ExportError

# protobuf ends at 2 GiB; half a GiB is left for everything that is not a weight.
EXTERNAL_DATA_BYTES = 1536 * 1024 * 1024


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """Makes a folder beside the target, so that a failed or interrupted export leaves nothing behind."""
    if target.is_dir():
        raise ExportError(f"{target}: is a folder; expected a file name such as {target / 'model.onnx'}")
    try:
        folder = tempfile.TemporaryDirectory(prefix=".twinop-export-", dir=target.parent)
    except OSError as error:
        raise ExportError(
            f"{target}: cannot be written, {target.parent}: {error.strerror}. Name another folder, or make "
            "this one"
        ) from error
    with folder as name:
        yield Path(name)


def save(model: ir.Model, path: Path, external_data_bytes: int) -> list[Path]:
    """Writes and checks the model, large weights in a file of their own; returns the files, model last."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    external = sum(tensor.nbytes for tensor in weights if tensor is not None) >= external_data_bytes
    data = [path.with_name(f"{path.name}.data")] if external else []
    try:
        ir.save(model, path, format="protobuf", external_data=data[0].name if data else None)
    except OSError as error:
        raise ExportError(f"{path.name}: cannot be written: {error.strerror or error}") from error
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"onnx.checker refuses the exported model: {error}") from error
    return [*data, path]


def publish(files: Sequence[Path], folder: Path) -> None:
    """Moves files into their folder; existing ones are replaced."""
    for file in files:
        try:
            os.replace(file, folder / file.name)
        except OSError as error:
            raise ExportError(f"{folder / file.name}: cannot be written: {error.strerror}") from error
