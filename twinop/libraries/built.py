"""What `twinop build` notes beside a library: that it was built here, and from which files."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from ..errors import TwinopWarning
from ..system.regular_file import read_regular
from .library import checksum

_MOST_BYTES = 1 << 30  # of a source file or a note
_warned: set[tuple[Path, str]] = set()


def mark(library: Path) -> Path:
    """Returns the file that says that a library in `build/` was built there. TwinopOp.cmake makes it too."""
    return library.with_name(f".{library.name}.built")


def note_of(library: Path, sources: Mapping[str, str | None]) -> bytes:
    """Returns what `mark` says of a library; `sources`: each file it was built from, with its `file_hash`."""
    named = {os.path.relpath(path, library.parent.absolute()): found for path, found in sources.items()}
    return json.dumps({"library": checksum(library), "sources": named}, indent=1).encode()


def file_hash(path: str | os.PathLike[str]) -> str | None:
    """Returns a hash of a file's content; None if there is no such file."""
    try:
        return hashlib.sha256(read_regular(Path(path), _MOST_BYTES)).hexdigest()
    except OSError:
        return None


def changed_since(library: Path) -> str:
    """Returns a message if a file that `twinop build` read for a library now has another content, else "".

    Files that are no longer there say nothing: the library may have been copied without them.
    """
    try:
        note = json.loads(read_regular(mark(library), _MOST_BYTES))
        sources = {(library.parent / path).resolve(): found for path, found in note["sources"].items()}
        if note["library"] != checksum(library):  # another tool wrote it
            return ""
    except (AttributeError, KeyError, OSError, TypeError, ValueError):  # of CMake or an older twinop
        return ""
    changed = [str(path) for path, found in sources.items() if file_hash(path) not in (None, found)]
    if not changed:
        return ""
    have = "has" if len(changed) == 1 else "have"
    return (
        f"{', '.join(changed)} {have} changed since {library} was built, which still computes what it was "
        f"built from. Build it again (twinop build, in {library.parent.parent})"
    )


def warn_if_old(library: str | os.PathLike[str]) -> None:
    """Warns, once in a process, of a library that is older than the files it was built from."""
    path = Path(library).resolve()
    said = changed_since(path)
    if said and (path, said) not in _warned:
        _warned.add((path, said))
        warnings.warn(said, TwinopWarning, stacklevel=3)
