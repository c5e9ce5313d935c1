"""Models with ops of several libraries: exported, run, checked, served and packed."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from abi_files import c_library
from service_loads import loaded
from service_models import place
from user_ops import cube_package, cube_project, negate_package, put_in_build, three_nodes

from twinop.deploy.errors import ModelError
from twinop.deploy.pack.packing import Options, pack
from twinop.deploy.service.folders import scan
from twinop.deploy.service.loading import load
from twinop.deploy.service.newer_python import tomllib
from twinop.deploy.service.settings import ModelSettings, ServerSettings
from twinop.errors import LibraryError
from twinop.libraries.library import find_library


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two installed packages; the current folder is another one, and empty."""
    site = negate_package(cube_package(tmp_path / "site"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.syspath_prepend(site)
    for name in ("test_cube", "other_ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return site


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_named_libraries(tmp_path: Path, libraries: dict[str, Path]) -> None:
    folder = tmp_path / "libraries"
    folder.mkdir()
    cube = Path(shutil.copy(find_library("test_cube"), folder))
    other = Path(shutil.copy(c_library("other_ops", '-DDOMAIN="other.ops"'), folder))
    server = ServerSettings(library_folders=(folder,))
    named = (other, cube)
    model = loaded(tmp_path, three_nodes(), server, library=named)
    assert [library.path for library in model.session.libraries[:2]] == [other, cube]
    right = tuple(sha256(library.path) for library in model.session.libraries)
    assert loaded(tmp_path, three_nodes(), server, library=named, library_sha256=right).session.libraries
    with pytest.raises(LibraryError, match=f"libtest_cube.so: .*, but library_sha256 is {right[0]}"):
        loaded(tmp_path, three_nodes(), server, library=named, library_sha256=right[:1])
    shutil.copy(cube, folder / "libagain.so")
    with pytest.raises(LibraryError, match="both have ops of the domain test_cube"):
        loaded(tmp_path, three_nodes(), server, library=(*named, folder / "libagain.so"))


def test_build_among_the_models_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can add models could put a library there."""
    cube_project(tmp_path)
    put_in_build(c_library("other_ops", '-DDOMAIN="other.ops"'), tmp_path)
    models = tmp_path / "models"
    place(models, "m", three_nodes())
    monkeypatch.chdir(tmp_path)
    model = loaded(models, three_nodes(), ServerSettings())
    assert {library.path.parent for library in model.session.libraries[:2]} == {tmp_path / "build"}
    onnx.save(three_nodes(), "alone.onnx")
    scanned = scan(Path("alone.onnx"))["alone"].versions[1]  # one file is served, not the folder
    assert load(scanned, ModelSettings(provider="cpu"), ServerSettings()).session.libraries

    def refused(root: Path) -> None:
        for folder in scan(root).values():
            with pytest.raises(ModelError, match="no library has other.ops"):
                load(folder.versions[1], ModelSettings(provider="cpu"), ServerSettings())

    (models / "project").symlink_to(tmp_path)  # a model's folder that is a link to the project
    refused(models)
    (models / "project").unlink()
    shutil.move(tmp_path / "build", models / "build")
    onnx.save(three_nodes(), models / "flat.onnx")
    (tmp_path / "build").symlink_to(models / "build")  # the project's build/ is a link to the models
    refused(models)
    monkeypatch.chdir(models)
    for root in (models, Path("."), Path("../models")):
        refused(root)
    shutil.move(models / "build", tmp_path / "elsewhere")
    (models / "build").symlink_to(tmp_path / "elsewhere")  # build/ among the models is a link out of them
    refused(Path("."))
    (tmp_path / "link").symlink_to(models)
    refused(tmp_path / "link")


@pytest.fixture
def packed(site: Path) -> Iterator[Path]:
    onnx.save(three_nodes(), "net.onnx")
    said = pack(Options(Path("net.onnx"), Path("repo"), gpu=False))
    folder = "/mnt/models/net/1"
    assert said.library_paths[:2] == [f"{folder}/libtest_cube.so", f"{folder}/libother_ops.so"]
    yield Path("repo").absolute()


def test_a_packed_model_with_several_libraries(packed: Path, tmp_path: Path) -> None:
    version = packed / "models/net/1"
    libraries = sorted(version.glob("*.so"))
    assert len(libraries) == 3
    settings = tomllib.loads((packed / "models/net/twinop.toml").read_text())
    assert sorted(settings["library_sha256"]) == sorted(map(sha256, libraries))
    shutil.rmtree(tmp_path / "site")
    trusting = ServerSettings(allow_model_libraries=True)
    model = load(scan(packed / "models")["net"].versions[1], ModelSettings(provider="cpu"), trusting)
    assert {library.path for library in model.session.libraries} == {*libraries}


def test_packed_libraries_of_one_name(site: Path) -> None:
    onnx.save(three_nodes(), "net.onnx")
    Path("a").mkdir()
    shutil.copy(find_library("test_cube"), "a/libx.so")
    shutil.copy(site / "libother_ops.so", "libx.so")
    with pytest.raises(LibraryError, match="a/libx.so and libx.so.*: packed libraries lie in one folder"):
        pack(Options(Path("net.onnx"), Path("repo"), library=[Path("a/libx.so"), Path("libx.so")]))
