"""The cache of builds: files named after a hash of all that they depend on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import twinop

from ..errors import BuildError


def cache_folder() -> Path:
    """Returns $TWINOP_CACHE, $XDG_CACHE_HOME/twinop or ~/.cache/twinop, and in it the folder of builds.

    BuildError: the folder belongs to another user, or others may write there: their code would run.
    """
    named = os.environ.get("TWINOP_CACHE")
    if not named:
        named = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/twinop"
    folder = Path(named).expanduser().absolute() / "build"
    for each in (folder.parent, folder):
        with suppress(OSError):  # not there yet, or whatever writes there says why it cannot
            if (status := each.stat()).st_uid != os.geteuid():
                raise BuildError(
                    f"{each}: the cache of builds belongs to another user, who could change what runs. Set "
                    "TWINOP_CACHE to a folder of your own"
                )
            if status.st_mode & 0o077 and each.name in ("twinop", "build"):
                each.chmod(0o700)
            elif status.st_mode & 0o022:
                raise BuildError(
                    f"{each}: others may write to the cache of builds, and so change what runs. Forbid it "
                    f"(chmod go-w {each}), or set TWINOP_CACHE to a folder of your own"
                )
    return folder


def digest(*parts: Any) -> str:
    """Returns a hash of values that JSON can write, and of this version of twinop."""
    text = json.dumps([twinop.__version__, *parts], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def writing(what: Path, cure: str = "name another file with -o") -> Iterator[None]:
    """Turns a failure to write, as to a full disk or a read-only folder, into one BuildError."""
    try:
        yield
    except OSError as error:
        if cache_folder() in (what, *what.parents):
            cure = "set TWINOP_CACHE to a folder on another disk"
        raise BuildError(f"{what}: cannot be written: {error.strerror}. Fix that, or {cure}") from error


def make_folder(folder: Path) -> None:
    """Makes a folder; those of the cache are their owner's alone."""
    if cache_folder() in folder.parents:
        for each in (cache_folder().parent, cache_folder()):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def write(file: Path, content: bytes) -> None:
    """Writes a file at once: nobody sees half of it. A file that has this content stays as it is."""
    with writing(file):
        if file.is_file() and file.read_bytes() == content:
            return
        make_folder(file.parent)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as temporary:
                temporary.write(content)
            Path(name).chmod(0o755 if file.suffix == ".so" else 0o644)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
