"""Finds the libraries, the modules of function bodies and the tests that `twinop test` and `bench` mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from twinop.errors import TwinopError
from twinop.libraries.declare import load_module
from twinop.libraries.find import project_libraries
from twinop.libraries.library import read_library
from twinop.record.op_spec import DOMAIN

TARGET = "--twinop-target"
"""pytest's option for what to test."""

Target = tuple[dict[Path, Path | None], list[Path]]
"""Libraries, each with the file of its ops' bodies if there is one, and the project's own test files."""


def find_target(given: Path) -> Target:
    """Finds what a path means: a library, a project, an op's Python file; TwinopError: none of them."""
    if not given.exists():
        raise TwinopError(
            f"{given}: no such file or folder. Expected a library (build/libmish.so), the Python file of an "
            "op (mish.py), or the folder of a project"
        )
    given = given.resolve()
    if given.is_dir():
        return _project(given)
    if given.suffix == ".py":
        library = _library_of(given)
        return {library: given}, _tests_of(given)
    module = _module_of(given)
    return {given: module}, _tests_of(module) if module else []


def _project(folder: Path) -> Target:
    libraries = sorted(folder.glob("build/lib*.so")) or sorted(folder.glob("lib*.so"))
    if not libraries:
        raise TwinopError(f"{folder}: it has no library build/lib*.so. `twinop build` builds it")
    return {library: _module_of(library) for library in libraries}, sorted(folder.glob("test_*.py"))


def _library_of(module: Path) -> Path:
    """The library beside the Python file of an op, or in its build/, or the one that the file names."""
    name = module.parent.name if module.name == "__init__.py" else module.stem
    library = f"lib{name}.so"
    for path in (module.parent / library, module.parent / "build" / library, *project_libraries()):
        if path.name == library and path.is_file():
            return path
    found = getattr(load_module(module), "library_path", None)
    if found is None:
        raise TwinopError(
            f"{module}: its library lib{name}.so is neither beside it nor in build/. `twinop build` builds "
            "it; library_path in the file names another place"
        )
    return Path(found() if callable(found) else found)


def _module_of(library: Path) -> Path | None:
    """The Python file of a library's ops: beside it, or beside its build/; None if there is none."""
    name = library.stem.removeprefix("lib")
    for path in (
        library.parent / f"{name}.py",
        library.parent.parent / f"{name}.py",
        library.parent / "__init__.py",
    ):
        if path.is_file():
            return path
    return None


def _tests_of(module: Path) -> list[Path]:
    path = module.parent / f"test_{module.stem}.py"
    return [path] if path.is_file() else []


def load(given: str) -> list[Any]:
    """Loads the libraries and modules of a target into torch.

    Returns the records of the ops, each with the devices on which this process can test it. TwinopError: as
    `find_target`; or no op can be tested here.
    """
    import torch

    from twinop.torch_op.registry import runs_on_cpu

    from .under_test import add_library

    records = []
    for library, path in find_target(Path(given))[0].items():
        about = read_library(library)
        if about.domain == DOMAIN:
            raise TwinopError(
                f"{library}: has twinop's own ops. ./build.sh test in its sources tests them, and `twinop "
                "bench` without a library measures them"
            )
        for record in add_library(library, load_module(path) if path else None):
            without_cpu = tuple(device for device in record.devices if device != "cpu")
            records.append(record if runs_on_cpu(record) else replace(record, devices=without_cpu))
        if not torch.cuda.is_available() and not any("cpu" in record.devices for record in records):
            raise TwinopError(
                f"{library}: its ops have no CPU kernels, and this machine has no GPU"
                + f". Put the Python file {about.domain}.py beside it: its bodies run on the CPU" * (not path)
            )
    return records
