"""Find and check the custom-op library of a served model."""

from collections.abc import Sequence
from pathlib import Path

from twinop.errors import ForeignLibraryError, LibraryError
from twinop.library import library_folders, read_library

from ..check_nodes import require_fit
from ..choose_library import only_library
from ..custom_nodes import Model
from ..registration import SealedLibrary
from .folders import VersionFolder
from .settings import FILE, ModelSettings, Policy, ServerSettings


def library_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings, policy: Policy
) -> SealedLibrary | None:
    """Return the checked library that the model needs, or None if it needs none.

    Raises:
        LibraryError, ModelError: no library is both allowed and usable.
    """
    if not model.nodes:
        return None
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    others = [*server.library_folders, *library_folders()]
    trusted = {folder.resolve() for folder in others}
    if policy.libraries == "models":
        trusted |= {folder.resolve() for folder in own}
    named = None
    if settings.library is not None:
        named = _named(settings.library, [*own, *others])
        if _is_in(named, own) and named.resolve().parent not in trusted:
            raise _forbidden(named)
    else:
        _require_none([folder for folder in own if folder.resolve() not in trusted])
    own = [folder for folder in own if folder.resolve() in trusted]
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
        _require_checksum(library, settings.library_sha256)
    require_fit(model, [library])
    return library


def _require_none(folders: Sequence[Path]) -> None:
    """Check that no library lies in these folders, because no other one is taken instead of it.

    Raises:
        LibraryError: there is one.
    """
    for path in (path for folder in folders for path in sorted(folder.glob("lib*.so"))):
        try:
            read_library(path)
        except ForeignLibraryError:
            continue
        except LibraryError:  # damaged; it is still the one that was meant
            pass
        raise _forbidden(path)


def _forbidden(path: Path) -> LibraryError:
    return LibraryError(
        f"{path}: lies in the model's own folder, and the server's policy is to load no library from there, "
        "because a library can do all that the server can. To load it, start with --libraries models, or "
        f'write libraries = "models" under [policy] in the server\'s {FILE}. Or move it to a folder of your '
        "own, and name that with --library-folder"
    )


def _named(path: Path, folders: Sequence[Path]) -> Path:
    """Return the path of the library that the settings name. A relative path is searched in all folders.

    Raises:
        LibraryError: the library is missing, or outside of the folders.
    """
    listed = ", ".join(dict.fromkeys(map(str, folders)))
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        places = "" if path.is_absolute() else f" in {listed}"
        raise LibraryError(f"{path}: no such library{places}. Put it there, or correct the setting `library`")
    if not _is_in(found, folders):
        raise LibraryError(
            f"{found}: libraries are loaded only from the model's own folder and configured ones ({listed}), "
            f"and this one is in {found.resolve().parent}. Add that to library_folders of the server"
        )
    return found


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _require_checksum(library: SealedLibrary, expected: str) -> None:
    found = library.copy.sha256
    if found != expected.lower():
        raise LibraryError(
            f"{library.path}: its SHA-256 is {found}, library_sha256 says {expected.lower()}: it is not the "
            "library that was meant. Put the right one there, or correct the setting"
        )
