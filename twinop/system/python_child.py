"""Commands of child processes in Python, which take no code from the current folder as `python -m` does."""

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..errors import LibraryError, TwinopError, TwinopWarning
from ..installation import ROOT

SAY_ERROR = (
    "sys.excepthook = lambda _, error, __: sys.stdout.buffer.write(str(error).encode(errors='replace')); "
)
"""A statement of a program for `require_loads`: its exception is what it prints."""
_LOAD = (
    f"import ctypes, sys; {SAY_ERROR}library = ctypes.CDLL(sys.argv[1], 2); "
    "sys.excepthook = sys.__excepthook__; table = library.twinop_library; "
    "table.restype = ctypes.c_void_p; table(1)"
)
_SECONDS = 60


def paths() -> list[str]:
    """Returns where this process finds its modules; the current folder only if PYTHONPATH names it."""
    named = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    return [path for path in sys.path if path and (path in named or os.path.abspath(path) != os.getcwd())]


def executable() -> str:
    """Returns the file of Python; "" where there is none: `sys.executable` may be that of a frozen app."""
    in_prefix = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    found = [sys.executable, getattr(sys, "_base_executable", ""), in_prefix]
    for path in found[1:] if getattr(sys, "frozen", False) else found:
        if (
            path
            and re.match(r"(python|pypy)[\d.]*[a-z]*$", os.path.basename(path))
            and os.access(path, os.X_OK)
        ):
            return path
    return ""


def warn_unprotected(what: str) -> None:
    """Says what happens in this process, since there is no Python for another one."""
    warnings.warn(f"no Python interpreter was found for a child process: {what}", TwinopWarning, stacklevel=3)


def _python() -> str:
    if not (found := executable()):
        raise TwinopError(f"no Python interpreter was found for a child process ({sys.executable} is none)")
    return found


def python(program: str, *arguments: str) -> list[str]:
    """Returns the command that runs a program's text where this process finds its modules (`paths`)."""
    start = f"import sys; sys.path[:] = {[*paths(), str(ROOT)]!r}; {program}"
    return [_python(), "-I", "-c", start, *arguments]


def bare(program: str, *arguments: str) -> list[str]:
    """Returns the command that runs a program's text with Python's own modules alone."""
    return [_python(), "-I", "-S", "-c", program, *arguments]


def require_loads(library: Path, file: str, *passed: int, program: Sequence[str] = ()) -> str:
    """Loads a library in another process first: a damaged one can end the process that loads it, or hang it.

    `library` is the name for messages, `file` what is loaded, which may be one of the descriptors `passed`.
    The program (its text, and arguments of `python`) loads it; by default it is asked for its table.

    Returns why the loader refuses it: loaded again, it may end the process. "" where it may be loaded here.
    LibraryError: the process is ended by a signal or the loader, or does not end.
    """
    if not executable():
        warn_unprotected(f"{library} is loaded without a trial, and if it is damaged, it may end this one")
        return ""
    command = python(*program) if program else bare(_LOAD, file)
    try:
        done = subprocess.run(command, pass_fds=passed, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        how = f"does not end in {_SECONDS} s"
    else:
        status, said = done.returncode, done.stdout.decode(errors="replace")
        if status in (0, 1):  # another library that it needs may be loaded here already
            return "" if status == 0 or "cannot open shared object file" in said else said
        how = f"ends with {signal.Signals(-status).name if status < 0 else f'code {status}'}"
    raise LibraryError(
        f"{library}: the file is damaged: a process that loads it {how}. Copy or build it again"
    )


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module, as `python -m` does."""
    return python(
        f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments
    )
