"""Files in a model's folder that are no plain text of settings: the error is that model's alone."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import service_models
from service_loads import loaded, where
from service_rows import scaled

from twinop.deploy.custom_nodes import load_model
from twinop.deploy.errors import ModelError
from twinop.deploy.service.folders import scan
from twinop.deploy.service.instance import without_paths
from twinop.deploy.service.operations import Token
from twinop.deploy.service.settings import ServerSettings, Settings, SettingsError, read_settings
from twinop.errors import LibraryError


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGE: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": listening,
    "link to itself": lambda path: path.symlink_to(path),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link with a long name": lambda path: path.symlink_to("x" * 300),
    "huge": sparse,
}
TEXTS: dict[str, bytes] = {
    "not UTF-8": b"max_queue = 1 # \xff",
    "NUL": b"max_queue = \0",
    "NUL in a path": b'library = "a\\u0000b"',
    "surrogate": b'library = "\xed\xa0\x80"',
    "deep array": b"max_queue = " + b"[" * 20_000,
    "deep table": b"max_queue = " + b"{a = " * 20_000,
    "long key": b"max_queue" + b".a" * 100_000 + b" = 1",
    "long header": b"[max_queue" + b" . 'a'" * 30_000 + b"]",
    "digits": b"max_queue = " + b"9" * 5_000,
    "hexadecimal digits": b"max_queue = 0x" + b"f" * 100_000,
    "digits of an option": b"[session]\n'session.x' = 0x" + b"f" * 100_000 + b"\n[session.y]",
    "deep option": b"session" + b".a" * 30 + b" = " + b"[" * 400 + b"]" * 400,
}


def placed(folder: Path) -> Path:
    for name in ("bad", "good"):
        service_models.place(folder, name, scaled(1))
    return folder / "bad"


def each_is_that_models_own(root: Path, file: str) -> None:
    found = scan(root)
    assert found["good"].settings(Settings()).max_queue == 256
    with pytest.raises(SettingsError) as caught:
        found["bad"].settings(Settings())
    assert file in str(caught.value) or "bad" in str(caught.value)


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_no_regular_file(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(placed(tmp_path) / "twinop.toml")
    each_is_that_models_own(tmp_path, "twinop.toml")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_that_are_no_settings(tmp_path: Path, text: bytes) -> None:
    """Of a model, and of the server."""
    (placed(tmp_path) / "twinop.toml").write_bytes(text)
    each_is_that_models_own(tmp_path, "twinop.toml")
    with pytest.raises(SettingsError, match=r"bad/twinop\.toml"):
        read_settings(tmp_path / "bad/twinop.toml", {})


@pytest.mark.parametrize("make", [os.mkfifo, STRANGE["device"], STRANGE["huge"]])
def test_the_server_s_own_files(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    file = tmp_path / "file"
    make(file)
    with pytest.raises(SettingsError, match="file: cannot be read"):
        read_settings(file, {})
    with pytest.raises(SettingsError, match="token's file .* cannot be read"):
        Token(ServerSettings(token_file=file))


@pytest.mark.parametrize("make", [os.mkfifo, STRANGE["device"], STRANGE["huge"], STRANGE["folder"]])
def test_a_model_that_is_no_regular_file(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"m.onnx: (not a regular file|a folder|cannot be read: larger)"):
        load_model(tmp_path / "m.onnx", confined=True)


def test_a_link_to_itself_concerns_nothing_else(tmp_path: Path, libraries: dict[str, Path]) -> None:
    """Among models, as a folder of libraries, as a model's library, and as its data."""
    (loop := tmp_path / "loop").symlink_to(loop)
    server = ServerSettings(library_folders=(loop,))
    assert loaded(tmp_path, service_models.relu(), server).session.library
    (library := tmp_path / "m" / "libloop.so").symlink_to(library)
    with pytest.raises(LibraryError, match=f"{library} lies in the model's own folder"):
        loaded(tmp_path, service_models.relu(), server)
    with pytest.raises(LibraryError, match=f"{library}: no such file"):
        loaded(tmp_path, service_models.relu())
    library.unlink()
    place = where(tmp_path, service_models.relu())
    (data := service_models.save_external(service_models.mlp(4, 8, 2), place.path)).unlink()
    data.symlink_to(data)
    with pytest.raises(ModelError, match="weights.bin is missing"):
        load_model(place.path, confined=True)


def test_names_that_cannot_be_shown(tmp_path: Path) -> None:
    placed(tmp_path)
    (tmp_path / "good" / "1" / "model.onnx").rename(tmp_path / "good" / "1" / "\udcff.onnx")
    (tmp_path / "long").symlink_to("x" * 300)
    assert list(scan(tmp_path)) == ["bad"]
    assert without_paths("/a/\udcff.so: no") == "\\udcff.so: no"
