"""Makes a C++ source of kernels that are written in Python: traces their launchers, compiles the kernels."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..libraries.built import file_hash
from ..libraries.library import get_cmake_dir
from .cache import digest, write
from .project import Options, Project
from .toolchain import find_gpus

WITHOUT_GPU = 90  # the architecture to compile for, as in TwinopCuda.cmake


_Written = tuple[dict[str, str | None], list[str], list[str]]


def write_source(
    project: Project, options: Options, file: Path, stamp: Path, progress: Callable[[str], None]
) -> _Written:
    """Writes the C++ source of the ops of the project's Python files, with the library's table.

    A source that an earlier build made of the same files, for the same GPUs and with the same packages, stays
    as it is; `stamp` is the file that says what it was made of.

    Returns the hash of each Python file that it was made of, but for those of installed packages; the steps
    that were needed; notes for the user. BuildError: an unknown architecture, another domain, two ops of one
    name, or kernels that cannot be compiled ahead. TwinopError: a file cannot be imported.
    """
    archs, ptx = _architectures(options.archs)
    settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    packages = sorted(path.name for folder in _site_folders() for path in folder.glob("*.dist-info"))
    key = digest(asdict(project), archs, ptx, sys.version, packages, settings)
    if kept := _kept(stamp, key):
        return kept
    from ..aot_kernels.generate import files_of, generate  # builds without kernels in Python need neither
    from ..triton.build import make_contents  # nor torch

    begin = time.time_ns()
    names = ", ".join(path.name for path in project.modules)
    progress(f"tracing and compiling {names}")
    contents, notes = make_contents(project, archs, ptx)
    generate(contents, file)
    imported = {  # a file that was written since has a hash that no file has: it is read again next time
        str(path): file_hash(path) if path.stat().st_mtime_ns < begin else "changed"
        for path in (*project.modules, *_imported())
    }
    written = {str(path): file_hash(path) for path in files_of(file)}
    write(stamp, json.dumps([key, imported, written, notes]).encode())
    return _of_user(imported), [f"tracing {names}"], notes


def _kept(stamp: Path, key: str) -> _Written | None:
    """Returns what an earlier build wrote; None if that or what it was made of has changed."""
    try:
        known, imported, written, notes = json.loads(stamp.read_bytes())
    except (OSError, ValueError):
        return None
    if known != key or any(file_hash(path) != found for path, found in [*imported.items(), *written.items()]):
        return None
    return _of_user(imported), [], notes


def _site_folders() -> list[Path]:
    """Returns the folders of installed packages."""
    return [folder for folder in map(Path, sys.path) if any(folder.glob("*.dist-info"))]


def _imported() -> Iterator[Path]:
    """Yields the imported files that are still there, without Python's and those of installed packages."""
    others = (Path(os.__file__).parent, *_site_folders())
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for path in (Path(file) for file in files if file):
        if path.suffix != ".py" or not path.is_absolute() or any(each in path.parents for each in others):
            continue
        if path.is_file():
            yield path


def _of_user(files: dict[str, Any]) -> dict[str, str | None]:
    own = Path(__file__).parents[1]
    return {path: found for path, found in files.items() if own not in Path(path).parents}


def _architectures(wanted: str) -> tuple[list[int], bool]:
    """Returns compute capabilities, and whether newer GPUs are to be served by PTX."""
    if wanted == "native":
        return sorted({gpu.capability for gpu in find_gpus()[0]}) or [WITHOUT_GPU], False
    if wanted == "all":
        text = Path(get_cmake_dir(), "TwinopCuda.cmake").read_text()
        return [int(arch) for arch in re.findall(r"set\(TWINOP_ALL_ARCHS ([\d ]+)\)", text)[0].split()], True
    parts = [part.strip() for part in wanted.replace(";", ",").split(",") if part.strip()]
    found = [re.fullmatch(r"(\d+)[af]?(?:-real)?", part) for part in parts]
    if not found or None in found:
        raise BuildError(f"--archs {wanted}: expected native, all, or a list such as 80,90")
    return sorted({int(match[1]) for match in found if match}), True
