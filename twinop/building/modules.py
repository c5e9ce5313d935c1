"""Builds the kernels that are written in Python: traces their launchers, compiles, adds them to a library."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import BuildError
from .flags import Options, find_installation
from .project import Project
from .toolchain import WITHOUT_GPU, gpus


@dataclass(frozen=True)
class Linked:
    """The library of a project's ops in C++, to which modules are added. `cuda_version`: of nvcc, or ""."""

    path: Path
    cuda_version: str


def check_options(options: Options) -> None:
    """Checks that the options are some that kernels in Python have.

    Raises:
        BuildError: --cpu.
    """
    if options.cpu:
        raise BuildError(
            "--cpu: kernels in Python are for CUDA; on the CPU their function bodies run. Leave it out"
        )


def add_modules(
    project: Project,
    options: Options,
    linked: Linked | None,
    output: Path,
    progress: Callable[[str, bool], None],
) -> list[str]:
    """Writes a library with the ops of the project's Python files.

    Args:
        linked: the library of the project's ops in C++, if it has some.

    Returns:
        Notes for the user.

    Raises:
        BuildError: an unknown architecture, another domain, two ops of one name, or kernels that cannot be
            compiled ahead.
        LibraryError: the installation lacks the prebuilt library.
        TwinopError: a file cannot be imported.
    """
    from ..aot_kernels.pack import pack, template  # builds without kernels in Python need neither
    from ..triton.build import make_payload  # nor torch

    archs, ptx = _architectures(options.archs)
    names = ", ".join(path.name for path in project.modules)
    progress(f"tracing and compiling {names}", True)
    in_cpp = {name: source.path.name for source in project.sources for _, name in source.ops}
    payload, notes = make_payload(project.modules, project.domain, project.domain_version, archs, ptx, in_cpp)
    if linked is not None:
        payload = replace(payload, cuda_version=linked.cuda_version)
    pack(linked.path if linked else template(), payload, output)
    progress(f"tracing and compiling {names}", False)
    return notes


def _architectures(wanted: str) -> tuple[list[int], bool]:
    """Returns compute capabilities, and whether newer GPUs are to be served by PTX."""
    if wanted == "native":
        return [int(arch) for arch in gpus() or [WITHOUT_GPU]], False
    if wanted == "all":
        return [int(arch) for arch in find_installation().flags["archs"]], True
    parts = [part.strip() for part in wanted.replace(";", ",").split(",") if part.strip()]
    found = [re.fullmatch(r"(\d+)[af]?(?:-real)?", part) for part in parts]
    if not found or None in found:
        raise BuildError(f"--archs {wanted}: expected native, all, or a list such as 80,90")
    return sorted({int(match[1]) for match in found if match}), True
