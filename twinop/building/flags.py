"""The compilers' flags: those of twinop's own CMake targets (cmake/TwinopFlags.cmake)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import twinop

from ..errors import BuildError
from ..installation import how_to_build
from ..library import get_include, library_folders
from .toolchain import Compiler, Nvcc, architectures

_SANITIZERS = {
    "address": ["-fsanitize=address"],
    # With the null checks, GCC takes no function's address for a constant.
    "undefined": ["-fsanitize=undefined", "-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute"],
}


@dataclass(frozen=True)
class Options:
    """How to build.

    Attributes:
        archs: CUDA architectures: `native`, `all`, or a list such as `80,90`.
        cpu: leaves the CUDA kernels out.
        debug: no optimization, symbols, assertions.
        sanitize: sanitizers of the code on the host: `address`, `undefined` or both with a comma.
    """

    archs: str = "native"
    cpu: bool = False
    debug: bool = False
    sanitize: str = ""


@dataclass(frozen=True)
class Installation:
    """What an installation of twinop has to build ops: flags by tool, and the files that libraries link."""

    folder: Path
    flags: dict[str, list[str]]

    @property
    def archive(self) -> Path:
        return self.folder / "libtwinop_ort.a"

    @property
    def exports(self) -> Path:
        return self.folder / "exports.map"


def find_installation() -> Installation:
    """Returns the installation's folder that can build ops.

    Raises:
        BuildError: no folder has its files, or they are another version's.
    """
    folders = library_folders()
    wanted = ("compile_flags.json", "libtwinop_ort.a", "exports.map")
    lacking = {folder: [name for name in wanted if not (folder / name).is_file()] for folder in folders}
    folder = next((folder for folder in folders if not lacking[folder]), None)
    if folder is None:
        searched = ", ".join(f"{folder} (without {', '.join(names)})" for folder, names in lacking.items())
        raise BuildError(f"no folder has what an op is built with; searched {searched}. {how_to_build()}")
    flags = json.loads((folder / "compile_flags.json").read_text())
    if flags["version"] != twinop.__version__:
        raise BuildError(
            f"{folder} was built by twinop {flags['version']}; this is twinop {twinop.__version__}. "
            f"{how_to_build()}"
        )
    return Installation(folder, flags)


class CommandLines:
    """The command lines of one build.

    Raises:
        BuildError: an architecture or a sanitizer that is not known.
    """

    def __init__(
        self,
        installation: Installation,
        options: Options,
        compiler: Compiler,
        nvcc: Nvcc | None,
    ) -> None:
        self.installation, self.options = installation, options
        self.compiler, self.nvcc = compiler, nvcc
        flags = installation.flags
        archs = architectures(options.archs, nvcc, flags["archs"]) if nvcc else []
        shared = [
            "-MMD",
            f"-I{get_include()}",
            f'-DTWINOP_VERSION="{twinop.__version__}"',
            f'-DTWINOP_CUDA_ARCHS="{",".join(archs) or "none"}"',
            f'-DTWINOP_CUDA_VERSION="{nvcc.version if nvcc else ""}"',
            *(["-DTWINOP_WITH_CUDA"] if nvcc else []),
        ]
        gnu = flags["gnu"] if compiler.kind == "GCC" else []
        self._sanitize = _sanitizers(options.sanitize)
        symbols = ["-g", "-fno-omit-frame-pointer"] if options.debug or options.sanitize else []
        self._cxx = [
            *compiler.command,
            "-c",
            *shared,
            *self._kind(flags["cxx"]),
            *gnu,
            *self._sanitize,
            *symbols,
        ]
        self._cuda: list[str] = []
        if nvcc:
            newer = flags["cuda_12_8"] if nvcc.knows_compression else []
            symbols = ["-g", "-lineinfo"] if options.debug else []
            host = compiler.command[-1]
            codes = [_code(arch) for arch in archs]
            cuda = [*self._kind(flags["cuda"]), *newer, *symbols, *codes]
            self._cuda = [nvcc.path, "-c", "-ccbin", host, *shared, *cuda]

    def _kind(self, flags: Sequence[str]) -> list[str]:
        """Returns the flags of a release build as those of the kind of build that is wanted."""
        if not self.options.debug:
            return list(flags)
        return ["-O0", *(flag for flag in flags if not flag.startswith("-O") and flag != "-DNDEBUG")]

    def compile(self, is_cuda: bool) -> list[str]:
        """Returns the command that compiles one file, without the file and its object."""
        return self._cuda if is_cuda else self._cxx

    def programs(self, is_cuda: bool = False) -> list[str]:
        """Returns the programs that compile one file, or link."""
        return [*([self.nvcc.path] if is_cuda and self.nvcc else []), *self.compiler.command]

    def link(self, name: str) -> list[str]:
        """Returns the command that links a library, without its objects."""
        command = [*self.compiler.command, "-shared", f"-Wl,-soname,lib{name}.so", *self._sanitize]
        command += [f"-Wl,--version-script={self.installation.exports}", *self.installation.flags["link"]]
        if not self.options.debug and not self.options.sanitize:
            command.append("-Wl,--strip-all")
        command += [str(self.installation.archive), "-ldl"]
        if self.nvcc:
            command += [f"-L{self.nvcc.library_folder}", "-lcudart_static", "-lrt", "-lpthread", "-ldl"]
        return command


def _sanitizers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _SANITIZERS:
            raise BuildError(f"--sanitize {text}: expected {' or '.join(_SANITIZERS)}, or both with a comma")
    return [flag for name in names for flag in _SANITIZERS[name]]


def _code(arch: str) -> str:
    """Returns nvcc's option for an architecture in CMake's words: `90-real`, `90-virtual`, `90` (both)."""
    number, _, kind = arch.partition("-")
    codes = {"real": f"sm_{number}", "virtual": f"compute_{number}"}
    return (
        f"--generate-code=arch=compute_{number},code=[{codes.get(kind) or f'compute_{number},sm_{number}'}]"
    )
