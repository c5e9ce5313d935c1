"""Files and links that somebody else may have put there."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def real_path(path: Path) -> Path:
    """Returns the path without links; that of a link to itself, for which `Path.resolve` raises, as it is."""
    return Path(os.path.realpath(path))


def require_utf8(path: Path) -> None:
    """Raises OSError for a path of other bytes."""
    if os.fsencode(path) != str(path).encode(errors="replace"):
        raise OSError(errno.EILSEQ, "ONNX Runtime opens paths of UTF-8 only. Rename the file or the folder")


def open_regular(path: Path, most: int) -> BinaryIO:
    """Opens a regular file, or raises OSError: a FIFO would keep the caller waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    problem = (errno.EFBIG, f"larger than {most} bytes") if status.st_size > most else None
    if not stat.S_ISREG(status.st_mode):
        problem = errno.EINVAL, "not a regular file"
    if problem is not None:
        os.close(handle)
        raise OSError(*problem, str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """Returns the content of a regular file, or raises OSError."""
    with open_regular(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
        if len(data) > size:
            raise OSError(errno.EBUSY, "it grows while it is read", str(path))
        return data
