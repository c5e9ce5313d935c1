"""Notice that files changed, such as certificates and tokens that are renewed."""

import os
import time
from pathlib import Path

SECONDS = 1.0  # between looks at the files


class Watched:
    """Files whose changes are noticed when somebody asks."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._stamp = self._look()
        self._next = 0.0

    def changed(self) -> bool:
        """Return whether a file changed, appeared or vanished since the last call that said so."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + SECONDS
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def _look(self) -> list[tuple[int, ...]]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
