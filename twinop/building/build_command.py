"""`twinop build`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ..cli.console import err, out, print_note, show_library
from ..errors import BuildError
from .builder import build as build_project
from .project import Options, find_project


def build(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder, with a pyproject.toml or without, or source files: headers with ops, .cu files, "
            "Python files, object files and archives. Default: the current folder."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The library to write. Default: build/lib<name>.so.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The library's name. Default: the project's, the folder's, or that of the only file or "
            "Python file."
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            help="The domain of the ops in ONNX and, with _ for dots, in torch.ops. Default: the name."
        ),
    ] = None,
    archs: Annotated[
        str,
        typer.Option(
            envvar="TWINOP_CUDA_ARCHS",
            help="CUDA architectures: native (this machine's GPUs; 90 without one), all, or a list such "
            "as 80,90.",
        ),
    ] = "native",
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the CUDA kernels out.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="No optimization on the host, symbols, assertions.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all that a compiler says of an error.")
    ] = False,
) -> None:
    """Build ops into one library for PyTorch and ONNX Runtime.

    Needs a C++ compiler (CXX, c++), CMake and ninja (twinop[build]) and, for CUDA kernels in C++, nvcc
    (CUDACXX, PATH, CUDA_HOME). Ops with kernels in Python become a C++ file beside the library,
    build/<name>.generated.cpp. CXXFLAGS, CUDAFLAGS and LDFLAGS add options, such as -fsanitize=address.
    Compiles what changed, with ccache where it is installed. CMake's files lie beside a library in build/,
    else in ~/.cache/twinop, or $TWINOP_CACHE.

    Examples:

        twinop build

        twinop build mish.h --archs 80,90

        twinop build mish.h gelu.h --name activations --domain my.ops -o libactivations.so

        twinop build mish.py gelu.h

        twinop build scale.h kernel.o
    """
    begin = time.monotonic()
    project = find_project(sources or (), name, domain)
    options = Options(archs, cpu, debug)
    with err.status("building") as shown:
        target = output or Path("build") / f"lib{project.name}.so"
        try:
            built = build_project(project, target, options, shown.update)
        except BuildError as error:
            if error.output:
                said = error.output if verbose else "--verbose shows all that the compiler says"
                err.print(said, soft_wrap=True)
            raise
    for note in built.notes:
        print_note(note)
    show_library(built.library)
    steps = len(built.compiled)
    done = f"{steps} step{'s' * (steps > 1)}" if steps else "nothing to do"
    out.print(f"{built.library.path}: {done}, {time.monotonic() - begin:.1f} s", soft_wrap=True)
