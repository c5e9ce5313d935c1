"""Runs the tests in a child process, and says which call ended it where a kernel does."""

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_CALL = 1 << 12  # bytes for the call
_SIZE = 1 << 22
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


def note_call(text: str) -> None:
    """Keeps the call that runs now, of an op."""
    _write(0, text.encode()[: _CALL - 1])


def note(**what: Any) -> None:
    """Keeps what runs now: `test`, `failures`. A key that is not given keeps its value."""
    text = json.dumps(running() | what).encode()
    if len(text) < _SIZE - _CALL:
        _write(_CALL, text)


def running() -> dict[str, Any]:
    """Returns what `note` kept; nothing before the first test."""
    try:
        return dict(json.loads(_read(_CALL)))
    except ValueError:
        return {}


def _write(place: int, text: bytes) -> None:
    if _shared is not None:
        _shared[place : place + len(text) + 1] = text + b"\0"


def _read(place: int) -> str:
    return _shared[place : _shared.find(b"\0", place)].decode(errors="replace") if _shared else ""


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
    name, last = signal.Signals(os.WTERMSIG(status)).name, running()
    for failure in last.get("failures", ()):
        print(f"\n{failure}", file=sys.stderr)
    where = f" in {last['test']}" if "test" in last else " before the first test"
    why = f"{_WHY.get(name, _MEMORY)}. The tests behind it did not run"
    print(f"\nerror: {_read(0) or 'the process'} ended with {name}{where}. {why}", file=sys.stderr)
    return 1
