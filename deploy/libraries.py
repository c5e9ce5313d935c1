"""Chooses the one custom-op library that a model needs."""

from collections.abc import Sequence
from pathlib import Path

from twinop.deploy.errors import ModelError
from twinop.deploy.model import Model
from twinop.errors import LibraryError
from twinop.library import Library, library_folders, read_library
from twinop.record import DOMAIN


def choose_library(
    model: Model,
    explicit: Path | None = None,
    *,
    folders: Sequence[Path] | None = None,
    bodies: bool = True,
) -> Library | None:
    """The library to register for a model.

    Looked for beside the model and in the folders of `twinop.library.library_folders`: the first whose
    records cover all custom nodes; in one folder the library with the fewest ops.

    Args:
        model: the model, whose custom nodes say what is needed.
        explicit: the library to use, whatever else there is.
        folders: where to look instead, in order. A symbolic link that leads out of its folder is passed over.
        bodies: whether a function body may stand in for an op that no library has.

    Returns:
        None if the model has no custom nodes, or if no library has any of them and its function bodies cover
        them all.

    Raises:
        LibraryError: `explicit` cannot be used, or the ops are spread over several libraries.
        ModelError: no library has an op of the model, and no function body may stand in for it.
    """
    if explicit is not None:
        return _usable(explicit)
    needed = {node.op_type for node in model.nodes}
    if not needed:
        return None
    places = list(folders) if folders is not None else _places(model)
    libraries, skipped = _candidates(places, confined=folders is not None)
    for library in libraries:
        if needed <= library.by_onnx_name.keys():
            return library
    owners = {op: [library for library in libraries if op in library.by_onnx_name] for op in sorted(needed)}
    homeless = [op for op, found in owners.items() if not found and not (bodies and op in model.bodies)]
    if homeless:
        raise ModelError(_no_library(model, homeless, places, libraries, skipped))
    owned = {op for op, found in owners.items() if found}
    for library in libraries:  # the rest runs on function bodies
        if owned and owned <= library.by_onnx_name.keys():
            return library
    if not owned:
        return None
    raise LibraryError(_several(model, {op: found[0] for op, found in owners.items() if found}))


def _usable(path: Path) -> Library:
    library = read_library(path)
    if not library.exports_ort:
        raise LibraryError(
            f"{path}: does not export RegisterCustomOps, so ONNX Runtime cannot load it. Expected an ONNX "
            "Runtime library such as build/libcustom_relu.so (libtwinop_torch.so is the one for PyTorch)"
        )
    return library


def _places(model: Model) -> list[Path]:
    return ([model.path.parent] if model.path is not None else []) + library_folders()


def _candidates(folders: Sequence[Path], confined: bool) -> tuple[list[Library], list[str]]:
    """Usable libraries in the order of preference, and why others were passed over."""
    libraries: list[Library] = []
    skipped: list[str] = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        here = []
        for path in sorted(folder.glob("lib*.so")):
            if confined and not path.resolve().is_relative_to(folder):
                skipped.append(f"{path}: a symbolic link to {path.resolve()}, out of the folder")
                continue
            try:
                here.append(read_library(path))
            except LibraryError as error:
                if "without twinop records" not in str(error):  # somebody else's library
                    skipped.append(str(error))
        libraries += sorted((each for each in here if each.exports_ort), key=_size)
    return libraries, skipped


def _size(library: Library) -> tuple[int, bool]:
    """How many ops; of libraries with as many, one that is named after an op comes first."""
    return len(library.records), not any(library.path.stem.endswith(name) for name in library.records)


def _no_library(
    model: Model, ops: list[str], places: Sequence[Path], libraries: list[Library], skipped: list[str]
) -> str:
    text = f"{model.name}: no library has {DOMAIN}::{', '.join(ops)}"
    if not model.bodies.intersection(ops):
        text += ", and the model has no function body for it"
    found = [f"{library.path} ({', '.join(library.by_onnx_name)})" for library in libraries]
    text += f". Found: {'; '.join(found) or 'no library'}. Searched: {', '.join(map(str, places))}."
    if skipped:
        text += f" Passed over: {'; '.join(skipped)}."
    return text + " Build it with ./build.sh, put it beside the model, or pass library=<path>"


def _several(model: Model, owners: dict[str, Library]) -> str:
    spread = "; ".join(f"{op} is in {library.path.name}" for op, library in owners.items())
    ops = " ".join(f"twinop_op_{library.by_onnx_name[op].name}" for op, library in owners.items())
    return (
        f"{model.name} needs ops of several libraries: {spread}. ONNX Runtime takes one library per domain "
        "and session, so a model needs one that has all of its ops. Link them into one, in CMake: "
        f"twinop_add_ort_library(my_ops OPS {ops}), and pass library=<path of libmy_ops.so>"
    )
