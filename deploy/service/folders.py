"""Find models, versions and their settings files on disk without loading anything.

models/<name>/<version>/model.onnx     Triton's layout, beside it twinop.toml
models/<name>/model.onnx               version 1
models/<name>.onnx                     version 1
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from twinop.errors import TwinopError
from twinop.system.regular_file import real_path

from .settings import FILE, ModelSettings, Settings, SettingsError, anchored, read_toml

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MODEL = "model.onnx"
_SUFFIX = ".onnx"
Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, size, mtime, ctime


class FolderError(TwinopError):
    """There is no model to serve, or a version that the settings name is missing."""


@dataclass(frozen=True)
class VersionFolder:
    """One version of a model."""

    model: str
    version: int
    folder: Path  # of the .onnx file
    path: Path  # the .onnx file
    model_folder: Path | None  # of all versions; None if several models share one folder
    root: Path  # the folder of models, or the file, that is served


@dataclass(frozen=True)
class ModelFolder:
    """One model with a stamp for each version, which changes with any of its files and of the libraries."""

    name: str
    folder: Path | None  # None if several models share one folder
    versions: dict[int, VersionFolder]
    stamps: dict[int, Stamp]

    @property
    def own(self) -> dict[str, Any]:
        """The settings in the folder's twinop.toml. Raises SettingsError if it cannot be read."""
        path = self.folder / FILE if self.folder is not None else None
        if path is None or not os.path.lexists(path):
            return {}
        return anchored(read_toml(path), path.parent)

    def settings(self, given: Settings) -> ModelSettings:
        """Return the model's settings: the server's, and its folder's; SettingsError: they do not fit."""
        try:
            return given.for_model(self.name, self.own)
        except SettingsError:
            raise
        except Exception as error:  # the settings of one model must not end the service of others
            said = f"{type(error).__name__}: {error}"
            raise SettingsError(f"the settings of model {self.name}: {said}") from error

    def wanted(self, choice: str | tuple[int, ...]) -> dict[int, VersionFolder]:
        """Return the versions that `ModelSettings.versions` selects; FolderError: one is missing."""
        if choice == "all":
            return dict(sorted(self.versions.items()))
        if isinstance(choice, str):
            count = int(choice.partition(":")[2] or 1)
            return {number: self.versions[number] for number in sorted(self.versions)[-count:]}
        if missing := [number for number in choice if number not in self.versions]:
            raise FolderError(
                f"model {self.name} has no version {', '.join(map(str, missing))}, which its settings name; "
                f"it has: {', '.join(map(str, sorted(self.versions)))}"
            )
        return {number: self.versions[number] for number in choice}


def scan(root: Path, library_folders: Iterable[Path] = ()) -> dict[str, ModelFolder]:
    """Return the models in a folder, or the one in an .onnx file, by name; FolderError: there is none.

    Entries that are not models are skipped with a line in the log; hidden files are skipped silently.
    """
    libraries = _stamp(path for each in library_folders for path in real_path(each).glob("lib*.so"))
    if (is_file := os.path.isfile(root)) and root.suffix != _SUFFIX:
        raise FolderError(f"{root}: expected an .onnx file or a folder of models")
    if not os.path.exists(root):
        raise FolderError(f"{root}: no such file or folder. Expected an .onnx file or a folder of models")
    entries = [root] if is_file else _entries(root)
    folders = [entry for entry in entries if os.path.isdir(entry)]
    if folders and all(_VERSION.fullmatch(entry.name) for entry in folders):
        raise FolderError(
            f"{root}: its folders are versions, so it is one model's folder: serve the folder above, "
            f"{root.absolute().parent}"
        )
    notes: list[str] = []
    models: dict[str, ModelFolder] = {}
    for entry in (*folders, *(each for each in entries if each not in folders and each.suffix == _SUFFIX)):
        name = entry.name if entry in folders else entry.stem
        if _NAME.fullmatch(name) is None:
            notes.append(f"{name!r} cannot be a model's name: use letters, digits, '_', '-' and '.'")
        elif name in models:
            notes.append(f"{name}.onnx: there is a folder of this name, which is served instead")
        elif entry not in folders:
            models[name] = _of_file(entry, libraries, root)
        elif model := _of_folder(entry, libraries, notes):
            models[name] = model
    if not models:
        listed = "".join(f"\n  - {note}" for note in notes)
        raise FolderError(
            f"{root}: no model in this folder. Expected <name>/<version>/model.onnx, <name>/model.onnx or "
            f"<name>.onnx{', found:' if notes else ': it is empty'}{listed}"
        )
    for note in notes:
        log_once(f"{root}: {note}")
    return models


@lru_cache(maxsize=4096)
def log_once(text: str) -> None:
    """Log each text once, however often a folder is scanned."""
    _log.warning("%s", text)


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, without hidden files and names that cannot be printed."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise FolderError(f"{folder}: cannot be read: {error.strerror}") from error
    shown = (name for name in names if name.isprintable() and not name.startswith("."))
    return [folder / name for name in shown if name != "lost+found"]


def _of_folder(folder: Path, libraries: Stamp, notes: list[str]) -> ModelFolder | None:
    versions, inner = dict[int, VersionFolder](), list[Path]()
    try:
        inner = [entry for entry in _entries(folder) if os.path.isdir(entry)]
        for entry in inner:
            number = int(entry.name) if _VERSION.fullmatch(entry.name) else 0
            if number and (path := _model_file(entry, notes)) is not None:
                versions[number] = VersionFolder(folder.name, number, entry, path, folder, folder.parent)
        if not versions and (path := _model_file(folder, notes)) is not None:
            versions[1] = VersionFolder(folder.name, 1, folder, path, folder, folder.parent)
    except FolderError as error:  # perhaps deleted during the scan
        notes.append(str(error))
    if strange := [entry.name for entry in inner if _VERSION.fullmatch(entry.name) is None]:
        notes.append(f"{folder.name}: not versions, which are numbers from 1 on: {', '.join(strange)}")
    if not versions:
        notes.append(f"{folder.name}: no {_MODEL} in it, and none in a folder such as {folder.name}/1")
        return None
    shared = _stamp([folder / FILE]) + libraries
    stamps = {number: shared + _stamp(_files(each.folder)) for number, each in versions.items()}
    return ModelFolder(folder.name, folder, versions, stamps)


def _of_file(path: Path, libraries: Stamp, root: Path) -> ModelFolder:
    """Return a model in a shared folder. It owns the files whose names begin with its own."""
    folder = path.absolute().parent
    stamp = _stamp(each for each in _entries(folder) if each.name.startswith(path.stem))
    where = VersionFolder(path.stem, 1, folder, path, None, root)
    return ModelFolder(path.stem, None, {1: where}, {1: stamp + libraries})


def _model_file(folder: Path, notes: list[str]) -> Path | None:
    """Return the .onnx file to serve: model.onnx, else the only one."""
    there = {each.name: each for each in _entries(folder) if each.suffix == _SUFFIX and os.path.isfile(each)}
    if len(there) > 1 and _MODEL not in there:
        where = f"{folder.parent.name}/{folder.name}"
        notes.append(f"{where}: several models ({', '.join(there)}): call one {_MODEL}")
        return None
    return there.get(_MODEL) or next(iter(there.values()), None)


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _stamp(paths: Iterable[Path]) -> Stamp:
    found = []
    for path in paths:
        with suppress(OSError):  # deleted during the scan
            status = os.stat(path) if os.path.exists(path) else os.lstat(path)  # a link to nowhere is a file
            found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(sorted(found))
