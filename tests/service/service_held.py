"""A server whose runs or loads wait while a file exists."""

from pathlib import Path

_PROGRAM = """
import os, sys, time
from twinop.cli import app
from twinop.deploy.service import instance, repository

owner, name = {"runs": (instance.Instance, "run"), "loads": (repository, "load")}[sys.argv[1]]
original, file = getattr(owner, name), sys.argv[2]

def held(*arguments):
    if os.path.exists(file):
        print('{"message": "held"}', flush=True)
    while os.path.exists(file):
        time.sleep(0.01)
    return original(*arguments)

setattr(owner, name, held)
app(sys.argv[3:])
"""


def held(what: str, file: Path) -> tuple[str, ...]:
    """Return the program of a server whose "runs" or "loads" wait while the file exists."""
    return "-c", _PROGRAM, what, str(file)
