"""What one process of the tests makes for all: the processes of a run start each with nothing."""

import atexit
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

_PLACE = "TWINOP_MADE_ONCE"


def start() -> None:
    """Makes the folder that the processes share, in the one that starts them, and removes it in the end."""
    if _PLACE in os.environ:
        return
    folder, owner = tempfile.mkdtemp(prefix="twinop-tests-"), os.getpid()
    os.environ[_PLACE] = folder

    def remove() -> None:
        if os.getpid() == owner:  # no fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def made_once(what: object, make: Callable[[Path], object]) -> Path:
    """Returns the folder that `make` fills, in the first process that asks for `what`."""
    start()
    folder = Path(os.environ[_PLACE], f"{zlib.crc32(repr(what).encode()):08x}")
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (done := folder.with_suffix(".done")).exists():
            make(folder)
            done.touch()
    return folder
