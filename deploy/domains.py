"""The custom-op libraries of a model: one for each domain that it names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinop.deploy.choose_library import choose_library
from twinop.deploy.custom_nodes import Model
from twinop.errors import LibraryError
from twinop.library import Library


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
