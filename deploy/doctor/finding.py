"""What `twinop doctor` finds, and what several checks share."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from twinop.installation import version_numbers

from ..cuda import cuda_text
from .facts import Environment

Level = Literal["OK", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What is as it is, and for a warning or an error what to do. `subject` is what it is about."""

    level: Level
    subject: str
    cause: str
    cure: str = ""


ok, warning, error = partial(Finding, "OK"), partial(Finding, "warning"), partial(Finding, "error")


def old_driver(facts: Environment, subject: str, needed: str, other: str) -> Iterator[Finding]:
    """Finds a driver that is too old for a build with CUDA `needed`. `other`: how to do without it."""
    if facts.gpus and facts.driver_cuda and needed and version_numbers(needed)[0] > facts.driver_cuda // 1000:
        yield error(
            subject,
            f"the NVIDIA driver is too old: it serves CUDA {cuda_text(facts.driver_cuda)}, and {subject} is "
            f"built with CUDA {needed}",
            f"update the driver, or {other.format(facts.driver_cuda // 1000)}",
        )


def from_message(level: Level, subject: str, message: str, cure: str) -> Finding:
    """Makes a finding of an error's message, whose last sentence mostly is the cure."""
    cause, found, last = one_line(message).rpartition(". ")
    return Finding(level, subject, cause, last) if found else Finding(level, subject, last, cure)


def one_line(text: str) -> str:
    return " ".join(text.split())
