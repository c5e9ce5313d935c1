"""The tests of `twinop build` share a cache of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_files import tiny

from twinop.building.builder import Built, build
from twinop.building.project import Options, find_project


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, in which each source is compiled once."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("TWINOP_CACHE", str(folder))
    for name in ("CXX", "CUDACXX", "TWINOP_CUDA_ARCHS"):
        patch.delenv(name, raising=False)
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield folder
    patch.undo()


@pytest.fixture(scope="session")
def times(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The library of a tiny op, built from a header in a folder of its own."""
    folder = tmp_path_factory.mktemp("times")
    (folder / "times.h").write_text(tiny())
    return build(find_project([folder / "times.h"]), folder / "build" / "libtimes.so", Options(cpu=True))
