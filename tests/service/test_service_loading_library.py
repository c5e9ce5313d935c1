"""The libraries of a version: found, checked, permitted; and what the folders of models may ask for."""

import asyncio
import hashlib
import shutil
import sys
from pathlib import Path

import pytest
import service_models
from service_fixtures import Served, wait_until
from service_loads import MODELS, loaded, only_these, other_machine, repository_of, where
from service_rows import QUICK, ROW
from typer.testing import CliRunner, Result

from twinop.cli import app
from twinop.deploy.errors import ModelError
from twinop.deploy.service.folders import scan
from twinop.deploy.service.loading import load
from twinop.deploy.service.settings import ModelSettings, ServerSettings, SettingsError, read_settings
from twinop.errors import LibraryError, TwinopError, command_line


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
    with pytest.raises(LibraryError, match=r"liblink\.so: a symbolic link to .*libx\.so, out of the folder"):
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
    _, bad, other = (service_models.place(tmp_path, name, service_models.relu()) for name in "abc")
    bad.write_bytes(b"not a model")
    shutil.copy(libraries["custom_relu"], other.parent)
    found = check(tmp_path)
    assert found.exit_code == 1 and "Traceback" not in found.output
    assert "a version 1 can be served" in found.stdout and "b version" not in found.stdout
    said = found.stderr
    assert said.startswith("error: model b: ") and said.count("\nmodel ") == 1
    assert "model c: " in said and "--allow-model-libraries" in said
    assert check(tmp_path / "c", "--allow-model-libraries").exit_code == 1  # one model's folder
    bad.unlink()
    assert check(tmp_path, "--allow-model-libraries").exit_code == 0


def beside(
    libraries: dict[str, Path], models: Path, place: str = "1", name: str = "libcustom_relu.so"
) -> Path:
    """Place the model m with a library in its folder."""
    service_models.place(models, "m", service_models.relu())
    return Path(shutil.copy(libraries["custom_relu"], models / "m" / place / name))


@pytest.mark.parametrize("place", ["1", "."])
def test_a_library_in_a_models_folder_needs_permission(
    libraries: dict[str, Path], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another library taken instead of it, such as the installed one."""
    library = beside(libraries, tmp_path, place)
    with command_line(), pytest.raises(TwinopError) as error:
        asyncio.run(repository_of(monkeypatch, tmp_path, *QUICK).load_all())
    for part in (
        f"{library} lies in the model's own folder. ",
        f"--library {library}",
        "all who can write to the models' folders: --allow-model-libraries, or allow_model_libraries = true "
        "under [server] in the server's twinop.toml",
    ):
        assert part in str(error.value)
    allowed = repository_of(monkeypatch, tmp_path, *QUICK, "--allow-model-libraries")
    asyncio.run(allowed.load_all())
    used = allowed.find("m").loaded.session.library
    assert used is not None and used.path == library
    (tmp_path / "twinop.toml").write_text("[server]\nallow_model_libraries = true")
    asyncio.run(repository_of(monkeypatch, tmp_path, *QUICK).load_all())


def test_a_library_that_the_server_names_is_permitted_wherever_it_lies(
    libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders below its own are not."""
    only_these(monkeypatch)
    library = beside(libraries, tmp_path)
    asyncio.run(repository_of(monkeypatch, tmp_path, *QUICK, "--library", str(library)).load_all())
    service_models.place(tmp_path, "m", service_models.relu(), settings='library = "1/libcustom_relu.so"')
    (tmp_path / "twinop.toml").write_text(f'[server]\nlibrary_folders = ["{tmp_path}"]')
    with pytest.raises(TwinopError, match="this one is in"):
        asyncio.run(repository_of(monkeypatch, tmp_path, *QUICK).load_all())


SHA = 'library_sha256 = "%s"'


@pytest.mark.parametrize(
    ("server", "folder", "refused"),
    [
        ("", "compare_bodies = false\nsession = { logid = 'x' }", "compare_bodies, session"),
        ("", "session = { enable_profiling = true }", "session"),
        ("", "provider_options.cuda = { device_id = 1 }", "provider_options"),
        (SHA % ("a" * 64), SHA % ("b" * 64), "library_sha256"),
        ("compare_bodies = false", "compare_bodies = false", ""),
        ("", "compare_bodies = true", ""),
        ("", SHA % ("b" * 64), ""),
        (SHA % ("a" * 64), SHA % ("a" * 64), ""),
        ("", "instances = 9\nmax_batch_size = 3\nintra_op_threads = 2", ""),
    ],
)
def test_settings_of_the_server_alone(tmp_path: Path, server: str, folder: str, refused: str) -> None:
    config = tmp_path / "twinop.toml"
    service_models.place(tmp_path, "m", service_models.relu(), settings=folder)
    own = scan(tmp_path)["m"].own

    def read(text: str) -> None:
        config.write_text(f"[model]\n{server}\n{text}")
        read_settings(config, {}).for_model("m", own)

    if not refused:
        return read("")
    with pytest.raises(SettingsError) as error:
        read("")
    assert f"model m: its folder sets {refused}, which only the server may" in str(error.value)
    assert "under [models.m] in the server's twinop.toml" in str(error.value)
    read(f"[models.m]\n{folder}")
    trust = "[server]\nallow_model_libraries = true"
    if not server:
        assert "allow_model_libraries = true under [server]" in str(error.value)
        return read(trust)
    with pytest.raises(SettingsError):  # whose code is known
        read(trust)
    return None


def test_folders_cannot_change_the_policy(tmp_path: Path) -> None:
    where(tmp_path, service_models.relu(), settings="[server]\nallow_model_libraries = true")
    with pytest.raises(SettingsError, match="server: no such setting"):
        read_settings(None, {}).for_model("m", scan(tmp_path)["m"].own)


def test_the_folder_is_followed_only_if_asked(served: Served) -> None:
    said = f"changes in {served.root} are not watched: --poll-seconds does so"
    wait_until(lambda: any(line["message"] == said for line in served.log))
    service_models.place(served.root, "followed", service_models.mlp(4, 4), version=2)
    shutil.copytree(served.root / "followed", served.root / "new")
    for _ in range(30):
        assert served.infer("followed", ROW).json["model_version"] == "1"
    assert served.infer("new", ROW).status == 404
    shutil.rmtree(served.root / "new")
