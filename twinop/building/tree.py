"""A build tree: CMake configures it with twinop's package, ninja compiles in it what changed."""

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import BuildError
from ..libraries.built import file_hash
from ..libraries.library import get_cmake_dir, get_include
from .cache import make_folder, write, writing
from .diagnostics import build_error, cmake_error
from .project import OBJECTS, Options, Project
from .toolchain import compiler_command, find_installation, find_tool, identity, nvcc_path, refuse_old_tools

_TRIES = 3  # of files that change while they are compiled
_VARIABLES = ("CXX", "CXXFLAGS", "CUDACXX", "CUDAFLAGS", "LDFLAGS")  # which CMake reads when it configures
_STEP = re.compile(r"\[\d+/\d+\] (.*)$")
_OBJECT = re.compile(r"Building (CXX|CUDA) object .*/([^/]+)\.o$")
# What cmake/TwinopOp.cmake generates: the number of the file that it includes.
_GENERATED = re.compile(r"\w+\.(\d+)(?:\.([01]))?\.(?:cpp|cu)$")
_PIPE, _OUT = subprocess.PIPE, subprocess.STDOUT

Progress = Callable[[str], None]
"""Gets what is done, in words: "compiling mish.h"."""


@contextmanager
def locked(tree: Path) -> Iterator[None]:
    """Makes a build tree, and waits until no other process builds in it."""
    with writing(tree):
        make_folder(tree)
        lock = (tree / "lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_library(
    tree: Path, project: Project, files: Sequence[Path], options: Options, progress: Progress, cuda: bool
) -> tuple[Path, dict[str, str | None], list[str], list[str]]:
    """Compiles a project's files, C++ and CUDA ones, into `lib<name>.so` in a build tree, which is `locked`.

    A file that changes while it is compiled is compiled again, so that all objects are of the same files. If
    they have CUDA code, it is left out without nvcc. One of the files has the library's table if there are
    modules.

    Returns the library; the hash of each file that was compiled, but for those of twinop, compilers and the
    system; the steps that were needed; the compilers' warnings. BuildError: a tool is missing or too old, or
    the sources do not compile.
    """
    lines = [
        *_settings(tree, options, nvcc_path() if cuda and not options.cpu else None),
        f"find_package(twinop REQUIRED NO_DEFAULT_PATH PATHS {_quoted(get_cmake_dir())})",
        f"twinop_add_library({project.name} DOMAIN {project.domain}",
        *(["NO_TABLE"] if project.modules else []),
        *map(_quoted, files),
        ")",
        'file(WRITE "${CMAKE_BINARY_DIR}/system_folders" "${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES};'
        '${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")',
    ]
    ninja = _Ninja(tree, files, progress)
    ninja.configure("\n".join(lines) + "\n")
    known, since = ninja.kept()
    read = {path: file_hash(path) for path in known}
    if any(read[path] != known[path] and os.stat(path).st_mtime_ns <= since for path in read if read[path]):
        ninja.ask("-t", "clean")  # ninja looks at times, and this file has got an older one
    for _ in range(_TRIES + 1):
        if not ninja.build() and read:
            ninja.keep(read)
            return ninja.folder / f"lib{project.name}.so", read, ninja.done, ninja.notes
        before, read = read, {path: file_hash(path) for path in ninja.files_read()}
    changed = ", ".join(sorted(path for path in read if read[path] != before.get(path)))
    raise BuildError(
        f"{changed}: changed while it was compiled, {_TRIES} times in a row. Build again when nothing writes "
        "it any more"
    )


def _quoted(path: str | Path) -> str:
    return f"[==[{path}]==]"


def _settings(tree: Path, options: Options, nvcc: str | None) -> list[str]:
    """Returns the first lines of a CMakeLists.txt. The very first says which tools these are, and the folder,
    as CMake would build a copied one in its old place."""
    launcher, command = compiler_command()
    variables = [os.environ.get(name) for name in _VARIABLES]
    tools = identity([*command, find_tool("cmake"), find_tool("ninja"), *filter(None, [nvcc])])
    cuda = [
        f"set(CMAKE_CUDA_COMPILER {_quoted(nvcc or '')})",
        f"set(CMAKE_CUDA_HOST_COMPILER {_quoted(shutil.which(command[0]) or '')})",
    ]
    launcher = launcher or [*filter(None, [shutil.which("ccache")])]
    return [
        f"# {json.dumps([platform.node(), str(tree.absolute()), variables, tools])}",
        "cmake_minimum_required(VERSION 3.25)",
        *(f"set(CMAKE_{language}_COMPILER_LAUNCHER {' '.join(launcher)})" for language in ("CXX", "CUDA")),
        f"set(ENV{{CXX}} {_quoted(shlex.join(command))})",
        f"set(ENV{{TWINOP_CUDA_ARCHS}} {_quoted(options.archs)})",
        f"set(TWINOP_LIBRARY_DIR {_quoted(find_installation())})",
        *(cuda if nvcc else ["set(TWINOP_WITH_CUDA OFF)"]),
        "project(twinop_build LANGUAGES CXX)",
        f"set(CMAKE_BUILD_TYPE {'Debug' if options.debug else 'Release'})",
    ]


