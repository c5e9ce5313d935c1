"""Makes a C++ source of kernels that are written in Python: traces their launchers, compiles the kernels."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ..errors import BuildError
from ..library import get_cmake_dir
from .options import Options
from .project import Project

WITHOUT_GPU = 90  # the architecture to compile for, as in TwinopCuda.cmake


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
    project: Project, options: Options, file: Path, progress: Callable[[str], None]
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
    progress(f"tracing and compiling {names}")
    in_cpp = {name: source.path.name for source in project.sources for _, name in source.ops}
    contents, notes = make_contents(
        project.modules, project.domain, project.domain_version, archs, ptx, in_cpp
    )
    generate(contents, file)
    return notes


def _architectures(wanted: str) -> tuple[list[int], bool]:
    """Returns compute capabilities, and whether newer GPUs are to be served by PTX."""
    if wanted == "native":
        return _gpus() or [WITHOUT_GPU], False
    if wanted == "all":
        text = Path(get_cmake_dir(), "TwinopCuda.cmake").read_text()
        return [int(arch) for arch in re.findall(r"set\(TWINOP_ALL_ARCHS ([\d ]+)\)", text)[0].split()], True
    parts = [part.strip() for part in wanted.replace(";", ",").split(",") if part.strip()]
    found = [re.fullmatch(r"(\d+)[af]?(?:-real)?", part) for part in parts]
    if not found or None in found:
        raise BuildError(f"--archs {wanted}: expected native, all, or a list such as 80,90")
    return sorted({int(match[1]) for match in found if match}), True


def _gpus() -> list[int]:
    """Returns the architectures of this machine's GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sorted({int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d+)", said, re.MULTILINE)})
