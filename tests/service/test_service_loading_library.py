"""Loading a version: finding and checking its library; function bodies never run instead."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest
import service_models
from service_loads import MODELS, loaded, only_these, other_machine, where
from typer.testing import CliRunner, Result

from twinop.cli import app
from twinop.deploy.errors import ModelError
from twinop.deploy.service.loading import load
from twinop.deploy.service.settings import ModelSettings, ServerSettings
from twinop.errors import LibraryError, TwinopError


def test_a_library_beside_the_versions(libraries: dict[str, Path], tmp_path: Path) -> None:
    place = where(tmp_path, service_models.relu())
    mine = tmp_path / "m" / "libmine.so"
    shutil.copy(libraries["custom_relu"], mine)
    model = load(place, ModelSettings(provider="cpu"), MODELS)
    assert model.session.library.path == mine
    beside = place.folder / "libmine.so"
    shutil.copy(mine, beside)
    model = load(place, ModelSettings(provider="cpu"), MODELS)
    assert model.session.library.path == beside


def test_a_named_library(libraries: dict[str, Path], tmp_path: Path) -> None:
    ops = libraries["custom_ops"]
    assert loaded(tmp_path, service_models.relu(), library=ops).session.library.path == ops
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ops, elsewhere / "libx.so")
    with pytest.raises(LibraryError, match="loaded only from .* and this one is in .*elsewhere. If"):
        loaded(tmp_path, service_models.relu(), library=elsewhere / "libx.so")
    allowed = ServerSettings(library_folders=(elsewhere,))
    model = loaded(tmp_path, service_models.relu(), allowed, library=elsewhere / "libx.so")
    assert model.session.library.path == elsewhere / "libx.so"
    (tmp_path / "m" / "liblink.so").symlink_to(elsewhere / "libx.so")
    with pytest.raises(LibraryError, match=f"liblink.so: .* and this one is in {elsewhere}"):
        loaded(tmp_path, service_models.relu(), library=tmp_path / "m/liblink.so")
    with pytest.raises(
        LibraryError, match=r"liblink\.so: a symbolic link to .*libx\.so, out of the folder. It"
    ):
        loaded(tmp_path, service_models.relu())


def test_checksum(libraries: dict[str, Path], tmp_path: Path) -> None:
    right = hashlib.sha256(libraries["custom_relu"].read_bytes()).hexdigest()
    assert loaded(tmp_path, service_models.relu(), library_sha256=right.upper()).session.library
    with pytest.raises(LibraryError, match=f"its SHA-256 is {right}, but library_sha256 is {'0' * 64}"):
        loaded(tmp_path, service_models.relu(), library_sha256="0" * 64)


def test_libraries_that_cannot_be_used(libraries: dict[str, Path], tmp_path: Path) -> None:
    folder = where(tmp_path, service_models.relu()).folder
    cases = {
        "libmissing.so": (None, "no such library"),
        "libtext.so": (b"#!/bin/sh\n", "not a shared library"),
        "libother.so": (other_machine(libraries["custom_relu"]), "built for riscv64, this machine is"),
        "libpython.so": (Path(sys.executable).read_bytes(), "without twinop records"),
        "libtest.so": (libraries["test_ops"].read_bytes(), "the library has no such op; it has: "),
    }
    for name, (data, message) in cases.items():
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(TwinopError, match=message):
            loaded(tmp_path, service_models.relu(), library=folder / name)


def test_bodies_do_not_replace_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_these(monkeypatch, tmp_path / "none")
    with pytest.raises(ModelError, match="no library has custom_domain::CustomRelu"):
        loaded(tmp_path, service_models.relu())


CPU = ("--provider", "cpu")


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments), *CPU])


def test_models_that_can_be_served(libraries: dict[str, Path], tmp_path: Path) -> None:
    path = service_models.place(tmp_path, "m", service_models.relu())
    service_models.place(tmp_path, "plain", service_models.mlp(4, 4, custom=False), version=7)
    one = check(path, "--library", libraries["custom_relu"])
    assert one.exit_code == 0 and one.stdout.count("\n") == 1
    digest = hashlib.sha256(libraries["custom_relu"].read_bytes()).hexdigest()
    for part in (
        "model version 1 can be served: runs on cpu (asked for)",
        f"CustomRelu x1 from {libraries['custom_relu']}",
        digest,
        "difference from the function bodies: none",
    ):
        assert part in one.stdout
    all_of_them = check(tmp_path)
    assert all_of_them.exit_code == 0
    assert "m version 1 can be served" in all_of_them.stdout
    assert "plain version 7 can be served: runs on cpu (asked for)\n" in all_of_them.stdout


def test_each_model_that_cannot_be_served_is_told(libraries: dict[str, Path], tmp_path: Path) -> None:
    good, bad, other = (
        service_models.place(tmp_path, name, service_models.relu()) for name in ("a", "b", "c")
    )
    bad.write_bytes(b"not a model")
    shutil.copy(libraries["custom_relu"], other.parent)
    found = check(tmp_path)
    assert found.exit_code == 1 and "Traceback" not in found.output
    assert "a version 1 can be served" in found.stdout and "b version" not in found.stdout
    said = found.stderr
    assert said.startswith("error: model b: ") and said.count("\nmodel ") == 1
    assert "model c: " in said and "--allow-model-libraries" in said
    assert check(good, "--library-sha256", "0" * 64).exit_code == 1
    assert (
        check(tmp_path / "c", "--allow-model-libraries").exit_code == 1
    )  # a model's folder, not one of models
    bad.unlink()
    assert check(tmp_path, "--allow-model-libraries").exit_code == 0
