"""Load models, and evaluate the options of `twinop serve`, without a server."""

import struct
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import service_models
from typer.testing import CliRunner

from twinop.cli import app
from twinop.deploy.service.folders import VersionFolder, scan
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.loading import load
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.settings import ModelSettings, ServerSettings

X = np.array([[-1, 2, -3, 4]], np.float32)
CPU = {"provider": "cpu"}
MODELS = ServerSettings(allow_model_libraries=True)


def where(path: Path, model: onnx.ModelProto | None = None, **place: Any) -> VersionFolder:
    """Write a model, if given, to <path>/m/1/model.onnx, and return its version folder."""
    if model is not None:
        service_models.place(path, "m", model, **place)
    return scan(path)["m"].versions[1]


def loaded(
    path: Path,
    model: onnx.ModelProto,
    server: ServerSettings = MODELS,
    **given: Any,
) -> LoadedModel:
    """Load a model on the CPU with the given settings; its library may lie beside it."""
    return load(where(path, model), ModelSettings(**(CPU | given)), server)


def only_these(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let these folders replace those of the installed libraries."""
    for module in ("twinop.deploy.service.loading", "twinop.libraries.find"):
        monkeypatch.setattr(f"{module}.library_folders", lambda: list(folders))


def other_machine(library: Path) -> bytes:
    """Return the library, marked as built for RISC-V."""
    data = bytearray(library.read_bytes())
    struct.pack_into("<H", data, 18, 243)  # e_machine
    return bytes(data)


def repository_of(monkeypatch: pytest.MonkeyPatch, models: Path, *options: str) -> Repository:
    """Return the repository that `twinop serve` would serve with these options; nothing is loaded yet."""
    made: list[Repository] = []

    class Unstarted:
        def __init__(self, repository: Repository) -> None:
            made.append(repository)

        def start(self) -> None: ...

    monkeypatch.setattr("twinop.deploy.service.server.Server", Unstarted)
    monkeypatch.setattr("twinop.deploy.service.logs.configure", lambda *_: None)
    done = CliRunner().invoke(app, ["serve", str(models), *options])
    assert done.exit_code == 0, done.output
    return made[0]


def refusal_of(models: Path, *options: str) -> str:
    """Return the message, on one line, with which `twinop serve` refuses its options."""
    with mock.patch("twinop.deploy.service.logs.configure"):  # it would change the logs of later tests
        done = CliRunner().invoke(app, ["serve", str(models), *options])
    assert done.exit_code == 1
    return " ".join(done.output.split())
