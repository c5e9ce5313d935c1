"""Read a file that somebody else may have put there."""

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, most: int) -> bytes:
    """Returns the content of a regular file, or raises OSError: a FIFO would keep the caller waiting."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        data = file.read(status.st_size + 1)
        if len(data) > status.st_size:
            raise OSError(errno.EBUSY, "it grows while it is read", str(path))
        return data
