"""Chooses the custom-op libraries that a model needs: one for each domain of its nodes."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from twinop.errors import ForeignLibraryError, LibraryError, option
from twinop.find import package_key, places_of, searched
from twinop.installation import how_to_build
from twinop.library import Library, library_folders, read_library
from twinop.op_spec import DOMAIN

from .custom_nodes import Model
from .errors import ModelError
from .registration import SealedLibrary, sealed

Libraries = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""The path of one library, several paths, or None to look for libraries."""


def allow() -> str:
    """Returns how libraries in models' own folders are permitted."""
    how = option("allow_model_libraries", True)
    return f"{how}, or allow_model_libraries = true under [policy] in the server's twinop.toml"


def library_paths(library: Libraries) -> list[Path]:
    if library is None:
        return []
    return [Path(library)] if isinstance(library, str | os.PathLike) else [Path(path) for path in library]


def choose_libraries(
    model: Model,
    explicit: Sequence[Path] = (),
    others: Callable[[str], Sequence[Path]] | None = None,
    **search: Any,
) -> list[SealedLibrary]:
    """Chooses the libraries to register for a model, one a domain, and copies them.

    Args:
        model: the model, whose custom nodes say what is needed.
        explicit: libraries to use. Libraries of the other domains are looked for.
        others: returns, for a domain, the argument of `choose_library`.
        search: where to look, as in `choose_library`.

    Returns:
        The explicit libraries, then those found. A domain whose function bodies run has none.

    Raises:
        LibraryError: a library cannot be used, two have one domain, or the ops of a domain are spread over
            several libraries.
        ModelError: no library has an op of the model, and no function body may replace it.
    """
    libraries: dict[str, Library] = {}
    for path in explicit:
        library = _usable(path)
        if other := libraries.get(library.domain):
            raise LibraryError(
                f"{other.path} and {library.path} both have ops of the domain {library.domain}, and ONNX "
                "Runtime takes one library per domain and session. Name one of them, or link the ops of "
                "both into one library"
            )
        libraries[library.domain] = library
    for domain in dict.fromkeys(node.domain for node in model.nodes):
        if domain in libraries:
            continue
        places = others(domain) if others is not None else None
        if (found := choose_library(model, others=places, domain=domain, **search)) is not None:
            libraries[domain] = found
    return [sealed(library.path) for library in libraries.values()]


def choose_library(
    model: Model,
    *,
    own: Sequence[Path] | None = None,
    others: Sequence[Path] | None = None,
    allow_model_libraries: bool = False,
    confined: bool = False,
    bodies: bool = True,
    domain: str = DOMAIN,
) -> Library | None:
    """Chooses the library for a model's nodes of one domain.

    Takes the first library whose records cover all of these nodes. Within a folder, libraries with fewer
    ops come first.

    Args:
        model: the model, whose custom nodes say what is needed.
        own: the model's own folders. Default: the folder of the model. A library of the domain there is an
            error: it is not loaded, and no other one is taken instead of it.
        others: the folders and files to search. Default: `twinop.find.places_of` the domain. Files there that
            cannot be read are skipped.
        allow_model_libraries: whether to search the model's own folders too, first. A file `lib*.so` there
            that cannot be read is an error, unless it is a library that twinop did not build.
        confined: whether a symbolic link may not lead out of its folder.
        bodies: whether a function body may replace an op that no library has.
        domain: the domain of the nodes and of the library.

    Returns:
        None if the model has no such nodes, or if no library has any of them and function bodies cover all.

    Raises:
        LibraryError: a library of the model's own is not permitted or cannot be used, several libraries share
            the ops, or several installed packages have the domain.
        ModelError: no library has an op of the model, and no function body may replace it.
    """
    needed = {node.op_type for node in model.nodes if node.domain == domain}
    if not needed:
        return None
    if own is None:
        own = [model.path.parent] if model.path is not None else []
    others = places_of(domain, library_folders()) if others is None else others
    if not allow_model_libraries:
        trusted = {place.resolve() for place in others}
        for folder in own:
            require_none(folder, domain, trusted)
        own = [folder for folder in own if folder.resolve() in trusted]
    places = [*own, *others]
    libraries, skipped = _candidates(places, len(own), confined)
    libraries = [library for library in libraries if library.domain == domain]
    owners = {op: [library for library in libraries if op in library.by_onnx_name] for op in sorted(needed)}
    homeless = [
        op for op, found in owners.items() if not found and not (bodies and (domain, op) in model.bodies)
    ]
    if homeless:
        raise ModelError(_no_library(model, domain, homeless, places, libraries, skipped))
    owned = {op: found[0] for op, found in owners.items() if found}  # the rest runs on function bodies
    if not owned:
        return None
    for library in libraries:
        if owned.keys() <= library.by_onnx_name.keys():
            return library
    raise LibraryError(_several(model, domain, owned))


