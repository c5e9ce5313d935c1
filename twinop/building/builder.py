"""Builds a project into a library: checks it, compiles it in a build tree, puts the library in its place."""

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import BuildError, LibraryError
from ..libraries.built import mark, note_of
from ..libraries.library import Library, checksum, find_library, read_library
from ..record.names import check_op_name
from ..record.record_checks import check_record
from .cache import cache_folder, digest, write
from .modules import write_source
from .project import Options, Project
from .tree import Progress, compile_library, locked


@dataclass(frozen=True)
class Built:
    """A library that was built."""

    library: Library  # what it holds; `library.path` is the file
    compiled: list[str]  # the steps that were done
    # What a user may want to know: warnings of the compilers, why there is no CUDA code.
    notes: list[str] = field(default_factory=list)


def build(
    project: Project,
    output: Path | None = None,
    options: Options | None = None,
    progress: Progress = lambda label: None,
) -> Built:
    """Builds a project's library. The build tree lies beside a library in `build/`, else in the cache.

    `output` is the file to write, or a folder for it; without one, the library stays in the cache.
    BuildError: a tool is missing or too old, the sources do not compile, or a file cannot be written.
    LibraryError: the result is not a library. TwinopError: an op has a name that it cannot have.
    """
    options = options or Options()
    if project.modules and options.cpu:
        raise BuildError(
            "--cpu: kernels in Python run on CUDA only; on the CPU their function bodies run. Leave out --cpu"
        )
    file = f"lib{project.name}.so"
    if output is not None and output.is_dir():
        output = output / file
    if output is not None and output.parent.name == "build":
        tree = output.absolute().with_name(f".{output.stem}")
    else:
        tree = cache_folder() / "trees" / digest(asdict(project), asdict(options))
    cuda = not options.cpu and any(source.has_cuda for source in project.sources)
    files = [source.path for source in project.sources]
    for path in (tree.absolute(), *files, *project.objects):
        if bad := re.search(r'["\\;\[\]\n<>|\ud800-\udfff]|\$\{', str(path)):
            raise BuildError(
                f"{path}: CMake cannot build in or from a path with {bad[0]!r}. Rename the folder or the file"
            )
    with locked(tree):
        generated = (output.absolute() if output else tree / "lib").with_name(f"{project.name}.generated.cpp")
        read, done, notes = dict[str, str | None](), list[str](), list[str]()
        if project.modules:
            read, done, notes = write_source(project, options, generated, tree / "traced.json", progress)
            files.append(generated)
        library, compiled, steps, warnings = compile_library(
            tree, project, [*files, *project.objects], options, progress, cuda
        )
        done, notes = done + steps, notes + warnings
        read |= {path: found for path, found in compiled.items() if path != str(generated)}
        records = read_library(library).records
        nodes, ops = {record.onnx_name: record.name for record in records.values()}, {*records}
        with suppress(LibraryError):  # twinop's own ops, which formulas may call, need not be built
            ops |= {*read_library(find_library("custom_ops")).records}
        for record in records.values():
            check_op_name(record.name)
            if (other := nodes[record.onnx_name]) != record.name:
                raise BuildError(
                    f"ops {record.name} and {other} are both {record.onnx_name} in ONNX. Rename one of them"
                )
            check_record(record, ops)
        if output is None:
            output = cache_folder() / "libraries" / checksum(library) / file
        write(output, library.read_bytes())
        if output.parent.name == "build" or cache_folder() in output.parents:
            write(mark(output), note_of(output, read))
    found = read_library(output)
    if cuda and not found.cuda_version:
        notes.append(
            "no nvcc found (CUDACXX, PATH, CUDA_HOME, /usr/local/cuda), or twinop was built without CUDA "
            "here: the ops in C++ run on the CPU only (--cpu says so without this note)"
        )
    return Built(found, done, notes)
