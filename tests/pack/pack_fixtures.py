"""A packed folder for the tests of `twinop pack`."""

from pathlib import Path
from typing import Any

import onnx
from service_models import relu

from twinop.deploy.pack.command import Options
from twinop.deploy.pack.packing import Packed, pack


def saved(folder: Path, model: onnx.ModelProto | None = None, name: str = "custom_relu") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(relu() if model is None else model, path)
    return path


def packed(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> tuple[Path, Packed]:
    """The packed folder and what is said of it."""
    output = folder / "repo"
    return output, pack(Options(saved(folder, model), output, **options))
