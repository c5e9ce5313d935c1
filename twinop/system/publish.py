"""Puts files in their place, so that a reader finds the old ones or the new ones, also after a crash.

Files are written into a work folder beside their place and are then renamed. The name of a model's data comes
from its content, `<stem>.<16 hex>.data`, and the graph, which names it, is renamed last.
"""

import ctypes
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ExportError
from ..libraries.library import checksum

MANIFEST = "twinop-pack.json"  # in a packed folder: a checksum of each file
_WORK, _LOCK = ".twinop-work-", ".lock"
_RENAME_EXCHANGE, _HERE = 2, -100
_HEX = 16


def data_name(stem: str, sha256: str) -> str:
    """Returns the name of the data of a model: one content has one name."""
    return f"{stem}.{sha256[:_HEX]}.data"


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """Makes a folder, and removes it in the end; those of processes that died go, too."""
    with _locked(parent) as is_locked:
        if is_locked:
            _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=_WORK, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def publish(files: Sequence[Path], target: Path) -> list[Path]:
    """Moves a model's data files and then its graph, the last of `files`, to their places; returns these.

    Who has opened the old graph still finds its data. Older data goes, unless a model of the folder names it.
    ExportError: a file cannot be written. The old model is then as it was.
    """
    *data, _ = files
    places = [*(target.with_name(file.name) for file in data), target]
    with _locked(target.parent) as is_locked:
        former = _named(target, target.stem) if _data_files(target) else set()
        for file, place in zip(files, places, strict=True):
            try:
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(file, place)
            except OSError as error:
                raise ExportError(f"{place}: cannot be written: {error.strerror}") from error
        if is_locked and former is not None:
            _remove_unused(target, former | {file.name for file in data})
    return places


def replace_folder(new: Path, place: Path) -> None:
    """Renames a folder to its place; one that is there already gets the name of the new one, in one step."""
    if not place.is_dir() or not any(place.iterdir()):
        os.rename(new, place)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not in every C library
    if exchange is None or exchange(_HERE, os.fsencode(new), _HERE, os.fsencode(place), _RENAME_EXCHANGE):
        os.rename(place, old := new.with_name("old"))
        os.rename(new, place)
        old.rename(new)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lets one process after the other into its block; gives whether the file system has locks."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(number)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_WORK}*"):
        with suppress(OSError):
            number = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails as long as its process lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(number)


def _remove_unused(target: Path, kept: set[str]) -> None:
    """Removes data of earlier models, if its content shows that twinop wrote it and no model names it."""
    others = [file for file in _data_files(target) if file.name not in kept]
    if not others:
        return  # without reading models, which may be large
    stem, named = target.stem, set[str]()
    for model in target.parent.glob("*.onnx"):
        if (names := _named(model, stem)) is None:
            return
        named |= names
    for file in others:
        if file.name not in named and stat.S_ISREG(file.lstat().st_mode):
            with suppress(OSError):
                if data_name(stem, checksum(file)) == file.name:
                    file.unlink()


def _data_files(target: Path) -> list[Path]:
    """Returns what is named as data of a model is."""
    pattern = re.compile(_pattern(target.stem))
    return [file for file in target.parent.iterdir() if pattern.fullmatch(os.fsencode(file.name))]


def _pattern(stem: str) -> bytes:
    return re.escape(os.fsencode(stem)) + rb"\.[0-9a-f]{16}\.data"


def _named(model: Path, stem: str) -> set[str] | None:
    """Returns the names of data in a model's bytes, which may be no model at all; None: it cannot be read."""
    pattern, names, kept = re.compile(_pattern(stem)), set[str](), b""
    try:
        with open(os.open(model, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            while part := file.read(1 << 20):
                names |= {os.fsdecode(each) for each in pattern.findall(kept + part)}
                kept = (kept + part)[-4096:]  # longer than any name
    except FileNotFoundError:
        return set()
    except OSError:
        return None
    return names
