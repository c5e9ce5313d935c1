"""What the tests of loading share: a model on disk, loaded without a server."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models

from twinop.deploy.service.folders import VersionFolder, scan
from twinop.deploy.service.loading import LoadedModel, load
from twinop.deploy.service.settings import ModelSettings, ServerSettings

X = np.array([[-1, 2, -3, 4]], np.float32)
CPU = {"provider": "cpu"}


def where(path: Path, model: onnx.ModelProto | None = None, **place: Any) -> VersionFolder:
    """The version folder of a model that is written to <path>/m/1/model.onnx."""
    if model is not None:
        service_models.place(path, "m", model, **place)
    return scan(path)["m"].versions[1]


def loaded(
    path: Path, model: onnx.ModelProto, server: ServerSettings | None = None, **given: Any
) -> LoadedModel:
    return load(where(path, model), ModelSettings(**(CPU | given)), server or ServerSettings())


def only_these(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """The folders that stand for the installed libraries."""
    for module in ("twinop.deploy.service.model_library", "twinop.deploy.choose_library"):
        monkeypatch.setattr(f"{module}.library_folders", lambda: list(folders))


def other_machine(library: Path) -> bytes:
    data = bytearray(library.read_bytes())
    struct.pack_into("<H", data, 18, 243)  # e_machine: RISC-V
    return bytes(data)
