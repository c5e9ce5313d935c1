"""Imports the Python file of an op."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from ..errors import TwinopError


def load_module(path: Path) -> ModuleType:
    """Imports the Python file of an op under its own name; TwinopError: it fails, or the name is taken."""
    name = path.parent.name if path.name == "__init__.py" else path.stem
    if (known := sys.modules.get(name)) is not None:
        file = getattr(known, "__file__", None) or "built into Python"
        if Path(file).resolve() != path.resolve():
            raise TwinopError(
                f"{path} cannot be imported: another module has the name {name} ({file}). Rename the file"
            )
        return known
    folder = str(path.parent.parent if path.name == "__init__.py" else path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except TwinopError:
        raise
    except ModuleNotFoundError as error:
        package = {"triton": "'twinop[triton]'", "helion": "helion"}.get(error.name or "")
        advice = f". Install it: pip install {package}" if package else ""
        raise TwinopError(f"{path} cannot be imported: {error}{advice}") from error
    except Exception as error:
        raise TwinopError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
