"""A server whose runs or loads wait while a file exists."""

import json
from pathlib import Path

_PROGRAM = """
import json, os, sys, time
from twinop.cli import app
from twinop.deploy.service import instance, repository

def held(original, file):
    def call(*arguments):
        if os.path.exists(file):
            os.write(1, b"held\\n")  # at once: several threads may say it
        while os.path.exists(file):
            time.sleep(0.01)
        return original(*arguments)
    return call

places = {"runs": ("run", instance.Instance), "loads": ("load", repository)}
for what, file in json.loads(sys.argv[1]).items():
    name, owner = places[what]
    setattr(owner, name, held(getattr(owner, name), file))
app(sys.argv[2:])
"""


def held(**files: Path) -> tuple[str, ...]:
    """Return the program of a server whose `runs` or `loads` wait while their file exists."""
    return "-c", _PROGRAM, json.dumps({what: str(file) for what, file in files.items()})
