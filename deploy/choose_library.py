"""Chooses the custom-op libraries that a model needs: one for each domain of its nodes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinop.errors import ForeignLibraryError, LibraryError
from twinop.library import Library, library_folders, read_library
from twinop.record import DOMAIN

from .custom_nodes import Model
from .errors import ModelError

Libraries = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""The path of one library, several paths, or None to look for libraries."""


def library_paths(library: Libraries) -> list[Path]:
    """Returns the given paths as a list."""
    if library is None:
        return []
    return [Path(library)] if isinstance(library, str | os.PathLike) else [Path(path) for path in library]


def choose_libraries(model: Model, explicit: Sequence[Path] = (), **search: Any) -> list[Library]:
    """The libraries to register for a model, one for each domain of its custom nodes.

    Args:
        model: the model, whose custom nodes say what is needed.
        explicit: libraries to use; the other domains' are looked for.
        search: where to look, as `choose_library` takes it.

    Returns:
        The explicit libraries, then those found. A domain whose function bodies run has none.

    Raises:
        LibraryError: one cannot be used, two are of one domain, or one domain's ops are spread over several.
        ModelError: no library has an op of the model, and no function body may stand in for it.
    """
    libraries: list[Library] = []
    for path in explicit:
        library = choose_library(model, path)
        assert library is not None
        for other in libraries:
            if other.domain == library.domain:
                raise LibraryError(
                    f"{other.path} and {library.path} both have ops of the domain {library.domain}, and ONNX "
                    "Runtime takes one library per domain and session. Name one of them, or link the ops of "
                    "both into one library"
                )
        libraries.append(library)
    have = {library.domain for library in libraries}
    for domain in dict.fromkeys(node.domain for node in model.nodes):
        if domain not in have and (found := choose_library(model, domain=domain, **search)) is not None:
            libraries.append(found)
    return libraries


def only_library(model: Model, explicit: Path | None = None, **search: Any) -> Library | None:
    """`choose_libraries` for what takes one library per model (the service, packing).

    Raises:
        LibraryError, ModelError: as `choose_libraries`; or the model needs several libraries.
    """
    libraries = choose_libraries(model, [explicit] if explicit is not None else [], **search)
    if len(libraries) > 1:
        needed = ", ".join(f"{library.domain} ({library.path.name})" for library in libraries)
        raise LibraryError(
            f"{model.name} needs libraries of several domains: {needed}. A served model has one library: "
            "open it with twinop.deploy.session instead"
        )
    return libraries[0] if libraries else None


def choose_library(
    model: Model,
    explicit: Path | None = None,
    *,
    own: Sequence[Path] | None = None,
    others: Sequence[Path] | None = None,
    confined: bool = False,
    bodies: bool = True,
    domain: str = DOMAIN,
) -> Library | None:
    """The library to register for a model's nodes of one domain.

    It is the first one whose records cover all custom nodes; in one folder, the one with the fewest ops.

    Args:
        model: the model, whose custom nodes say what is needed.
        explicit: the library to use, whatever else there is.
        own: the model's own folders, searched first. Default: where the model lies. A file `lib*.so` there
            that cannot be read is an error, unless it is a library that twinop did not build.
        others: the folders searched then. Default: `twinop.library.library_folders`. What cannot be read
            there is passed over.
        confined: whether a symbolic link may not lead out of its folder.
        bodies: whether a function body may stand in for an op that no library has.
        domain: the domain of the nodes and of the library.

    Returns:
        None if the model has no such nodes, or if no library has any of them and its function bodies cover
        them all.

    Raises:
        LibraryError: `explicit` or a library of the model's own cannot be used, or the ops are spread over
            several libraries.
        ModelError: no library has an op of the model, and no function body may stand in for it.
    """
    if explicit is not None:
        return _usable(explicit)
    needed = {node.op_type for node in model.nodes if node.domain == domain}
    if not needed:
        return None
    if own is None:
        own = [model.path.parent] if model.path is not None else []
    if others is None:
        others = library_folders()
    places = [*own, *others]
    libraries, skipped = _candidates(own, others, confined)
    libraries = [library for library in libraries if library.domain == domain]
    for library in libraries:
        if needed <= library.by_onnx_name.keys():
            return library
    owners = {op: [library for library in libraries if op in library.by_onnx_name] for op in sorted(needed)}
    homeless = [
        op for op, found in owners.items() if not found and not (bodies and (domain, op) in model.bodies)
    ]
    if homeless:
        raise ModelError(_no_library(model, domain, homeless, places, libraries, skipped))
    owned = {op for op, found in owners.items() if found}
    for library in libraries:  # the rest runs on function bodies
        if owned and owned <= library.by_onnx_name.keys():
            return library
    if not owned:
        return None
    raise LibraryError(_several(model, domain, {op: found[0] for op, found in owners.items() if found}))


def _usable(path: Path) -> Library:
    library = read_library(path)
    if not library.exports_ort:
        raise LibraryError(
            f"{path}: does not export RegisterCustomOps, so ONNX Runtime cannot load it. Expected a library "
            "such as build/libcustom_relu.so"
        )
    return library


def _candidates(
    own: Sequence[Path], others: Sequence[Path], confined: bool
) -> tuple[list[Library], list[str]]:
    """Usable libraries in the order of preference, and why others were passed over.

    Raises:
        LibraryError: one in `own` cannot be read.
    """
    libraries: list[Library] = []
    skipped: list[str] = []
    strict = {folder.resolve() for folder in own}
    for folder in dict.fromkeys(folder.resolve() for folder in (*own, *others)):
        here = []
        for path in sorted(folder.glob("lib*.so")):
            try:
                here.append(_read_in(folder, path, confined))
            except ForeignLibraryError:
                continue
            except LibraryError as error:
                if folder in strict:
                    raise LibraryError(
                        f"{error}. It lies beside the model, so no other library is taken instead of it: "
                        "replace or remove it, or name the library to use"
                    ) from error
                skipped.append(str(error))
        libraries += sorted((each for each in here if each.exports_ort), key=_size)
    return libraries, skipped


def _read_in(folder: Path, path: Path, confined: bool) -> Library:
    if confined and not path.resolve().is_relative_to(folder):
        raise LibraryError(f"{path}: a symbolic link to {path.resolve()}, out of the folder")
    return read_library(path)


def _size(library: Library) -> tuple[int, bool]:
    """How many ops; of libraries with as many, one that is named after an op comes first."""
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
    text += f". Found: {'; '.join(found) or 'no library'}. Searched: {', '.join(map(str, places))}."
    if skipped:
        text += f" Passed over: {'; '.join(skipped)}."
    return text + " Build it with ./build.sh, put it beside the model, or pass library=<path>"


def _several(model: Model, domain: str, owners: dict[str, Library]) -> str:
    spread = "; ".join(f"{op} is in {library.path.name}" for op, library in owners.items())
    ops = " ".join(f"twinop_op_{library.by_onnx_name[op].name}" for op, library in owners.items())
    return (
        f"{model.name} needs ops of several libraries: {spread}. ONNX Runtime takes one library per domain "
        "and session, so a model needs one that has all of its ops. Link them into one, in CMake: "
        f"twinop_add_library(my_ops DOMAIN {domain} OPS {ops}), and pass library=<path of libmy_ops.so>"
    )