def _usable(path: Path) -> Library:
    library = read_library(path)
    if not library.exports_ort:
        raise LibraryError(
            f"{path}: does not export RegisterCustomOps, so ONNX Runtime cannot load it. Expected a library "
            "such as build/libcustom_relu.so"
        )
    return library


def require_none(folder: Path, domain: str, trusted: Collection[Path]) -> None:
    """Raises LibraryError if a model's own folder holds a library of the domain, or one that is damaged."""
    for path in () if folder.resolve() in trusted else sorted(folder.glob("lib*.so")):
        try:
            if path.resolve() in trusted or read_library(path).domain != domain:
                continue
        except ForeignLibraryError:
            continue
        except LibraryError:  # it may be the one that was meant
            pass
        raise LibraryError(
            f"{path} lies in the model's own folder. A library can do all that this process can, so none is "
            f"loaded from there, and no other one instead of it. Name it ({option('library', path)}), "
            f"or remove it. If you trust all who can write to the models' folders: {allow()}"
        )


def _candidates(places: Sequence[Path], own: int, confined: bool) -> tuple[list[Library], list[str]]:
    """Returns usable libraries in the order of preference, and why others were skipped.

    Raises:
        LibraryError: one in the first `own` places cannot be read.
    """
    libraries: list[Library] = []
    skipped: list[str] = []
    folders = [folder.resolve() for folder in places]
    for folder in dict.fromkeys(folders):
        here = []
        for path in [folder] if folder.is_file() else sorted(folder.glob("lib*.so")):
            try:
                if confined and not path.resolve().is_relative_to(folder):
                    raise LibraryError(f"{path}: a symbolic link to {path.resolve()}, out of the folder")
                here.append(read_library(path))
            except ForeignLibraryError:
                continue
            except LibraryError as error:
                if folder in folders[:own]:
                    raise LibraryError(
                        f"{error}. It lies beside the model, so no other library is taken instead of it: "
                        "replace or remove it, or name the library to use"
                    ) from error
                skipped.append(str(error))
        libraries += sorted((each for each in here if each.exports_ort), key=_size)
    return libraries, skipped


def _size(library: Library) -> tuple[int, bool]:
    """Sorts by the number of ops; among equals, a library that is named after one of its ops comes first."""
    return len(library.records), not any(library.path.stem.endswith(name) for name in library.records)


def _no_library(
    model: Model,
    domain: str,
    ops: list[str],
    places: Sequence[Path],
    libraries: list[Library],
    skipped: list[str],
) -> str:
    text = f"{model.name}: no library has {domain}::{', '.join(ops)}"
    if not model.bodies.intersection((domain, op) for op in ops):
        text += ", and the model has no function body for it"
    found = [f"{library.path} ({', '.join(library.by_onnx_name)})" for library in libraries]
    text += f". Found: {'; '.join(found) or 'no library'}. Searched: {searched(domain, places)}."
    if skipped:
        text += f" Passed over: {'; '.join(skipped)}."
    if domain == DOMAIN:
        return f"{text} {how_to_build()}, or name the library ({option('library')})"
    return (
        f"{text}{_package(model, domain)} Build it (twinop build), install the package that has it, "
        f"or name the library ({option('library')})"
    )


def _package(model: Model, domain: str) -> str:
    """Says which package had the library when the model was exported, if it was one."""
    package = model.metadata.get(package_key(domain))
    return f" The model was exported with the package {package}: pip install {package}." if package else ""


def _several(model: Model, domain: str, owners: dict[str, Library]) -> str:
    spread = "; ".join(f"{op} is in {library.path.name}" for op, library in owners.items())
    ops = " ".join(f"twinop_op_{library.by_onnx_name[op].name}" for op, library in owners.items())
    return (
        f"{model.name} needs ops of several libraries: {spread}. ONNX Runtime takes one library per domain "
        "and session, so a model needs one that has all of its ops. Link them into one, in CMake: "
        f"twinop_add_library(my_ops DOMAIN {domain} OPS {ops}), and name libmy_ops.so ({option('library')})"
    )
