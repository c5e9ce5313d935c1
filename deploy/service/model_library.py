"""Find and check the custom-op library of a served model."""

from pathlib import Path

from twinop.errors import LibraryError
from twinop.library import Library, checksum, library_folders

from ..check_nodes import require_fit
from ..choose_library import only_library
from ..custom_nodes import Model
from .folders import VersionFolder
from .settings import ModelSettings, ServerSettings


def library_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings
) -> Library | None:
    """Return the checked library that the model needs, or None if it needs none.

    Raises:
        LibraryError, ModelError: no library is both allowed and usable.
    """
    if not model.nodes:
        return None
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    others = [*server.library_folders, *library_folders()]
    named = None
    if settings.library is not None:
        named = _named(settings.library, list(dict.fromkeys((*own, *others))))
    library = only_library(model, named, own=own, others=others, confined=True, bodies=False)
    if library is None:
        return None
    lacking = {node.node_type for node in model.nodes if node.op_type not in library.by_onnx_name}
    if bodies := sorted(op_type for _, op_type in lacking & model.bodies):
        raise LibraryError(
            f"{library.path} has no {', '.join(bodies)}, which would run on function bodies; it has: "
            f"{', '.join(library.by_onnx_name)}. Use the library that the model was exported for"
        )
    if settings.library_sha256 is not None:
        _require_checksum(library.path, settings.library_sha256)
    require_fit(model, [library])
    return library


def _named(path: Path, folders: list[Path]) -> Path:
    """Return the path of the library that the settings name. A relative path is searched in all folders.

    Raises:
        LibraryError: the library is missing, or outside of the folders.
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


def _require_checksum(path: Path, expected: str) -> None:
    found = checksum(path)
    if found != expected.lower():
        raise LibraryError(
            f"{path}: its SHA-256 is {found}, library_sha256 says {expected.lower()}: it is not the library "
            "that was meant. Put the right one there, or correct the setting"
        )
