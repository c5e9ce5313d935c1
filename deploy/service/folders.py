"""Find models, versions and their settings files on disk without loading anything.

models/<name>/<version>/model.onnx     Triton's layout, beside it twinop.toml
models/<name>/model.onnx               version 1
models/<name>.onnx                     version 1
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from twinop.errors import TwinopError

from .model_settings import ModelSettings
from .settings import FILE, Settings, SettingsError, anchored, read_toml

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MODEL = "model.onnx"
_SUFFIX = ".onnx"
Stamp = tuple[tuple[str, int, int], ...]  # (name, modification time in ns, size) of each file


class Stamps(NamedTuple):
    """The files that determine what a version runs: its own, and those in the server's library folders."""

    files: Stamp
    libraries: Stamp

    def changed_libraries(self, now: "Stamps") -> set[Path]:
        """Return the libraries that were added, changed or removed since then."""
        return {Path("/", path) for path, *_ in set(self.libraries) ^ set(now.libraries)}


class FolderError(TwinopError):
    """There is no model to serve, or a version that the settings name is missing."""


@dataclass(frozen=True)
class VersionFolder:
    """One version of a model.

    Attributes:
        folder: the folder of the .onnx file.
        path: the .onnx file.
        model_folder: the folder of all versions; None if several models share one folder.
        root: the folder of models, or the file, that is served.
    """

    model: str
    version: int
    folder: Path
    path: Path
    model_folder: Path | None
    root: Path


@dataclass(frozen=True)
class ModelFolder:
    """One model with stamps for each version, which change when a file is added, changed or removed."""

    name: str
    folder: Path | None  # None if several models share one folder
    versions: dict[int, VersionFolder]
    stamps: dict[int, Stamps]

    @property
    def own(self) -> dict[str, Any]:
        """The settings in the folder's twinop.toml. Raises SettingsError if it cannot be read."""
        path = self.folder / FILE if self.folder is not None else None
        if path is None or not os.path.lexists(path):
            return {}
        return anchored(read_toml(path), path.parent)

    def settings(self, given: Settings) -> ModelSettings:
        """Return the model's settings: those of the server, and of its folder.

        Raises:
            SettingsError: a file cannot be read, or a setting is invalid. There are no other exceptions.
        """
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


def scan(
    root: Path, library_folders: Iterable[Path] = (), *, may_be_empty: bool = False
) -> dict[str, ModelFolder]:
    """Return the models in a folder, or the one in an .onnx file, by name.

    Their stamps include the libraries in `library_folders`.

    Entries that are not models are skipped with a line in the log; hidden files are skipped silently.

    Raises:
        FolderError: there is no model, and not `may_be_empty`. The message lists what was found instead.
    """
    libraries = _stamps(path for each in library_folders for path in each.resolve().glob("lib*.so"))
    if root.is_file():
        if root.suffix != _SUFFIX:
            raise FolderError(f"{root}: expected an .onnx file or a folder of models")
        found = [_of_file(root, libraries, root)]
        notes: list[str] = []
    else:
        found, notes = _in_folder(root, libraries)
    models: dict[str, ModelFolder] = {}
    for model in found:
        if _NAME.fullmatch(model.name) is None:
            notes.append(f"{model.name!r} cannot be a model's name: use letters, digits, '_', '-' and '.'")
        elif model.name in models:
            notes.append(f"{model.name}.onnx: there is a folder of this name, which is served instead")
        else:
            models[model.name] = model
    if not models and not may_be_empty:
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


def _in_folder(root: Path, libraries: Stamp) -> tuple[list[ModelFolder], list[str]]:
    """Find folders before files, so that a folder wins over a file of the same name."""
    if not root.is_dir():
        raise FolderError(f"{root}: no such file or folder. Expected an .onnx file or a folder of models")
    entries = _entries(root)
    folders = [entry for entry in entries if os.path.isdir(entry)]
    if folders and all(_VERSION.fullmatch(entry.name) for entry in folders):
        raise FolderError(
            f"{root}: its folders are versions, so it is one model's folder: serve the folder above, "
            f"{root.absolute().parent}"
        )
    found: list[ModelFolder] = []
    notes: list[str] = []
    for folder in folders:
        try:
            model = _of_folder(folder, libraries, notes)
        except FolderError as error:
            notes.append(str(error))
            continue
        if model is not None:
            found.append(model)
    for entry in entries:
        if not os.path.isdir(entry) and entry.suffix == _SUFFIX:
            found.append(_of_file(entry, libraries, root))
    return found, notes


def _entries(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise FolderError(f"{folder}: cannot be read: {error.strerror}") from error
    if strange := [name for name in names if not name.isprintable()]:  # such as bytes that are not UTF-8
        log_once(f"{folder}: names with characters that cannot be printed are skipped: {strange!a}")
    names = [name for name in names if name.isprintable()]
    return [folder / name for name in names if not name.startswith(".") and name != "lost+found"]


def _of_folder(folder: Path, libraries: Stamp, notes: list[str]) -> ModelFolder | None:
    versions = {}
    strange = []
    for entry in _entries(folder):
        if not os.path.isdir(entry):
            continue
        if _VERSION.fullmatch(entry.name) is None:
            strange.append(entry.name)
            continue
        try:
            path = _model_file(entry, folder, notes)
        except FolderError as error:  # deleted during the scan: keep the other versions
            notes.append(str(error))
            continue
        if path is not None:
            number = int(entry.name)
            versions[number] = VersionFolder(folder.name, number, entry, path, folder, folder.parent)
    if not versions and (path := _model_file(folder, folder, notes)) is not None:
        versions[1] = VersionFolder(folder.name, 1, folder, path, folder, folder.parent)
    if strange:
        notes.append(f"{folder.name}: not versions, which are numbers from 1 on: {', '.join(strange)}")
    if not versions:
        notes.append(f"{folder.name}: no {_MODEL} in it, and none in a folder such as {folder.name}/1")
        return None
    beside = _stamps([folder / FILE], folder)
    stamps = {
        number: Stamps(beside + _stamps(_files(each.folder), folder), libraries)
        for number, each in versions.items()
    }
    return ModelFolder(folder.name, folder, versions, stamps)


def _of_file(path: Path, libraries: Stamp, root: Path) -> ModelFolder:
    """Return a model in a shared folder. It owns the files whose names begin with its own."""
    folder = path.absolute().parent
    stamp = _stamps([each for each in _entries(folder) if each.name.startswith(path.stem)], folder)
    where = VersionFolder(path.stem, 1, folder, path, None, root)
    return ModelFolder(path.stem, None, {1: where}, {1: Stamps(stamp, libraries)})


def _model_file(folder: Path, model_folder: Path, notes: list[str]) -> Path | None:
    """Return the .onnx file to serve: model.onnx, else the only one."""
    there = {each.name: each for each in _entries(folder) if each.suffix == _SUFFIX and os.path.isfile(each)}
    if _MODEL in there or len(there) == 1:
        return there.get(_MODEL) or next(iter(there.values()))
    if there:
        listed = ", ".join(there)
        where = folder.relative_to(model_folder.parent)
        notes.append(f"{where}: several models ({listed}): call one {_MODEL}")
    return None


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _stamps(paths: Iterable[Path], folder: Path = Path("/")) -> Stamp:
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # missing, deleted during the scan, or a link to nowhere
            if not path.is_symlink():
                continue
            status = path.lstat()
        found.append((str(path.relative_to(folder)), status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))
