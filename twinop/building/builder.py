"""Builds a project into a library: compile what changed, link, read the result."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import twinop

from ..built import file_hash, mark, note_of
from ..errors import BuildError
from ..library import Library, checksum, get_include, read_library
from ..names import check_op_name
from .cache import cache_folder, digest, keep, work_folder, write
from .diagnostics import build_error
from .flags import CommandLines, Options, find_installation
from .modules import check_options, write_source
from .project import Project
from .toolchain import Nvcc, find_compiler, find_nvcc, identity

_TRIES = 3  # of files that change while they are compiled
Progress = Callable[[str, bool], None]
"""Gets what begins, with True, and what is done, with False."""


@dataclass(frozen=True)
class Unit:
    """One object file: the text of its source, which mostly includes a file of the user's."""

    label: str
    file: str
    text: str

    @property
    def is_cuda(self) -> bool:
        return self.file.endswith(".cu")


@dataclass(frozen=True)
class Built:
    """A library that was built.

    Attributes:
        library: what it holds; `library.path` is the file.
        compiled: the steps that were not in the cache.
        notes: what a user may want to know: warnings of the compilers, why there is no CUDA code.
    """

    library: Library
    compiled: list[str]
    notes: list[str] = field(default_factory=list)


def build(
    project: Project,
    output: Path | None = None,
    options: Options | None = None,
    progress: Progress = lambda label, begins: None,
) -> Built:
    """Builds a project's library.

    Args:
        output: the file to write, or a folder for it. Default: the library stays in the cache.

    Raises:
        BuildError: a compiler is missing or too old, the sources do not compile, or a file cannot be written.
        LibraryError: the result is not a library.
        TwinopError: an op has a name that it cannot have.
    """
    options = options or Options()
    if project.modules:
        check_options(options)
    installation = find_installation()
    notes: list[str] = []
    sources = {str(path): file_hash(path) for path in project.modules}
    if output is not None and output.is_dir():
        output = output / f"lib{project.name}.so"
    with work_folder() as work:
        done: list[str] = []
        nvcc = None if options.cpu else _nvcc_for(project, bool(installation.flags["cuda"]), notes)
        lines = CommandLines(installation, options, find_compiler(), nvcc)
        generated = None
        if project.modules:
            folder = (
                output.parent if output else cache_folder() / "generated" / digest(sources, options.archs)
            )
            generated = folder.absolute() / f"{project.name}.generated.cpp"
            notes += write_source(project, options, generated, progress)
            done.append(f"tracing {', '.join(path.name for path in project.modules)}")
        steps = _Steps(lines, project, progress)
        objects = steps.compile_all(_units(project, nvcc is not None, generated), work)
        library = steps.link(objects, work)
        done, notes = done + steps.done, notes + steps.notes
        own = str(get_include())  # twinop's headers have a version
        sources |= {
            path: found for path, found in steps.read if not path.startswith(own) and path != str(generated)
        }
        found = read_library(library)
        for record in found.records.values():
            check_op_name(record.name)
        if output is not None:
            write(output, library.read_bytes())
            if output.parent.name == "build":
                write(mark(output), note_of(output, sources))
            found = read_library(output)
    return Built(found, done, notes)


def _nvcc_for(project: Project, built_with_cuda: bool, notes: list[str]) -> Nvcc | None:
    if not any(source.has_cuda for source in project.sources):
        return None
    nvcc = find_nvcc() if built_with_cuda else None
    if nvcc is None:
        why = (
            "no nvcc found (CUDACXX, PATH, CUDA_HOME, /usr/local/cuda)"
            if built_with_cuda
            else f"twinop {twinop.__version__} was built without CUDA here"
        )
        notes.append(
            f"{why}: the ops in C++ run on the CPU only"
            if project.modules
            else f"{why}: the library runs on the CPU only (--cpu says so without this note)"
        )
    return nvcc


def _units(project: Project, cuda: bool, generated: Path | None) -> list[Unit]:
    """Returns the object files of a library, those that take longest first.

    Args:
        generated: the source of kernels in Python, which has the library's table.
    """
    units = []
    for number, source in enumerate(project.sources):
        include = f'#include "{source.path}"\n'
        name, stem = source.path.name, f"{source.path.stem}_{number}"
        if cuda and source.has_cuda:
            if source.has_backward_ops:
                for part, said in ((1, "backward"), (0, "forward")):
                    text = f"#define TWINOP_BACKWARD_PART {part}\n{include}"
                    units.append(Unit(f"{name} (CUDA, {said})", f"{stem}.{part}.cu", text))
            else:
                units.append(Unit(f"{name} (CUDA)", f"{stem}.cu", include))
        if source.ops or source.path.suffix != ".cu":
            units.append(Unit(name, f"{stem}.cpp", include))
    if generated:
        units.append(Unit(generated.name, generated.name, f'#include "{generated}"\n'))
    else:
        table = (
            f'#include "twinop/library.h"\n\nTWINOP_LIBRARY("{project.domain}", {project.domain_version})\n'
        )
        units.append(Unit(f"lib{project.name}.so's table", f"library_{project.name}.cpp", table))
    return units


