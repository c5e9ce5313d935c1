"""The sources stay readable: no long files, no import cycles, no imports from a higher layer."""

from pathlib import Path

import pytest

from twinop.bench.report import BenchError
from twinop.bench.source_tree import SourceTree

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 350


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    try:
        return SourceTree.of(ROOT)
    except BenchError as error:
        pytest.skip(str(error))


def test_no_file_is_long(tree: SourceTree) -> None:
    long = [f"{name}: {lines} lines" for lines, name in tree.longest() if lines > LONGEST]
    assert not long, f"more than {LONGEST} lines; split these files:\n" + "\n".join(long)


def test_modules_do_not_import_each_other_in_a_circle(tree: SourceTree) -> None:
    assert not tree.import_cycle()


def test_no_layer_imports_from_a_higher_one(tree: SourceTree) -> None:
    assert len(tree.imports()) > 200
    upward = [f"{each.importer} imports {each.imported}" for each in tree.imports() if each.is_upward]
    assert not upward, "\n".join(upward)
