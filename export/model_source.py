"""Loads the model of `twinop export` from the user's code: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from twinop.errors import ExportError, TwinopError

Result = TypeVar("Result")


def load_model(spec: str, what: str) -> tuple[torch.nn.Module, Any]:
    """Returns the module that a user's code makes, and its example inputs.

    Args:
        spec: `file.py:name` or `package.module:name`. The name is that of a function without arguments that
            returns (module, example inputs), or of a Module class with a method `example_inputs()`.
        what: the start of error messages, of ExportError: it is not there, fails, or returns something else.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ExportError(
            f"{what}: expected file.py:name or package.module:name, such as model.py:Net or "
            "my_package.models:resnet. The name is that of a function that returns (module, example inputs), "
            "or of a Module class with a method example_inputs()"
        )
    is_file = place.endswith(".py") or "/" in place
    if not is_file and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module = _import_file(Path(place), what) if is_file else _import_module(place, what)
    if name not in vars(module):
        own = [key for key, value in vars(module).items() if callable(value)]
        available = [key for key in own if getattr(vars(module)[key], "__module__", "") == module.__name__]
        raise ExportError(f"{what}: {place} has no {name}; it has: {', '.join(available) or 'none'}")
    found = getattr(module, name)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = _call(found, f"{what}: {name}()")
    if isinstance(found, torch.nn.Module):
        return found, _example_inputs(found, name, what)
    if not callable(found):
        raise ExportError(
            f"{what}: {name} is {type(found).__name__}; expected a function that returns (module, example "
            "inputs), or a Module class with example_inputs()"
        )
    result = _call(found, f"{what}: {name}()")
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        names = ", ".join(type(each).__name__ for each in result) if isinstance(result, tuple) else ""
        raise ExportError(
            f"{what}: {name}() returned {f'({names})' if names else type(result).__name__}; "
            "expected (torch.nn.Module, example inputs), such as return model, (torch.randn(4, 8),)"
        )
    return result


def _example_inputs(module: torch.nn.Module, name: str, what: str) -> Any:
    method = getattr(module, "example_inputs", None)
    if not callable(method):
        raise ExportError(
            f"{what}: the Module class {name} has no method example_inputs(). Expected one that returns a "
            "tensor, a tuple, or a dict by name; or name a function that returns (module, example inputs)"
        )
    return _call(method, f"{what}: {name}.example_inputs()")


def _import_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ExportError(
                f"{what}: no module {error.name}; searched the current folder, PYTHONPATH and the "
                f"environment of {sys.executable}"
            ) from error
        raise ExportError(f"{what}: importing {name} failed: {_described(error)}") from error


def _import_file(path: Path, what: str) -> ModuleType:
    """Imports a file as Python runs a script: modules beside it can be imported."""
    if not path.is_file():
        raise ExportError(f"{what}: no such file: {path.absolute()}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem.isidentifier() else re.sub(r"\W", "_", path.stem)
    if (known := sys.modules.get(name)) is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"{name}_of_twinop_export"  # the other module stays what it is
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ExportError(f"{what}: {path} is not a Python file. Expected one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ExportError(f"{what}: importing {path.name} failed: {_described(error)}") from error
    return module


def _call(function: Callable[[], Result], what: str) -> Result:
    try:
        return function()
    except TwinopError:
        raise
    except Exception as error:
        raise ExportError(f"{what} failed: {_described(error)}") from error


def _described(error: Exception) -> str:
    """Returns the error and the line that raised it, in place of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
