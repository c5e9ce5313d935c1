"""Runs the tests in a child process, and says which call ended it where a kernel does."""

import mmap
import os
import signal
import sys
from collections.abc import Callable

_SIZE = 1 << 12
_shared: mmap.mmap | None = None  # what runs now, which outlives the child

_WHY = {
    "SIGABRT": "Often, memory beyond a tensor was overwritten: as<std::int64_t>() of a float32 tensor is "
    "too long (InputData and OutputData compare with the record's dtypes)",
    "SIGFPE": "A whole number was divided by zero: look at sizes that are 0",
}
_MEMORY = "The kernel reads or writes where no tensor is: look at rows without elements, and at sizes of 0"


def is_watched() -> bool:
    """Whether this is such a child."""
    return _shared is not None


def note(what: str) -> None:
    """Keeps what runs now."""
    if _shared is not None:
        text = what.encode()[: _SIZE - 1]
        _shared[: len(text) + 1] = text + b"\0"


def run(tests: Callable[[], int]) -> int:
    """Runs the tests, which return the exit code, in a child; where a kernel ends it, the code is 1."""
    global _shared
    _shared = mmap.mmap(-1, _SIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()  # before torch is imported, so that neither threads nor a GPU are in use
    if not child:
        code = tests()  # an exception goes up to what shows it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    name = signal.Signals(os.WTERMSIG(status)).name
    last = _shared[: _shared.find(b"\0")].decode(errors="replace")
    said = f"{last or 'the process'} ended with {name}. {_WHY.get(name, _MEMORY)}"
    print(f"\nerror: {said}. No failures are shown, and the tests behind it did not run", file=sys.stderr)
    return 1
