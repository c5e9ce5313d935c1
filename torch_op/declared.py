"""Finds what runs an op that is declared in Python: its library, if that is up to date, or its launcher."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinop.errors import LibraryError, TwinopWarning
from twinop.libraries.declare import library_beside
from twinop.libraries.find import find_library_of
from twinop.libraries.kernel_op import DECLARED, KernelOp, describe_source
from twinop.libraries.library import read_library

from . import eager_kernels
from .registry import functions_by_namespace, load


def load_declared(key: str) -> Callable[..., Any] | None:
    """Returns the Python function of a declared op, by its `OpSpec.key`; None: no such op is declared.

    The library is taken if it was built from the op's file as it is. Otherwise the op runs without, which
    takes a Triton of a tested version.
    """
    declared = DECLARED.get(key)
    if declared is None:
        return None
    functions = functions_by_namespace[declared.record.namespace]
    if declared.name not in functions:
        path = _library_of(declared)
        if path is not None:
            load(path)
        else:
            for each in DECLARED.values():  # with the ops that its derivative may call
                if each.domain == declared.domain and each.file == declared.file:
                    eager_kernels.register(each, functions)
    return functions[declared.name]


def _library_of(declared: KernelOp) -> Path | None:
    """Returns the op's library, unless there is none or the op's file has changed since it was built."""
    for find in (library_beside(declared.file), lambda: find_library_of(declared.domain)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TwinopWarning)  # the one below says more
                library = read_library(find())
        except LibraryError:
            continue
        if library.domain != declared.domain or declared.name not in library.records:
            continue
        # Only the hashes are compared: the file has another name in an installed package.
        hashes = [part.rpartition("=")[2] for part in library.source.split()]
        if describe_source([declared.file]).rpartition("=")[2] in hashes:
            return library.path
        warnings.warn(
            f"{library.path} was built from another version of {declared.file.name}: its ops run without the "
            f"library. Build it again: twinop build {declared.file.name}",
            TwinopWarning,
            stacklevel=2,
        )
        return None
    return None
