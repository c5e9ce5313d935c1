"""The progress of long work: the step, and how much of it is done."""

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
