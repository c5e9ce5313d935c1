"""Finds the compilers: the C++ compiler, nvcc, and what they can do."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..installation import version_numbers
from .cache import cache_folder, digest, write

_OLDEST = {"GCC": 11, "Clang": 14}
WITHOUT_GPU = "90"


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler.

    Attributes:
        command: the program, perhaps with one before it, such as ccache.
        kind: "GCC" or "Clang".
    """

    command: tuple[str, ...]
    kind: str
    version: str


@dataclass(frozen=True)
class Nvcc:
    """NVIDIA's compiler.

    Attributes:
        known: the architectures that it compiles for: "90".
    """

    path: str
    version: str
    known: tuple[str, ...]

    @property
    def knows_compression(self) -> bool:
        return version_numbers(self.version) >= (12, 8)

    @cached_property
    def library_folder(self) -> Path:
        """The folder of libcudart_static.a.

        Raises:
            BuildError: the toolkit has none.
        """
        said = _run([self.path, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
        tops = re.findall(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
        root = Path(tops[0] if tops else Path(self.path).resolve().parent.parent).resolve()
        for folder in (root / "lib64", root / "lib", *root.glob("targets/*/lib")):
            if (folder / "libcudart_static.a").is_file():
                return folder
        raise BuildError(
            f"{root} has {self.path}, but not libcudart_static.a, which libraries link. Install the "
            "toolkit's cudart development package (Debian, Ubuntu: cuda-cudart-dev), or set CUDACXX to "
            "another nvcc"
        )


def find_compiler(keep: bool = True) -> Compiler:
    """Returns the C++ compiler: $CXX, or the first of c++, g++ and clang++.

    Args:
        keep: whether the cache of builds keeps what the compiler says.

    Raises:
        BuildError: there is none, or it is too old.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    command = next((words for words in map(shlex.split, names) if shutil.which(words[0])), None)
    if command is None:
        raise BuildError(
            f"no C++ compiler found ({', '.join(names)}). Install one (Debian, Ubuntu: apt install g++), "
            "or set CXX to one"
        )
    kind, version = _facts(command, _ask_compiler, keep)
    oldest = _OLDEST[kind]
    if version_numbers(version)[0] < oldest:
        raise BuildError(
            f"{shlex.join(command)} is {kind} {version}, which is too old; twinop's headers need {kind} "
            f"{oldest} or later. Install a newer one, and set CXX to it"
        )
    return Compiler(tuple(command), kind, version)


def find_nvcc(keep: bool = True) -> Nvcc | None:
    """Returns nvcc from $CUDACXX, PATH, $CUDA_HOME, $CUDA_PATH or /usr/local/cuda; None if there is none.

    Args:
        keep: whether the cache of builds keeps what nvcc says.

    Raises:
        BuildError: CUDACXX names a program that is not there, or what was found is not nvcc.
    """
    named = os.environ.get("CUDACXX")
    if named and not shutil.which(named):
        raise BuildError(f"CUDACXX={named}: no such program. Set it to the path of nvcc, or unset it")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [named, "nvcc", *(f"{root}/bin/nvcc" for root in roots if root)]
    path = next((found for place in places if place and (found := shutil.which(place))), None)
    if path is None:
        return None
    version, known = _facts([path], _ask_nvcc, keep)
    return Nvcc(path, version, tuple(known))


def architectures(wanted: str, nvcc: Nvcc, all_of_them: Sequence[str]) -> list[str]:
    """Returns the architectures as CMake names them: `80-real`, `90` (code and PTX), `90-virtual` (PTX).

    Args:
        wanted: `native` (this machine's GPUs; 90 without a GPU), `all`, or a list such as `80,90`, of which
            the newest gets PTX as well.
        all_of_them: what `all` means, as far as nvcc knows them.

    Raises:
        BuildError: nvcc does not know one of them.
    """
    if wanted == "native":
        return [f"{arch}-real" for arch in gpus() or [WITHOUT_GPU]]
    if wanted == "all":
        known = [arch for arch in all_of_them if arch in nvcc.known]
        return [*(f"{arch}-real" for arch in known), f"{known[-1]}-virtual"]
    archs = [arch.strip() for arch in wanted.replace(";", ",").split(",") if arch.strip()]
    numbers = [re.match(r"\d+(?=[af]?(-real|-virtual)?$)", arch) for arch in archs]
    wrong = [
        arch for arch, number in zip(archs, numbers, strict=True) if not number or number[0] not in nvcc.known
    ]
    if wrong or not archs:
        raise BuildError(
            f"--archs {wanted}: {nvcc.path} (CUDA {nvcc.version}) does not know architecture "
            f"{(wrong or [wanted])[0]!r}; it knows {', '.join(nvcc.known)}. Choose some of these, native "
            "or all; for a newer GPU install a newer CUDA toolkit, and set CUDACXX to its nvcc"
        )
    archs.sort(key=lambda arch: int(re.findall(r"\d+", arch)[0]))
    *older, newest = archs
    return [arch if "-" in arch else f"{arch}-real" for arch in older] + [newest]


@cache
def gpus() -> list[str]:
    """Returns the architectures of this machine's GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sorted(
        {major + minor for major, minor in re.findall(r"^(\d+)\.(\d+)", found, re.MULTILINE)}, key=int
    )


def _ask_compiler(command: Sequence[str]) -> list[str]:
    macros = dict(re.findall(r"#define (\w+) (\w+)", _run([*command, "-E", "-dM", "-x", "c++", os.devnull])))
    kind, names = (
        ("Clang", ("__clang_major__", "__clang_minor__"))
        if "__clang__" in macros
        else ("GCC", ("__GNUC__", "__GNUC_MINOR__"))
    )
    if names[0] not in macros:
        raise BuildError(
            f"{shlex.join(command)} does not say its version, as GCC and Clang do. Set CXX to one of these"
        )
    return [kind, ".".join(macros.get(name, "0") for name in names)]


def _ask_nvcc(command: Sequence[str]) -> tuple[str, list[str]]:
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run([*command, "--version"]))
    known = re.findall(r"compute_(\d+)", _run([*command, "--list-gpu-arch"]))
    if version is None or not known:
        raise BuildError(
            f"{command[0]} does not answer as nvcc does (--version, --list-gpu-arch). Set CUDACXX to an "
            "nvcc of CUDA 11.8 or later, or build with --cpu"
        )
    return version[1], known


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"{command[0]} does not run: {error.strerror}. Set CXX or CUDACXX to a compiler"
        ) from error
    return done.stdout + done.stderr


def identity(command: Sequence[str]) -> list[Any]:
    """Returns what changes when another version of these programs is installed."""
    files = [Path(found).resolve() for word in command if (found := shutil.which(word))]
    return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]


def _facts(command: Sequence[str], ask: Callable[[Sequence[str]], Any], keep: bool) -> Any:
    """Returns what `ask` finds out; asks each version of a program once."""
    file = cache_folder() / "compilers" / f"{digest(ask.__name__, identity(command))}.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        facts = ask(command)
        if keep:
            write(file, json.dumps(facts).encode())
        return facts
