"""Load generated protobuf modules of other packages without importing these packages."""

import importlib.util
from pathlib import Path
from types import ModuleType


def generated_module(package: str, *path: str) -> ModuleType:
    """Load one generated file of an installed package.

    The package itself may be slow to import, or register messages under names that are already taken.

    Raises:
        ModuleNotFoundError: the package is not installed, or has no such file.
    """
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder, *path)
        spec = importlib.util.spec_from_file_location(f"_twinop_{package}_{file.stem}", file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(f"No module named {package!r}", name=package)
