"""Commands of child processes in Python, which take no code from the current folder as `python -m` does."""

import os
import sys

from .installation import ROOT


def python(program: str, *arguments: str) -> list[str]:
    """Returns the command that runs a program's text where this process finds its modules.

    The current folder is not searched, unless PYTHONPATH names it.
    """
    named = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    paths = [path for path in sys.path if path and (path in named or os.path.abspath(path) != os.getcwd())]
    paths.append(str(ROOT))
    return [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {paths!r}; {program}", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module, as `python -m` does."""
    return python(
        f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments
    )
