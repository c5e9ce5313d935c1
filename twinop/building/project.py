"""What is to be built, and how: the sources of one library, its name, its domain, and the options."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError
from ..record.names import check_domain, check_op_name

_OPS = re.compile(r"\bTWINOP_(OP|CPU_OP|CUDA_OP|ELEMENTWISE|ROWWISE|UNARY)\s*\(\s*(\w+)")
_KERNEL_OPS = re.compile(r"^@(?:twinop\.)?triton_op\(", re.MULTILINE)
OBJECTS = (".o", ".a")
_SUFFIXES = (".h", ".hpp", ".cuh", ".cu", ".cpp", ".cc")
_SETTINGS = {"name": str, "sources": list, "domain": str}  # of [tool.twinop]


@dataclass(frozen=True)
class Source:
    """A source file. Both compilers compile one with ops; without any, one of them does, by its suffix."""

    path: Path
    ops: tuple[tuple[str, str], ...]  # the macro and the name of each op that it registers

    @property
    def has_cuda(self) -> bool:
        return any(macro != "CPU_OP" for macro, _ in self.ops) or (not self.ops and self.path.suffix == ".cu")


@dataclass(frozen=True)
class Project:
    """The sources of one library."""

    name: str
    domain: str
    sources: tuple[Source, ...]
    modules: tuple[Path, ...] = ()
    """Python files with kernels."""
    objects: tuple[Path, ...] = ()
    """Object files and archives."""


@dataclass(frozen=True)
class Options:
    """How to build."""

    archs: str = "native"  # CUDA architectures: `native`, `all`, or a list such as `80,90`
    cpu: bool = False  # leaves the CUDA kernels out
    debug: bool = False  # no optimization, symbols, assertions


def find_project(paths: Sequence[Path] = (), name: str | None = None, domain: str | None = None) -> Project:
    """Returns the project of a folder, with or without a pyproject.toml, or of source files.

    Args:
        paths: by default the current folder.
        name: the library's name. Default: the project's name, the folder's, or the stem of the only file. Of
            several files, the only one in Python: its stem is the domain of its ops.
        domain: the domain of its ops. Default: the name.

    BuildError: no such file, no op in it, no name for several files, or a broken pyproject.toml. TwinopError:
    the domain or an op has a name that it cannot have.
    """
    paths = [Path(path) for path in paths] or [Path()]
    for path in paths:
        if not path.exists():
            raise BuildError(
                f"{path}: no such file or folder. Expected a project's folder, or a header with ops"
            )
    settings: dict[str, Any] = {}
    if any(path.is_dir() for path in paths):
        if len(paths) > 1:
            raise BuildError(f"{', '.join(map(str, paths))}: expected one folder, or source files")
        settings = _settings(paths[0])
        files = _files(paths[0], settings)
    else:
        files = paths
    if name is None:
        named = [path for path in paths if path.suffix not in OBJECTS] or paths
        named = named if len(named) == 1 else [path for path in named if path.suffix == ".py"]
        if len(named) != 1:
            raise BuildError(
                f"{', '.join(map(str, paths))}: --name is required for several files: --name mish makes the "
                "library libmish.so"
            )
        found = named[0].resolve()
        name = settings.get("name") or _identifier(found.name if found.is_dir() else found.stem)
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise BuildError(
            f"--name {name}: expected letters, digits and _, as in mish: the library is lib<name>.so"
        )
    domain = domain or settings.get("domain") or name
    check_domain(domain)
    files = [*{path.resolve(): path for path in files}.values()]  # each once
    modules = tuple(path.resolve() for path in files if path.suffix == ".py" and _declares_kernels(path))
    objects = tuple(path.resolve() for path in files if path.suffix in OBJECTS)
    sources = tuple(_source(path) for path in files if path.resolve() not in (*modules, *objects))
    places = dict[str, Path]()
    for op, path in ((op, source.path) for source in sources for _, op in source.ops):
        check_op_name(op)
        if places.setdefault(op, path) != path:
            raise BuildError(
                f"{places[op]} and {path} both have an op {op}. Ops of one library have different names"
            )
    if not modules and not any(source.ops for source in sources):
        said = ", ".join(str(file) for file in files) or f"{paths[0]}: no {', '.join(_SUFFIXES)} file"
        raise BuildError(
            f"{said}: registers no op. Expected a header with TWINOP_UNARY, TWINOP_ELEMENTWISE, "
            "TWINOP_ROWWISE or TWINOP_OP, or a Python file with @twinop.triton_op; `twinop new mish` makes "
            "one. An object file needs such a header beside it (twinop/tvm_ffi.h)"
        )
    return Project(name, domain, sources, modules, objects)


def _declares_kernels(path: Path) -> bool:
    """Whether a Python file has ops whose kernels are written in Python."""
    return _KERNEL_OPS.search(_text(path)) is not None


def _source(path: Path) -> Source:
    if path.suffix == ".py":
        raise BuildError(f"{path}: declares no op with kernels. Expected @twinop.triton_op before a function")
    if path.suffix not in _SUFFIXES:
        raise BuildError(
            f"{path}: not a source of ops. Expected a file that ends in {', '.join(_SUFFIXES)}, .py, .o or .a"
        )
    return Source(path.resolve(), tuple(_ops(_text(path))))


def _ops(text: str) -> list[tuple[str, str]]:
    """Returns the macro and the name of each op that a source text registers, outside of comments."""
    return _OPS.findall(re.sub(r"//.*|/\*(?s:.*?)\*/", "", text))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read: {error}") from error


def op_names(text: str) -> list[str]:
    """Returns the names of the ops that a source text registers, without backward ops."""
    return [name for _, name in _ops(text) if not name.endswith("_backward")]


def _settings(folder: Path) -> dict[str, Any]:
    """Returns [tool.twinop] of the folder's pyproject.toml, with the project's name."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return {}
    if sys.version_info >= (3, 11):  # imported here, because twinop.compile has no such file
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{file}: does not parse: {error}") from error
    settings = content.get("tool", {}).get("twinop", {})
    for key, value in settings.items():
        if type(value) is not _SETTINGS.get(key):
            raise BuildError(
                f"{file}: [tool.twinop] has {key} = {value!r}; expected some of name, domain (texts) "
                "and sources (a list of files)"
            )
    name = content.get("project", {}).get("name")
    return ({"name": _identifier(name)} if isinstance(name, str) else {}) | settings


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII)


def _files(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Returns the sources that the settings name, or those in the folder that have ops or are CUDA files."""
    if "sources" in settings:
        files = [folder / str(source) for source in settings["sources"]]
        for file in files:
            if not file.is_file():
                raise BuildError(
                    f"{folder / 'pyproject.toml'}: [tool.twinop] names the source {file}: no such file"
                )
        return files
    candidates = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    modules = sorted(file for file in folder.glob("*.py") if file.is_file() and _declares_kernels(file))
    compiled = [file for file in candidates if file.suffix in (".cu", ".cpp", ".cc") or _source(file).ops]
    return compiled + modules
