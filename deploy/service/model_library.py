"""Find and check the custom-op libraries of a served model."""

from collections.abc import Collection, Sequence
from pathlib import Path

from twinop.errors import LibraryError
from twinop.libraries.find import places_of, project_libraries
from twinop.libraries.library import library_folders
from twinop.record.op_spec import DOMAIN

from ..check_nodes import require_fit
from ..choose_library import allow, choose_libraries
from ..custom_nodes import Model
from ..registration import SealedLibrary
from .folders import VersionFolder
from .settings import ModelSettings, Policy, ServerSettings


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
    folders = [*server.library_folders, *library_folders()]
    project = _project(where, own)

    def places(domain: str) -> list[Path]:
        build = Path.cwd() / "build"
        found = [place for place in places_of(domain) if place.parent != build]
        return [*server.library_folders, *(project if domain != DOMAIN else ()), *found]

    permitted = [*own, *folders] if policy.allow_model_libraries else folders
    trusted = {place.resolve() for place in (*permitted, *project)}
    named = [_named(path, [*own, *folders], project) for path in settings.library]
    for path in named:
        _require_trusted(path, trusted)
    libraries = choose_libraries(
        model,
        named,
        others=places,
        own=own,
        allow_model_libraries=policy.allow_model_libraries,
        confined=True,
        bodies=False,
    )
    for library in libraries:
        needed = {node.proto.op_type for node in model.nodes if node.proto.domain == library.domain}
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


def _project(where: VersionFolder, own: Sequence[Path]) -> list[Path]:
    """Return the project's libraries; none if they lie in a folder that is served, or a link leads there.

    Whoever can add models could put them there.
    """
    build = Path.cwd() / "build"
    served = () if where.root.is_file() else (where.root, *where.root.iterdir(), *own)
    above = {build, *build.parents, build.resolve(), *build.resolve().parents}
    return [] if above.intersection(each.resolve() for each in served) else project_libraries()


def _require_trusted(path: Path, trusted: Collection[Path]) -> None:
    target = path.resolve()
    if target in trusted:
        return
    if path.parent.resolve() in trusted and any(target.is_relative_to(folder) for folder in trusted):
        return
    raise LibraryError(
        f"{path}: a library can do all that the server can, so libraries are loaded only from "
        f"{', '.join(map(str, sorted(trusted)))}, and this one is in {target.parent}. If you trust all who "
        f"can write there, start with --library-folder {target.parent}. To trust all models' own folders: "
        f"{allow()}"
    )


def _named(path: Path, folders: Sequence[Path], project: Sequence[Path]) -> Path:
    """Return the path of the library that the settings name; a relative one is searched in all places."""
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    candidates += [each for each in project if each.name == str(path)]
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        places = "" if path.is_absolute() else f" in {', '.join(dict.fromkeys(map(str, folders)))}"
        raise LibraryError(f"{path}: no such library{places}. Put it there, or correct the setting `library`")
    return found


def _require_checksum(library: SealedLibrary, expected: Collection[str]) -> None:
    found, allowed = library.copy.sha256, [each.lower() for each in expected]
    if found not in allowed:
        raise LibraryError(
            f"{library.path}: its SHA-256 is {found}, but library_sha256 is {', '.join(allowed)}: it is not "
            "the expected library. Restore that one, or correct the setting"
        )
