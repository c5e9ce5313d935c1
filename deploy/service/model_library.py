"""Find and check the custom-op libraries of a served model."""

from collections.abc import Collection, Sequence
from pathlib import Path

from twinop.errors import ForeignLibraryError, LibraryError
from twinop.find import places_of
from twinop.library import library_folders, read_library
from twinop.record import DOMAIN

from ..check_nodes import require_fit
from ..choose_library import choose_libraries
from ..custom_nodes import Model
from ..registration import SealedLibrary
from .folders import VersionFolder
from .model_settings import ModelSettings
from .settings import FILE, Policy, ServerSettings


def libraries_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings, policy: Policy
) -> list[SealedLibrary]:
    """Return the checked libraries that the model needs, one for each domain of its custom nodes.

    Raises:
        LibraryError, ModelError: no library is both allowed and usable.
    """
    if not model.nodes:
        return []
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    others = [*server.library_folders, *_project(model, where), *library_folders()]

    def places(domain: str) -> list[Path]:
        build = Path.cwd() / "build"
        found = places_of(domain, library_folders())
        return [*server.library_folders, *(place for place in found if place != build or build in others)]

    permitted = [*own, *others] if policy.libraries == "models" else others
    trusted = {folder.resolve() for folder in permitted}
    named = [_named(path, [*own, *others]) for path in settings.library]
    for path in named:
        _require_trusted(path, trusted)
    if not named:
        _require_no_other([folder for folder in own if folder.resolve() not in trusted], trusted)
    own = [folder for folder in own if folder.resolve() in trusted]
    libraries = choose_libraries(model, named, places, own=own, confined=True, bodies=False)
    for library in libraries:
        needed = {node.op_type for node in model.nodes if node.domain == library.domain}
        lacking = needed - library.by_onnx_name.keys()
        if bodies := sorted(op for op in lacking if (library.domain, op) in model.bodies):
            raise LibraryError(
                f"{library.path} has no {', '.join(bodies)}, which would run on function bodies; it has: "
                f"{', '.join(library.by_onnx_name)}. Use the library that the model was exported for"
            )
        if settings.library_sha256:
            _require_checksum(library, settings.library_sha256)
    require_fit(model, libraries)
    return libraries


def _project(model: Model, where: VersionFolder) -> list[Path]:
    """Return `build/` of the current folder, which has ops of other domains than twinop's.

    It is left out if it lies among the models: whoever can add models could put a library there.
    """
    build = Path.cwd() / "build"
    models = where.model_folder.resolve().parent if where.model_folder is not None else None
    among_models = models is not None and build.is_relative_to(models)
    return [] if among_models or {node.domain for node in model.nodes} == {DOMAIN} else [build]


def _require_no_other(folders: Sequence[Path], trusted: Collection[Path]) -> None:
    """Check that these folders of the model hold no library, because no other one is taken instead of it.

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
        _require_trusted(path, trusted)


def _require_trusted(path: Path, trusted: Collection[Path]) -> None:
    target = path.resolve()
    if path.parent.resolve() in trusted and any(target.is_relative_to(folder) for folder in trusted):
        return
    raise LibraryError(
        f"{path}: a library can do all that the server can, so libraries are loaded only from "
        f"{', '.join(map(str, sorted(trusted)))}, and this one is in {target.parent}. If you trust all who "
        f"can write there, start with --library-folder {target.parent}. To trust all models' own folders, "
        f'start with --libraries models, or write libraries = "models" under [policy] in the server\'s {FILE}'
    )


def _named(path: Path, folders: Sequence[Path]) -> Path:
    """Return the path of the library that the settings name. A relative path is searched in all folders.

    Raises:
        LibraryError: the library is missing.
    """
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        places = "" if path.is_absolute() else f" in {', '.join(dict.fromkeys(map(str, folders)))}"
        raise LibraryError(f"{path}: no such library{places}. Put it there, or correct the setting `library`")
    return found


def _require_checksum(library: SealedLibrary, expected: Collection[str]) -> None:
    found, allowed = library.copy.sha256, [each.lower() for each in expected]
    if found not in allowed:
        raise LibraryError(
            f"{library.path}: its SHA-256 is {found}, library_sha256 says {', '.join(allowed)}: it is not "
            "the library that was meant. Put the right one there, or correct the setting"
        )
