"""The progress of long work: the step, how much of it is done, and the memory that its processes have."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """Called at the start of each step, and while it goes on."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Shows a step.

        Args:
            step: what is done now, such as "writing"; one text for a whole step.
            done: how much of it is done, in bytes, or in parts such as segments.
            total: how much there is; 0 where that is not known.
        """


def silent(step: str, done: int = 0, total: int = 0) -> None:
    """Shows nothing: the default of functions that take a `Progress`."""


def tree_bytes() -> int:
    """Returns the memory of this process and of those below it, without the files that they have mapped."""
    children = dict[int, list[int]]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry))
    found = [os.getpid()]
    for each in found:
        found += children.get(each, ())
    return sum(map(_own_bytes, found))


def _own_bytes(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
