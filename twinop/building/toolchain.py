"""Finds what a build needs: the compilers, CMake and ninja, and twinop's own files."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import twinop

from ..errors import BuildError
from ..installation import how_to_build, version_numbers
from ..libraries.library import library_folders

_COMPILERS = (("Clang", 14, "__clang_major__", "__clang_minor__"), ("GCC", 11, "__GNUC__", "__GNUC_MINOR__"))
"""The kind, its oldest version, and the macros that say the version; Clang has those of GCC, too."""
_OLDEST_NVCC = "12.4"  # as in TwinopCuda.cmake
_LAUNCHERS = ("ccache", "sccache", "distcc")
_SECONDS = 120  # for nvidia-smi, whose driver may be loaded first


@dataclass(frozen=True)
class Gpu:
    """A GPU. `capability`: 90 for 9.0."""

    name: str
    capability: int


@dataclass(frozen=True)
class Nvcc:
    """NVIDIA's compiler."""

    path: str
    version: str
    known: tuple[str, ...]  # the architectures that it compiles for: "90"


def compiler_command() -> tuple[list[str], list[str]]:
    """Returns the launcher, such as ccache, and the compiler of $CXX, or c++, g++, clang++; or BuildError."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    command = next((words for words in map(shlex.split, names) if words and shutil.which(words[0])), None)
    if command is None:
        raise BuildError(
            f"no C++ compiler found ({', '.join(names)}). Install one (Debian, Ubuntu: apt install g++), "
            "or set CXX to one"
        )
    first = len(command) > 1 and Path(command[0]).name in _LAUNCHERS
    return command[:first], command[first:]


def find_compiler() -> str:
    """Returns "c++ is GCC 13.2"; raises BuildError if there is no C++ compiler, or it is too old."""
    command = compiler_command()[1]
    macros = dict(re.findall(r"#define (\w+) (\w+)", _run([*command, "-E", "-dM", "-x", "c++", os.devnull])))
    for kind, oldest, *names in _COMPILERS:
        if names[0] in macros:
            said = f"{shlex.join(command)} is {kind} {'.'.join(macros.get(name, '0') for name in names)}"
            if int(macros[names[0]]) < oldest:
                raise BuildError(
                    f"{said}, which is too old; twinop's headers need {kind} {oldest} or later. Install a "
                    "newer one, and set CXX to it"
                )
            return said
    raise BuildError(
        f"{shlex.join(command)} does not say its version, as GCC and Clang do. Set CXX to one of these"
    )


def nvcc_path() -> str | None:
    """Returns nvcc from $CUDACXX, PATH, $CUDA_HOME, $CUDA_PATH or /usr/local/cuda; None if there is none.

    BuildError: CUDACXX names a program that is not there.
    """
    named = os.environ.get("CUDACXX")
    if named and not shutil.which(named):
        raise BuildError(f"CUDACXX={named}: no such program. Set it to the path of nvcc, or unset it")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [named, "nvcc", *(f"{root}/bin/nvcc" for root in roots if root)]
    return next((found for place in places if place and (found := shutil.which(place))), None)


def find_nvcc() -> Nvcc | None:
    """Returns what `nvcc_path` finds, with its facts; BuildError: it is not nvcc, or too old."""
    path = nvcc_path()
    if path is None:
        return None
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run([path, "--version"]))
    known = re.findall(r"compute_(\d+)", _run([path, "--list-gpu-arch"]))
    if version is None or not known:
        raise BuildError(
            f"{path} does not answer as nvcc does (--version, --list-gpu-arch). Set CUDACXX to an "
            f"nvcc of CUDA {_OLDEST_NVCC} or later, or build with --cpu"
        )
    if version_numbers(version[1]) < version_numbers(_OLDEST_NVCC):
        raise BuildError(
            f"{path} is of CUDA {version[1]}, which is too old; twinop's kernels need CUDA {_OLDEST_NVCC} or "
            "later. Install a newer CUDA toolkit and set CUDACXX to its nvcc, or build with --cpu"
        )
    return Nvcc(path, version[1], tuple(known))


def find_tool(name: str) -> str:
    """Returns cmake or ninja, of this environment or from PATH; raises BuildError without one."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if found := shutil.which(name, path=places):
        return found
    raise BuildError(
        f"no {name} found (beside {sysconfig.get_path('scripts')}/python, PATH), and ops are built with it. "
        "Install it: pip install 'twinop[build]'"
    )


def refuse_old_tools(ninja: str) -> None:
    """Raises BuildError if the compiler is too old (CMake looks at nvcc's version), or ninja: it misses what
    changes while it is compiled."""
    find_compiler()
    version = _run([ninja, "--version"]).strip()
    if version_numbers(version) < (1, 11):
        raise BuildError(f"{ninja} is ninja {version}; expected 1.11 or later: pip install 'twinop[build]'")


def find_installation() -> Path:
    """Returns the folder of the files that every library links; BuildError: none has this version's."""
    wanted = ("twinop-build.cmake", "libtwinop_ort.a", "exports.map")
    lacking = {
        folder: [name for name in wanted if not (folder / name).is_file()] for folder in library_folders()
    }
    folder = next((folder for folder, names in lacking.items() if not names), None)
    if folder is None:
        searched = ", ".join(f"{folder} (without {', '.join(names)})" for folder, names in lacking.items())
        raise BuildError(f"no folder has what an op is built with; searched {searched}. {how_to_build()}")
    version = "".join(re.findall(r"TWINOP_VERSION ([\d.]+)", (folder / wanted[0]).read_text()))
    if version != twinop.__version__:
        raise BuildError(
            f"{folder} was built by twinop {version}; this is twinop {twinop.__version__}. {how_to_build()}"
        )
    return folder


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"{command[0]} does not run: {error.strerror}. Set CXX or CUDACXX to a compiler"
        ) from error
    return done.stdout + done.stderr


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Returns the GPUs that nvidia-smi lists, and why it lists none; none where it is not installed."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except OSError:
        return (), ""
    except subprocess.TimeoutExpired:
        return (), f"no answer within {_SECONDS} s"
    found = re.findall(r"^(.*), (\d+)\.(\d+)\s*$", done.stdout, re.MULTILINE)
    problem = (done.stdout + done.stderr).strip() if done.returncode else ""
    return tuple(Gpu(name, int(major + minor)) for name, major, minor in found), problem


def identity(programs: Sequence[str]) -> list[list[str | int]]:
    """Returns what changes when another version of these programs is installed."""
    files = [Path(found).resolve() for word in programs if (found := shutil.which(word))]
    return [[str(file), file.stat().st_mtime_ns, file.stat().st_size] for file in files]
