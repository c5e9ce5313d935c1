"""The custom-op library of a served model: found where libraries may lie, and checked."""

import hashlib
from pathlib import Path

from twinop.deploy.check import require_fit
from twinop.deploy.libraries import choose_library
from twinop.deploy.model import Model
from twinop.deploy.service.folders import VersionFolder
from twinop.deploy.service.settings import ModelSettings, ServerSettings
from twinop.errors import LibraryError
from twinop.library import Library, library_folders


def library_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings
) -> Library | None:
    """The library that the model needs, allowed and checked; None if it needs none.

    Raises:
        LibraryError, ModelError: there is none that may and can be used.
    """
    if not model.nodes:
        return None
    folders = _allowed(where, server)
    named = _named(settings.library, folders) if settings.library is not None else None
    library = choose_library(model, named, folders=folders, bodies=False)
    if library is None:
        return None
    lacking = {node.op_type for node in model.nodes} - library.by_onnx_name.keys()
    if bodies := sorted(lacking & model.bodies):
        raise LibraryError(
            f"{library.path} has no {', '.join(bodies)}, which would run on function bodies; it has: "
            f"{', '.join(library.by_onnx_name)}. Use the library that the model was exported for"
        )
    if settings.library_sha256 is not None:
        _require_checksum(library.path, settings.library_sha256)
    require_fit(model, library)
    return library


def _allowed(where: VersionFolder, server: ServerSettings) -> list[Path]:
    """The folders that a library may be loaded from, in the order in which they are searched."""
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    return list(dict.fromkeys((*own, *server.library_folders, *library_folders())))


def _named(path: Path, folders: list[Path]) -> Path:
    """Where the library of the settings is: a relative path is looked for in all folders.

    Raises:
        LibraryError: it is missing, or outside of the folders.
    """
    listed = ", ".join(map(str, folders))
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        places = "" if path.is_absolute() else f" in {listed}"
        raise LibraryError(f"{path}: no such library{places}. Put it there, or correct the setting `library`")
    if not any(found.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise LibraryError(
            f"{found}: libraries are loaded only from the model's own folder and configured ones ({listed}), "
            f"and this one is in {found.resolve().parent}. Add that to library_folders of the server"
        )
    return found


def checksum(path: Path) -> str:
    """A file's SHA-256 as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_checksum(path: Path, expected: str) -> None:
    found = checksum(path)
    if found != expected.lower():
        raise LibraryError(
            f"{path}: its SHA-256 is {found}, library_sha256 says {expected.lower()}: it is not the library "
            "that was meant. Put the right one there, or correct the setting"
        )
