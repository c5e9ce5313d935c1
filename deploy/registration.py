"""Registers custom-op libraries with ONNX Runtime, and refuses a file that was replaced after loading."""

import os
import threading
from _ctypes import dlclose, dlopen
from functools import lru_cache
from pathlib import Path
from typing import Any

from twinop.errors import LibraryError, ReplacedLibraryError
from twinop.library import Library, checksum

_lock = threading.Lock()
_loaded: dict[int, str] = {}  # the checksum of each library when it was loaded, by the loader's handle


def register(options: Any, library: Library) -> str:
    """Registers a library on session options and returns the SHA-256 of the code that will run.

    The loader knows libraries by path and inode, and twinop's stay loaded until the process ends (CMake links
    them with nodelete). For a file that was replaced, the loader would return the old code.

    Raises:
        ReplacedLibraryError: this process has loaded another file from there.
        LibraryError: ONNX Runtime cannot load it.
    """
    path = library.path.absolute()  # the loader compares paths as texts
    with _lock:
        try:
            found = _checksum(path, *_stamp(path))
        except OSError as error:
            raise LibraryError(f"{path}: cannot be read: {error.strerror}. Put it there again") from error
        handle = _handle(path)
        if handle is not None and _loaded.get(handle, found) != found:
            raise ReplacedLibraryError(
                f"{path}: the file was replaced after this process loaded it, and the old library stays "
                "loaded until the process ends. Restart it, or put the new library under another name or in "
                "another folder (for twinop serve, a new version's)"
            )
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:
            raise LibraryError(f"{path}: ONNX Runtime cannot load it: {error}") from error
        handle = _handle(path)
        if handle is not None:
            _loaded[handle] = found
    return found


def _handle(path: Path) -> int | None:
    """Returns the loader's handle of a loaded library, or None if the loader would read the file."""
    try:
        handle = dlopen(str(path), os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    dlclose(handle)  # releases the reference; the library keeps its handle
    return handle


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _checksum(path: Path, *stamp: int) -> str:
    """Returns the checksum, which is computed only if the stamp is new: a large library takes 30 ms."""
    return checksum(path)
