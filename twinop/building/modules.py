"""Makes a C++ source of kernels that are written in Python: traces their launchers, compiles the kernels."""

import re
from collections.abc import Callable
from pathlib import Path

from ..errors import BuildError
from .flags import Options, find_installation
from .project import Project
from .toolchain import WITHOUT_GPU, gpus


def check_options(options: Options) -> None:
    """Checks that the options are some that kernels in Python have.

    Raises:
        BuildError: --cpu.
    """
    if options.cpu:
        raise BuildError(
            "--cpu: kernels in Python are for CUDA; on the CPU their function bodies run. Leave it out"
        )


def write_source(
    project: Project, options: Options, file: Path, progress: Callable[[str, bool], None]
) -> list[str]:
    """Writes the C++ source of the ops of the project's Python files, with the library's table.

    Returns:
        Notes for the user.

    Raises:
        BuildError: an unknown architecture, another domain, two ops of one name, or kernels that cannot be
            compiled ahead.
        TwinopError: a file cannot be imported.
    """
    from ..aot_kernels.generate import generate  # builds without kernels in Python need neither
    from ..triton.build import make_contents  # nor torch

    archs, ptx = _architectures(options.archs)
    names = ", ".join(path.name for path in project.modules)
    progress(f"tracing and compiling {names}", True)
    in_cpp = {name: source.path.name for source in project.sources for _, name in source.ops}
    contents, notes = make_contents(
        project.modules, project.domain, project.domain_version, archs, ptx, in_cpp
    )
    generate(contents, file)
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
