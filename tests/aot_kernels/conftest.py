"""The stand-in for the CUDA driver, in a process of its own, and small libraries."""

import atexit
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from aot_ops import InProcess, LibraryOf, compile_library, contents_of

from twinop.aot_kernels.plan import Contents, DeviceOp, Kernel


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.submodule_search_locations  # its package has CUDA's header
    include = Path(triton.submodule_search_locations[0]) / "backends/nvidia/include"
    source = Path(__file__).with_name("stand_in_driver.cpp")
    command = ["-std=c++17", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1", str(source)]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


@pytest.fixture(scope="session")
def in_process(stand_in: Path) -> Iterator[InProcess]:
    yield from _process(str(stand_in))


@pytest.fixture(scope="module")
def without_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("no_driver")
    (folder / "libcuda.so.1").write_bytes(b"no library")  # hides a real one
    yield from _process(str(folder))


def _process(folder: str) -> Iterator[InProcess]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:  # only while the process starts: others have the driver
            patch.setenv("LD_LIBRARY_PATH", folder)
            pool.submit(os.getpid).result(60)
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(60)


@cache
def _compiled(contents: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="twinop-aot-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return compile_library(_CONTENTS[contents], folder, "aot")


_CONTENTS: dict[str, Contents] = {}


@pytest.fixture
def library_of(tmp_path: Path) -> LibraryOf:
    """Compiles an op, or contents, into a library that no test has loaded."""
    numbers = count()

    def make(op: DeviceOp | Contents, *kernels: Kernel) -> Path:
        contents = op if isinstance(op, Contents) else contents_of(op, *kernels)
        _CONTENTS[repr(contents)] = contents
        return Path(shutil.copy(_compiled(repr(contents)), tmp_path / f"libaot{next(numbers)}.so"))

    return make
