"""Find and check the custom-op libraries of a served model."""

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
from .settings import ModelSettings, ServerSettings


def libraries_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings
) -> list[SealedLibrary]:
    """Return the checked libraries that the model needs, one for each domain of its custom nodes."""
    if not model.nodes:
        return []
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    # `build/` of this folder is not taken from where models are served, or a link leads there: whoever can
    # add models could put libraries there.
    build = Path.cwd() / "build"
    served = () if where.root.is_file() else (where.root, *where.root.iterdir(), *own)
    above = {build, *build.parents, build.resolve(), *build.resolve().parents}
    project = [] if above.intersection(each.resolve() for each in served) else project_libraries()

    def places(domain: str) -> list[Path]:
        found = [place for place in places_of(domain) if place.parent != build]
        return [*server.library_folders, *(project if domain != DOMAIN else ()), *found]

    permitted = [*server.library_folders, *library_folders(), *project]
    permitted += own if server.allow_model_libraries else []
    trusted = {place.resolve() for place in permitted}
    for path in settings.library:
        if not path.is_file():
            raise LibraryError(f"{path}: no such library. Put it there, or correct the setting `library`")
        target = path.resolve()
        inside = path.parent.resolve() in trusted and any(target.is_relative_to(each) for each in trusted)
        if target not in trusted and not inside:
            raise LibraryError(
                f"{path}: a library can do all that the server can, so libraries are loaded only from "
                f"{', '.join(map(str, sorted(trusted)))}, and this one is in {target.parent}. If you trust "
                f"all who can write there, start with --library-folder {target.parent}. To trust all models' "
                f"own folders: {allow()}"
            )
    libraries = choose_libraries(
        model,
        settings.library,
        others=places,
        own=own,
        allow_model_libraries=server.allow_model_libraries,
        confined=True,
        bodies=False,
    )
    require_fit(model, libraries, bodies=False)
    allowed = [each.lower() for each in settings.library_sha256]
    for library in libraries if allowed else ():
        if (found := library.copy.sha256) not in allowed:
            raise LibraryError(
                f"{library.path}: its SHA-256 is {found}, but library_sha256 is {', '.join(allowed)}: it is "
                "not the expected library. Restore that one, or correct the setting"
            )
    return libraries
