"""Folders on disk: models, versions, what changed; and files in them that are no plain ones."""

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import service_models
from service_loads import refusal_of
from service_rows import scaled

from twinop.deploy.custom_nodes import load_model
from twinop.deploy.errors import ModelError
from twinop.deploy.service import folders
from twinop.deploy.service.folders import FolderError, scan
from twinop.deploy.service.instance import without_paths
from twinop.deploy.service.operations import Token
from twinop.deploy.service.settings import ServerSettings, Settings, SettingsError, read_settings


@pytest.fixture(autouse=True)
def _no_notes_yet() -> None:
    folders.log_once.cache_clear()


def empty(path: Path) -> Path:
    """Create an empty file named as a model; a scan does not read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_layouts(tmp_path: Path) -> None:
    first = empty(tmp_path / "triton" / "1" / "model.onnx")
    second = empty(tmp_path / "triton" / "12" / "model.onnx")
    plain = empty(tmp_path / "plain" / "model.onnx")
    named = empty(tmp_path / "named" / "3" / "anything.onnx")
    single = empty(tmp_path / "single.onnx")
    found = scan(tmp_path)
    paths = {name: {v: each.path for v, each in model.versions.items()} for name, model in found.items()}
    numbered = {"triton": {1: first, 12: second}, "named": {3: named}}
    assert paths == numbered | {"plain": {1: plain}, "single": {1: single}}
    where = found["triton"].versions[12]
    assert (where.model, where.folder, where.model_folder) == ("triton", second.parent, tmp_path / "triton")
    assert found["single"].versions[1].model_folder is None


def test_one_file(tmp_path: Path) -> None:
    path = empty(tmp_path / "custom_relu.onnx")
    empty(tmp_path / "other.onnx")
    (tmp_path / "twinop.toml").write_text("[server]\n")  # configures the server, not the model
    found = scan(path)
    assert list(found) == ["custom_relu"] and found["custom_relu"].versions[1].path == path
    assert found["custom_relu"].own == {}


def test_what_is_no_model_is_passed_over_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty(tmp_path / "good" / "1" / "model.onnx")
    for name in ("0", "01", "-1", "latest", "1.5", "v2"):
        empty(tmp_path / "good" / name / "model.onnx")
    empty(tmp_path / "several" / "1" / "a.onnx")
    empty(tmp_path / "several" / "1" / "b.onnx")
    empty(tmp_path / "bad name" / "1" / "model.onnx")
    empty(tmp_path / ".hidden" / "1" / "model.onnx")
    empty(tmp_path / "good.onnx")
    empty(tmp_path / "readme.txt")
    (tmp_path / "empty").mkdir()
    with caplog.at_level(logging.WARNING):
        assert list(scan(tmp_path)) == ["good"]
        assert set(scan(tmp_path)["good"].versions) == {1}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 6
    text = "\n".join(said)
    assert "good: not versions, which are numbers from 1 on: -1, 0, 01, 1.5, latest, v2" in text
    assert "several/1: several models (a.onnx, b.onnx): call one model.onnx" in text
    assert "'bad name' cannot be a model's name" in text
    assert "good.onnx: there is a folder of this name, which is served instead" in text
    assert "empty: no model.onnx in it, and none in a folder such as empty/1" in text
    assert "hidden" not in text and "readme" not in text


def test_no_model(tmp_path: Path) -> None:
    """The message appears before a server starts."""
    said = refusal_of(tmp_path)
    assert said.startswith(f"error: {tmp_path}: no model in this folder. Expected ")
    assert said.endswith(": it is empty")
    (tmp_path / "relu").mkdir()
    assert "found: - relu: no model.onnx in it" in refusal_of(tmp_path)
    for missing in (tmp_path / "nope.onnx", tmp_path / ("long" * 99)):
        assert refusal_of(missing).startswith(f"error: {missing}: no such file or folder. Expected ")
    assert "expected an .onnx file or a folder of models" in refusal_of(empty(tmp_path / "model.pt"))


def test_the_folder_of_one_model(tmp_path: Path) -> None:
    empty(tmp_path / "relu" / "1" / "model.onnx")
    with pytest.raises(FolderError, match=f"one model's folder: serve the folder above, {tmp_path}"):
        scan(tmp_path / "relu")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_leaves_the_others(tmp_path: Path) -> None:
    empty(tmp_path / "good" / "model.onnx")
    closed = empty(tmp_path / "closed" / "model.onnx").parent
    closed.chmod(0)
    try:
        assert list(scan(tmp_path)) == ["good"]
    finally:
        closed.chmod(0o755)


def test_stamps_follow_the_files(tmp_path: Path) -> None:
    empty(tmp_path / "a" / "1" / "model.onnx")
    model = empty(tmp_path / "a" / "2" / "model.onnx")
    before = scan(tmp_path)["a"].stamps
    assert scan(tmp_path)["a"].stamps == before
    (model.parent / "weights.bin").write_bytes(b"half")
    halfway = scan(tmp_path)["a"].stamps
    assert halfway[1] == before[1] and halfway[2] != before[2]
    (model.parent / "weights.bin").write_bytes(b"the whole")
    assert scan(tmp_path)["a"].stamps[2] not in (before[2], halfway[2])
    os.utime(tmp_path / "a" / "1" / "model.onnx", ns=(1, 1))
    old = scan(tmp_path)["a"].stamps[1]
    assert old != before[1]
    time.sleep(0.02)  # the clock of files has steps
    (other := tmp_path / "other").touch()
    os.utime(other, ns=(1, 1))
    other.rename(tmp_path / "a" / "1" / "model.onnx")  # of the same size and time, as archives keep it
    assert scan(tmp_path)["a"].stamps[1] != old
    (tmp_path / "a" / "twinop.toml").write_text("max_queue = 1")  # applies to all versions
    last = scan(tmp_path)["a"].stamps
    assert last[1] != before[1] and last[2] != before[2]
    (tmp_path / "a" / "twinop.toml").unlink()
    without = scan(tmp_path)["a"].stamps
    (tmp_path / "a" / "twinop.toml").symlink_to("nowhere")  # its settings cannot be read
    assert scan(tmp_path)["a"].stamps != without


def test_stamps_of_files_beside_each_other(tmp_path: Path) -> None:
    empty(tmp_path / "a.onnx")
    before = scan(tmp_path)["a"].stamps
    empty(tmp_path / "b.onnx").write_bytes(b"changed")
    assert scan(tmp_path)["a"].stamps == before
    empty(tmp_path / "a.onnx.data")
    assert scan(tmp_path)["a"].stamps != before


def test_versions_wanted(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        empty(tmp_path / "a" / str(number) / "model.onnx")
    model = scan(tmp_path)["a"]
    assert list(model.wanted("latest")) == [10]
    assert list(model.wanted("latest:2")) == [2, 10]
    assert list(model.wanted("all")) == [1, 2, 10]
    assert list(model.wanted((2,))) == [2]
    with pytest.raises(FolderError, match=r"model a has no version 3, which its settings name; it has: 1, 2"):
        model.wanted((2, 3))


def test_settings_of_a_folder(tmp_path: Path) -> None:
    settings = 'library = "libs/librelu.so"\nmax_queue = 9'
    service_models.place(tmp_path, "relu", service_models.relu(), settings=settings)
    library = tmp_path / "relu" / "libs" / "librelu.so"
    assert scan(tmp_path)["relu"].own == {"library": (library,), "max_queue": 9}
    (tmp_path / "relu" / "twinop.toml").write_text("max_batch_size = many")
    with pytest.raises(SettingsError, match="not TOML"):
        _ = scan(tmp_path)["relu"].own


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


def test_names_that_cannot_be_shown(tmp_path: Path) -> None:
    placed(tmp_path)
    (tmp_path / "good" / "1" / "model.onnx").rename(tmp_path / "good" / "1" / "\udcff.onnx")
    (tmp_path / "long").symlink_to("x" * 300)
    assert list(scan(tmp_path)) == ["bad"]
    assert without_paths("/a/\udcff.so: no") == "\\udcff.so: no"
