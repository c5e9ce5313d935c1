"""The sources stay readable: no import cycles, no imports from a higher layer."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("twinop", "torch_op", "deploy", "model", "optimize", "export", "deploy.pack", "testing", "bench")
"""The folders of Python modules. A module imports from its own folder and from those before it."""
INSIDE = ("deploy", "model", "optimize", "export")
"""Those in which it does so in functions as well."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The files that git tracks, without links."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is not a git checkout")
    names = listed.stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def imports_of(texts: dict[str, str], inside: bool = False) -> set[tuple[str, str]]:
    """Returns (importer, imported) for the module-level imports of these files by each other.

    Args:
        texts: by path. Each folder of LAYERS is a subpackage of `twinop`.
        inside: whether imports in functions and classes count, too.
    """
    programs = {module_of(name): (name, program_of(text)) for name, text in texts.items()}
    found = set()
    for importer, (name, program) in programs.items():
        package = importer if name.endswith("__init__.py") else importer.rpartition(".")[0]
        statements = ast.walk(program) if inside else program.body
        for imported in imported_names(package, statements):
            while imported and imported not in programs:
                imported = imported.rpartition(".")[0]  # the name of a function, say
            if imported:
                found.add((importer, imported))
    return found


program_of = functools.cache(ast.parse)


def module_of(name: str) -> str:
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "twinop" else ["twinop", *parts])


def imported_names(package: str, statements: Iterable[ast.AST]) -> Iterator[str]:
    """Returns the full names that statements import."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
            source = ".".join(filter(None, (above, statement.module)))
            yield from (f"{source}.{alias.name}" for alias in statement.names)


def upward(imports: set[tuple[str, str]]) -> list[str]:
    """Returns the imports of a higher layer by a lower one."""

    def layer(module: str) -> int:
        parts = module.split(".")
        inner, outer = ".".join(parts[1:3]), ".".join(parts[1:2])
        return LAYERS.index(inner if inner in LAYERS else outer) if outer in LAYERS else 0

    return [f"{a} imports {b}" for a, b in sorted(imports) if layer(a) < layer(b)]


def cycle(imports: set[tuple[str, str]]) -> list[str]:
    """Returns the modules of an import cycle, or an empty list if there is none."""
    graph = TopologicalSorter[str]()
    for importer, imported in imports:
        graph.add(importer, imported)
    try:
        graph.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def texts(files: list[str]) -> dict[str, str]:
    modules = [name for name in files if name.endswith(".py") and name.partition("/")[0] in LAYERS]
    return {name: (ROOT / name).read_text() for name in modules}


@pytest.fixture(scope="module")
def imports(texts: dict[str, str]) -> set[tuple[str, str]]:
    return imports_of(texts)


def test_modules_do_not_import_each_other_in_a_circle(imports: set[tuple[str, str]]) -> None:
    assert not cycle(imports)


def test_no_layer_imports_from_a_higher_one(imports: set[tuple[str, str]], texts: dict[str, str]) -> None:
    assert len(imports) > 200
    assert not upward(imports)
    everywhere = imports_of(texts, inside=True)
    assert len(everywhere) > len(imports)
    inside = tuple(f"twinop.{folder}." for folder in INSIDE)
    assert not [each for each in upward(everywhere) if each.startswith(inside)]


MOST_LINES = 60


def test_no_class_has_a_keyword_that_its_metaclass_takes(texts: dict[str, str]) -> None:
    """In Python 3.10 ABCMeta.__new__ has parameters of these names."""
    nodes = [node for text in texts.values() for node in ast.walk(program_of(text))]
    classes = {node.name: {k.arg for k in node.keywords} for node in nodes if isinstance(node, ast.ClassDef)}
    assert not [name for name, taken in classes.items() if taken & {"name", "bases", "namespace"}]


def test_functions_fit_on_a_screen(texts: dict[str, str]) -> None:
    found = set()
    for file in (each for each in texts if re.match(r"(export|model|optimize)/", each)):
        nodes = ast.walk(program_of(texts[file]))
        for node in (each for each in nodes if isinstance(each, ast.FunctionDef)):
            if (node.end_lineno or 0) - node.lineno >= MOST_LINES:
                found.add(f"{file} {node.name}")
    assert not found
