"""The errors that twinop raises on purpose. Each says what was wrong, what was expected, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_in_command = False


@contextmanager
def command_line(in_command: bool = True) -> Iterator[None]:
    """Lets messages name a command's options, not the keywords of Python functions."""
    global _in_command
    before, _in_command = _in_command, in_command
    try:
        yield
    finally:
        _in_command = before


def in_command() -> bool:
    """Whether a command runs, so that messages name its options."""
    return _in_command


def option(keyword: str, value: Any = None) -> str:
    """Returns an option as its user gives it: `bodies=False` in Python, `--no-bodies` to a command."""
    if not _in_command:
        return f"{keyword}={'' if value is None else repr(value) if isinstance(value, str) else value}"
    name = {"inputs_file": "inputs"}.get(keyword, keyword).replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}" if value is None else f"--{name} {value}"


class TwinopError(Exception):
    """Base of all twinop errors."""


class TwinopWarning(RuntimeWarning):
    """Something works, but not as it was meant. On the command line it is shown as a note."""


class RecordError(TwinopError):
    """An op record or one of its texts does not parse, or a call does not fit it."""


class RecordSyntaxError(RecordError):
    """A text of a record does not parse."""


class LibraryError(TwinopError):
    """A custom-op library is missing, damaged, for another machine, or not twinop's."""


class ForeignLibraryError(LibraryError):
    """A shared library that was not built by twinop, or has no op of the wanted domain."""


class ExportError(TwinopError):
    """A model cannot be exported to ONNX, or the exported model does not fulfil the request."""


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk, or a limit of file sizes, does not let a file be written."""
    of_disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return isinstance(error, OSError) and error.errno in of_disk


class BuildError(TwinopError):
    """An op's sources cannot be built into a library; `output` is all that the compiler said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
