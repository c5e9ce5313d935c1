"""What the folders of models may bring and ask for."""

import asyncio
import shutil
from pathlib import Path

import pytest
import service_models
from service_fixtures import Served, wait_until
from service_loads import only_these, repository_of
from service_rows import QUICK, ROW

from twinop.deploy.service.folders import scan
from twinop.deploy.service.settings import SettingsError, read_settings
from twinop.errors import TwinopError, command_line


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
        f"{library} lies in the model's own folder. A library can do all that this process can",
        "no other one instead of it",
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
def test_settings_that_only_the_server_may_change(
    tmp_path: Path, server: str, folder: str, refused: str
) -> None:
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
    service_models.place(
        tmp_path, "m", service_models.relu(), settings="[server]\nallow_model_libraries = true"
    )
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