class _Ninja:
    """Ninja in a folder that CMake configures: its messages become labels, notes and `BuildError`s."""

    def __init__(self, tree: Path, files: Sequence[Path], progress: Progress) -> None:
        self.tree, self.folder, self.files, self.progress = tree, tree / "ninja", files, progress
        self.done: list[str] = []
        self.notes: list[str] = []
        self._program = find_tool("ninja")
        # diagnostics.py reads what compilers say.
        self._environment = os.environ | {"LANGUAGE": "en", "NINJA_STATUS": "[%f/%t] "}

    def configure(self, lists: str) -> None:
        """Lets CMake configure the folder. When it has done so with the same tools, ninja sees to it."""
        file = self.tree / "CMakeLists.txt"
        before = file.read_text().partition("\n")[0] if file.is_file() else ""
        if before == lists.partition("\n")[0] and (self.folder / "build.ninja").is_file():
            write(file, lists.encode())
            return
        refuse_old_tools(self._program)
        self.progress("configuring")
        with writing(self.folder):
            if self.folder.exists():
                shutil.rmtree(self.folder)
        write(file, lists.encode())
        command = [find_tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={self._program}"]
        command += ["-S", str(self.tree), "-B", str(self.folder)]
        done = subprocess.run(command, env=self._environment, stdout=_PIPE, stderr=_OUT, text=True)
        if done.returncode:
            (self.folder / "build.ninja").unlink(missing_ok=True)
            raise cmake_error(done.stdout)

    def kept(self) -> tuple[dict[str, str | None], int]:
        """Returns what `keep` noted, and when; nothing if it is not there or damaged."""
        file = self.folder / "read.json"
        try:
            return dict(json.loads(file.read_text())), file.stat().st_mtime_ns
        except (OSError, TypeError, ValueError):
            return {}, 0

    def keep(self, read: dict[str, str | None]) -> None:
        """Notes what was compiled."""
        with writing(self.folder):
            (self.folder / "read.json").write_text(json.dumps(read))

    def ask(self, *arguments: str) -> str:
        """Runs ninja with other arguments, and returns what it says."""
        command = [self._program, "-C", str(self.folder), *arguments]
        return subprocess.run(command, stdout=_PIPE, text=True, check=True).stdout

    def build(self) -> bool:
        """Compiles what is out of date; returns whether something was. BuildError: a step failed."""
        steps: list[tuple[str, list[str]]] = [("", [])]
        command = [self._program, "-C", str(self.folder)]
        with subprocess.Popen(
            command, env=self._environment, stdout=_PIPE, stderr=_OUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if found := _STEP.match(line):
                        label = self._label(found[1])
                        steps.append((label, []))
                        if label:
                            self.progress(label)
                    else:
                        steps[-1][1].append(line)
            except BaseException:  # Ctrl-C, too: ninja stops the compilers, and removes half-written objects
                process.send_signal(signal.SIGINT)
                process.stdout.read()
                raise
        for label, lines in steps:
            said = "".join(lines).partition("ninja: build stopped")[0].strip()
            if process.returncode and "CMake Error" in said:
                raise cmake_error(said)
            if said.startswith("FAILED: "):
                raise build_error(label, "".join(said.split("\n", 2)[2:]), self.files)  # behind the command
            if label:
                self.done.append(label)
                self.notes += [said] if said else []
        if process.returncode:
            raise BuildError("".join(steps[0][1]).strip())
        return any(label for label, _ in steps)

    def _label(self, said: str) -> str:
        """Returns what a step does, in words: "compiling mish.h"; "" for CMake's own steps."""
        if said.startswith("Linking"):
            return f"linking {said.split()[-1]}"
        if (found := _OBJECT.match(said)) is None:
            return ""
        language, name = found.groups()
        generated = _GENERATED.match(name)
        backward = ", backward" if generated and generated[2] == "1" else ""
        file = self.files[int(generated[1])].name if generated else name
        return f"compiling {file}" + (f" (CUDA{backward})" if language == "CUDA" else "")

    def files_read(self) -> list[str]:
        """Returns the files that the compilers read, but for those of twinop, of compilers and the system."""
        names = [line.strip() for line in self.ask("-t", "deps").splitlines() if line.startswith("    ")]
        found = {os.path.normpath(self.folder / name) for name in names}
        found |= {str(path) for path in self.files if path.suffix in OBJECTS}
        system = filter(None, (self.folder / "system_folders").read_text().split(";"))
        own = Path(get_include(), "twinop")
        others = tuple(f"{each}/" for each in (*system, own, own.resolve(), self.folder))
        return sorted(path for path in found if not path.startswith(others))
