"""Chooses the custom-op libraries that a model needs: one for each domain of its nodes."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from twinop.errors import ForeignLibraryError, LibraryError, option
from twinop.installation import how_to_build
from twinop.libraries.find import package_key, places_of, searched
from twinop.libraries.library import Library, read_library
from twinop.record.op_spec import DOMAIN
from twinop.system.regular_file import real_path

from .custom_nodes import Model
from .errors import ModelError
from .registration import SealedLibrary, sealed

Libraries = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""The path of one library, several paths, or None to look for libraries."""

NO_BODIES = "a service does not run function bodies, as twinop run does"


def allow() -> str:
    """Returns how libraries in models' own folders are permitted."""
    how = option("allow_model_libraries", True)
    return f"{how}, or allow_model_libraries = true under [server] in the server's twinop.toml"


def library_paths(library: Libraries) -> list[Path]:
    if library is None:
        return []
    return [Path(library)] if isinstance(library, str | os.PathLike) else [Path(path) for path in library]


def choose_libraries(
    model: Model,
    explicit: Libraries = None,
    *,
    own: Sequence[Path] | None = None,
    others: Callable[[str], Sequence[Path]] = places_of,
    allow_model_libraries: bool = False,
    confined: bool = False,
    bodies: bool = True,
) -> list[SealedLibrary]:
    """Chooses the libraries to register for a model, one a domain, and copies them.

    For a domain of the model's nodes that no explicit library has, takes the first library whose records
    cover all of these nodes. Within a folder, libraries with fewer ops come first.

    Args:
        own: the model's own folders. Default: the folder of the model. A library of a needed domain there is
            an error: it is not loaded, and no other one is taken instead of it.
        others: returns the folders and files to search for a domain. Files that cannot be read are skipped.
        allow_model_libraries: whether to search the model's own folders too, first. A file `lib*.so` there
            that cannot be read is an error, unless it is a library that twinop did not build.
        confined: whether a symbolic link may not lead out of its folder.
        bodies: whether a function body may replace an op that no library has. Such a domain has no library.

    LibraryError: a library cannot be used, one of the model's own is not permitted, two have one domain, the
    ops of a domain are spread over several, or several installed packages have a domain. ModelError: no
    library has an op of the model, and no function body may replace it.
    """
    libraries: dict[str, Library] = {}
    for library in map(read_library, library_paths(explicit)):
        if not library.exports_ort:
            raise LibraryError(
                f"{library.path}: does not export RegisterCustomOps, so ONNX Runtime cannot load it. "
                "Expected a library such as build/libcustom_relu.so"
            )
        other = libraries.setdefault(library.domain, library)
        if real_path(library.path) != real_path(other.path):  # the same may be named again, also by a link
            raise LibraryError(
                f"{other.path} and {library.path} both have ops of the domain {library.domain}, and ONNX "
                "Runtime takes one library per domain and session. Name one of them, or link the ops of "
                "both into one library"
            )
    if own is None:
        own = [model.path.parent] if model.path is not None else []
    for domain in dict.fromkeys(node.proto.domain for node in model.nodes):
        if domain in libraries:
            continue
        places, allowed = others(domain), own
        if not allow_model_libraries:
            trusted = {real_path(place) for place in places}
            for folder in own:
                require_none(folder, domain, trusted)
            allowed = [folder for folder in own if real_path(folder) in trusted]
        if found := _covering(model, domain, allowed, places, confined, bodies):
            libraries[domain] = found
    return [sealed(library.path) for library in libraries.values()]


def _covering(
    model: Model, domain: str, own: Sequence[Path], others: Sequence[Path], confined: bool, bodies: bool
) -> Library | None:
    """Returns the first library with all ops of a domain; None if no library has any and bodies cover all."""
    needed = sorted({node.proto.op_type for node in model.nodes if node.proto.domain == domain})
    places = [*own, *others]
    libraries, skipped = _candidates(domain, places, len(own), confined)
    owners = {
        op: next((library for library in libraries if op in library.by_onnx_name), None) for op in needed
    }
    with_body = {op for op in needed if (domain, op) in model.bodies}
    lacking = [op for op, owner in owners.items() if owner is None and not (bodies and op in with_body)]
    if lacking:
        text = f"{model.name}: no library has {domain}::{', '.join(lacking)}"
        has_body = with_body.intersection(lacking)
        text += f", and {NO_BODIES if has_body else 'the model has no function body for it'}"
        found = [f"{library.path} ({', '.join(library.by_onnx_name)})" for library in libraries]
        text += f". Found: {'; '.join(found) or 'no library'}. Searched: {searched(domain, places)}."
        if skipped:
            text += f" Skipped: {'; '.join(skipped)}."
        package = model.metadata.get(package_key(domain), "")
        install = f"pip install {package}" if package else "install the package that has it"
        cure = how_to_build() if domain == DOMAIN else f"Build it (twinop build), {install}"
        raise ModelError(f"{text} {cure}, or name the library ({option('library')})")
    owned = {op: owner for op, owner in owners.items() if owner is not None}  # the rest runs on bodies
    for library in libraries if owned else ():
        if owned.keys() <= library.by_onnx_name.keys():
            return library
    if owned:
        spread = "; ".join(f"{op} is in {library.path.name}" for op, library in owned.items())
        raise LibraryError(
            f"{model.name} needs ops of several libraries: {spread}. ONNX Runtime takes one library per "
            f"domain and session. Link them into one (twinop_add_library), and name it ({option('library')})"
        )
    return None


def require_none(folder: Path, domain: str, trusted: Collection[Path]) -> None:
    """Raises LibraryError if a model's own folder holds a library of the domain, or one that is damaged."""
    for path in () if real_path(folder) in trusted else sorted(folder.glob("lib*.so")):
        try:
            if real_path(path) in trusted:
                continue
            read_library(path, domain=domain)
        except ForeignLibraryError:
            continue
        except LibraryError:  # it may be the one that was meant
            pass
        raise refused(path)


def refused(path: Path) -> LibraryError:
    """Returns the error for a library in a model's own folder."""
    return LibraryError(
        f"{path} lies in the model's own folder. A library can do all that this process can, so none is "
        f"loaded from there, and no other one instead of it. Name it ({option('library', path)}), or remove "
        f"it. If you trust all who can write to the models' folders: {allow()}"
    )


def _candidates(
    domain: str, places: Sequence[Path], own: int, confined: bool
) -> tuple[list[Library], list[str]]:
    """Returns the usable libraries, best first, and why others were skipped; an unreadable own one raises."""
    libraries: list[Library] = []
    skipped: list[str] = []
    folders = [real_path(folder) for folder in places]
    for folder in dict.fromkeys(folders):
        here = []
        for path in [folder] if folder.is_file() else sorted(folder.glob("lib*.so")):
            try:
                if confined and not real_path(path).is_relative_to(folder):
                    raise LibraryError(f"{path}: a symbolic link to {real_path(path)}, out of the folder")
                here.append(read_library(path, domain=domain))
            except ForeignLibraryError:
                continue
            except LibraryError as error:
                if folder in folders[:own]:
                    raise LibraryError(
                        f"{error}. It lies beside the model, so no other library is taken instead of it: "
                        "replace or remove it, or name the library to use"
                    ) from error
                skipped.append(str(error))
        # Those with the fewest ops; among equals, one that is named after one of its ops.
        here.sort(key=lambda each: (len(each.records), not each.path.stem.endswith((*each.records,))))
        libraries += (each for each in here if each.exports_ort)
    return libraries, skipped