class _Steps:
    """The steps of one build."""

    def __init__(self, lines: CommandLines, project: Project, progress: Progress) -> None:
        self.lines, self.project, self.progress = lines, project, progress
        self.sources = [source.path for source in project.sources]
        self.done: list[str] = []
        self.notes: list[str] = []
        self.read: set[tuple[str, str | None]] = set()  # files, and the hash of what was compiled
        self.changed: set[str] = set()  # files, while they were compiled
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = Lock()

    def compile_all(self, units: list[Unit], work: Path) -> list[Path]:
        """Returns the object files of the units; compiles in parallel what the cache does not have.

        Files that change meanwhile are compiled again, so that all objects are of the same ones.
        """
        for _ in range(_TRIES):
            self.read.clear()
            self.changed.clear()
            with ThreadPoolExecutor(os.cpu_count()) as pool, self._stop_at_error():
                futures = [pool.submit(self._object, unit, work) for unit in units]
                for future in as_completed(futures):
                    future.result()
            self.changed.update(path for path, found in self.read if file_hash(path) != found)
            if not self.changed:
                return [future.result() for future in futures]
        raise BuildError(
            f"{', '.join(sorted(self.changed))}: changed while it was compiled, {_TRIES} times in a row. "
            "Build again when nothing writes it any more"
        )

    @contextmanager
    def _stop_at_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also Ctrl-C
            with self._lock:
                self._stopped = True
                for process in self._running:  # with the programs that a compiler starts
                    with suppress(ProcessLookupError):  # it has just ended
                        os.killpg(process.pid, signal.SIGKILL)
            raise

    def _object(self, unit: Unit, work: Path) -> Path:
        """Returns a unit's object file, unless a file changes while it is compiled.

        The cache's index has, by the command and the text, the files that the last compilation read. The
        object's name is a hash of these files' contents.
        """
        command = self.lines.compile(unit.is_cuda)
        index = (
            cache_folder()
            / "index"
            / f"{digest(unit.text, command, identity(self.lines.programs(unit.is_cuda)))}.json"
        )
        times: dict[str, int] = {}
        try:
            read = {path: file_hash(path) for path in json.loads(index.read_text())}
            kept = _object_path(index.stem, read)
            if kept.is_file():
                self.read.update(read.items())
                return kept
            times = {path: _changed_at(path) for path in read}
        except (OSError, ValueError, TypeError):
            pass  # not compiled yet, or damaged
        source, made, dependencies = (work / f"{unit.file}{suffix}" for suffix in ("", ".o", ".d"))
        source.write_text(unit.text)
        begin = _changed_at(source)
        self._run(
            f"compiling {unit.label}", [*command, str(source), "-MF", str(dependencies), "-o", str(made)]
        )
        names = sorted({path for path in _prerequisites(dependencies) if path != str(source)})
        read = {path: file_hash(path) for path in names}
        self.read.update(read.items())
        write(index, json.dumps(names).encode())
        for path in names:
            now = _changed_at(path)
            if now != times[path] if path in times else now > begin:
                self.changed.add(path)
                return made
        kept = _object_path(index.stem, read)
        keep(made, kept)
        return kept

    def link(self, objects: list[Path], work: Path) -> Path:
        """Returns the library of these objects, in the cache."""
        command = self.lines.link(self.project.name)
        installation = self.lines.installation
        files = (installation.archive, installation.exports)
        parts = [checksum(file) for file in files]
        key = digest([path.name for path in objects], command, identity(self.lines.programs()), parts)
        library = cache_folder() / "libraries" / key / f"lib{self.project.name}.so"
        if not library.is_file():
            made = work / library.name
            first, *rest = command
            self._run(f"linking {library.name}", [first, "-o", str(made), *map(str, objects), *rest])
            keep(made, library)
        return library

    def _run(self, label: str, command: list[str]) -> None:
        with self._lock:
            if self._stopped:
                raise BuildError(f"{label}: not done, because another step failed")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ | {"LANGUAGE": "en"},  # diagnostics.py reads what compilers say
                start_new_session=True,
            )
            self._running.add(process)
        self.progress(label, True)
        output, _ = process.communicate()
        with self._lock:
            self._running.remove(process)
        self.progress(label, False)
        if process.returncode:
            raise build_error(label, output, self.sources)
        self.done.append(label)
        if output.strip():
            self.notes.append(output.strip())


def _changed_at(path: str | Path) -> int:
    """Returns when a file was last changed; 0 if there is none. Unlike the other time, no program sets it."""
    try:
        return os.stat(path).st_ctime_ns
    except OSError:
        return 0


def _object_path(key: str, read: Mapping[str, str | None]) -> Path:
    name = digest(key, sorted(read.items()))
    return cache_folder() / "objects" / name[:2] / f"{name}.o"


def _prerequisites(file: Path) -> list[str]:
    """Returns the files that a makefile rule of a compiler's -MMD names."""
    text = file.read_text().replace("\\\n", " ").partition(":")[2].splitlines()[0]
    words = text.replace("\\ ", "\0").split()
    return [word.replace("\0", " ").replace("\\#", "#").replace("$$", "$") for word in words]
