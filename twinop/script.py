"""Finds a Python with the needed packages for files that are run directly (`python export/to_onnx.py`)."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def require(*packages: str, command: str = "./build.sh") -> None:
    """Restarts the program with the repository's .venv if this Python lacks a package.

    Without a .venv, or if it lacks them too, the program ends with a message that names `command`, which
    installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    venv = ROOT / ".venv"
    python = venv / "bin" / "python"
    if python.is_file() and Path(sys.prefix).resolve() != venv.resolve():
        # orig_argv, which has Python's own options, exists since 3.10.
        arguments = getattr(sys, "orig_argv", [sys.executable, *sys.argv])
        os.execv(python, [str(python), *arguments[1:]])
    sys.exit(
        f"error: {sys.executable} lacks {', '.join(missing)}. Run {command} in {ROOT}: it sets up .venv, "
        "which is then used"
    )
