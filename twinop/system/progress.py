"""The progress of long work: the step, and how much of it is done."""

from typing import Protocol


class Progress(Protocol):
    """Called at the start of each step, and while it goes on."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Shows a step, and how much of it is done, in bytes or parts; a total of 0 is not known."""


def silent(step: str, done: int = 0, total: int = 0) -> None:
    """Shows nothing: the default of functions that take a `Progress`."""
