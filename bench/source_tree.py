"""What the project's sources are: their size, and how the Python modules import each other."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .report import BenchError

LAYERS = ("twinop", "torch_op", "deploy", "export", "bench")
"""The folders of Python modules. A module imports from its own folder and from those before it."""

_NOT_COUNTED = ("tests/", "docs/", "examples/", "bench/results/")
_NOT_CODE = {".json", ".md", ".txt", ".svg", ".png"}
_NOT_INSTALLED = {".cpp", ".h", ".map"}  # as in pyproject.toml
_SOURCES = {".py", ".h", ".cuh", ".cu", ".cpp", ".sh"}


@dataclass(frozen=True)
class Import:
    """A module-level import of one of the project's modules by another, with their full names."""

    importer: str
    imported: str

    @property
    def is_upward(self) -> bool:
        """Whether a lower layer imports from a higher one."""
        return _layer(self.importer) < _layer(self.imported)


@dataclass(frozen=True)
class SourceTree:
    """The files of a checkout that git tracks.

    Attributes:
        files: their paths relative to `root`, without links.
    """

    root: Path
    files: tuple[str, ...]

    @classmethod
    def of(cls, root: Path) -> "SourceTree":
        """Reads the list of files.

        Raises:
            BenchError: `root` is not a git checkout.
        """
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
        if listed.returncode != 0:
            raise BenchError(f"{root}: not a git checkout, so the project's files are not known")
        files = (name for name in listed.stdout.splitlines() if (root / name).is_file())
        return cls(root, tuple(name for name in files if not (root / name).is_symlink()))

    def _lines(self, name: str) -> int:
        return (self.root / name).read_bytes().count(b"\n")

    def program_lines(self) -> int:
        """Counts the lines of the program: everything but tests, documentation, results and data."""
        return sum(
            self._lines(name)
            for name in self.files
            if not name.startswith(_NOT_COUNTED) and Path(name).suffix not in _NOT_CODE
        )

    def package_bytes(self) -> int:
        """Counts the bytes of the files that an installation holds beside the libraries."""
        return sum(
            (self.root / name).stat().st_size
            for name in self.files
            if name.partition("/")[0] in LAYERS
            and not name.startswith(_NOT_COUNTED)
            and Path(name).suffix not in _NOT_INSTALLED
        )

    def longest(self) -> list[tuple[int, str]]:
        """Returns (lines, path) of each source file, tests included, the longest first."""
        sources = (name for name in self.files if Path(name).suffix in _SOURCES)
        return sorted(((self._lines(name), name) for name in sources), reverse=True)

    def imports(self) -> list[Import]:
        """Returns the imports at module level, of `twinop` and of all folders that are linked there."""
        modules = {_module(name): name for name in self.files if _is_module(name)}
        found = []
        for importer, name in modules.items():
            for imported in _imported(importer, name, ast.parse((self.root / name).read_text())):
                while imported and imported not in modules:
                    imported = imported.rpartition(".")[0]  # the name of a function, say
                if imported:
                    found.append(Import(importer, imported))
        return found

    def import_cycle(self) -> list[str]:
        """Returns the modules of an import cycle, or an empty list if there is none."""
        graph: dict[str, set[str]] = {}
        for each in self.imports():
            graph.setdefault(each.importer, set()).add(each.imported)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name.partition("/")[0] in LAYERS


def _module(name: str) -> str:
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "twinop" else ["twinop", *parts])


def _layer(module: str) -> int:
    folder = module.split(".")[1:2]
    return LAYERS.index(folder[0]) if folder and folder[0] in LAYERS else 0


def _imported(importer: str, name: str, program: ast.Module) -> Iterator[str]:
    """Returns the full names that the statements outside functions and classes import."""
    package = importer if name.endswith("__init__.py") else importer.rpartition(".")[0]
    for statement in program.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            levels = statement.level - 1 if statement.level else 0
            base = ".".join(package.split(".")[: len(package.split(".")) - levels]) if statement.level else ""
            source = ".".join(filter(None, (base, statement.module)))
            yield from (f"{source}.{alias.name}" for alias in statement.names)
