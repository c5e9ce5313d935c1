"""Shared by all tests: the paths of the libraries, torch with the test ops, no CUDA tests without a GPU."""

import fcntl
import gc
import importlib.util
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import made_once
import pytest
import read_once
from own_matrix import pytest_collection_modifyitems  # noqa: F401 (a hook)

from twinop.libraries.library import find_library

# Waiting threads of torch would spin and slow other test processes down. torch reads this at its import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # it takes half a minute, for a test
pytest_plugins = ["twinop.testing.plugin"]
gc.disable()  # until all tests are imported
os.fsync = lambda fd: None  # no test cuts the power, and thousands of files would wait for the disk
os.environ.pop("COLUMNS", None)  # xdist sets it, and rich reads it once, at its import

if importlib.util.find_spec("tritonclient") is None:  # a GPU machine with the packages for kernels only
    collect_ignore_glob = ["service", "pack", "journeys", "examples/test_ray.py"]


@cache
def _cuda_devices() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_configure(config: pytest.Config) -> None:
    made_once.start()

    def builtin_ops() -> Any:
        from samples import ALL

        return ALL.values()

    from twinop.testing import plugin

    config.stash[plugin.RECORDS] = builtin_ops


def pytest_collection_finish() -> None:
    """The garbage collector took a tenth of the time: what is imported stays, and need not be looked at."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_runtest_setup(item: pytest.Item) -> None:
    read_once.keep()
    if "torch" in sys.modules:  # a test that fails fails again, whatever ran before it
        torch = sys.modules["torch"]  # without a GPU its `manual_seed` keeps a stack for each kind of device
        (torch if _cuda_devices() else torch.default_generator).manual_seed(zlib.crc32(item.nodeid.encode()))
    if item.get_closest_marker("cuda") is not None and _cuda_devices() == 0:
        pytest.skip("needs an NVIDIA GPU and a torch built for it")


@pytest.fixture
def gpu_alone() -> None:
    """For a test that reads the free memory of the GPU: no other process runs a `cuda` test then."""


@pytest.fixture(autouse=True)
def _turn_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """`cuda` tests of many processes run side by side, those with `gpu_alone` alone."""
    if request.node.get_closest_marker("cuda") is None:
        yield
        return
    files = [Path(tempfile.gettempdir()) / f"twinop-gpu-{os.getuid()}-{name}" for name in ("next", "tests")]
    with files[0].open("w") as following, files[1].open("w") as tests:
        fcntl.flock(following, fcntl.LOCK_EX)  # held while one waits to be alone: no others begin
        fcntl.flock(tests, fcntl.LOCK_EX if "gpu_alone" in request.fixturenames else fcntl.LOCK_SH)
        fcntl.flock(following, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """The built libraries by name, such as "custom_relu"; from TWINOP_LIBRARY_DIR or build/."""
    stems = ("custom_relu", "custom_ops", "test_ops", "test_abi", "twinop_torch")
    return {stem: find_library(stem) for stem in stems}


@pytest.fixture(scope="session")
def torch_ops(libraries: dict[str, Path]) -> Any:
    """torch.ops.custom_domain, with the test ops."""
    import torch

    from twinop import torch_op

    torch_op.load(libraries["test_ops"])
    return torch.ops.custom_domain


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: on a busy machine a second thread makes them a hundred times slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def two_gpus() -> None:
    if _cuda_devices() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="session", autouse=True)
def _sessions_with_quiet_pools_of_their_own() -> None:
    """The benchmarks' sessions share a pool, for which ONNX Runtime then takes the whole process.

    Threads spin after each run, which took most of the time of tests with many sessions.
    """
    from twinop.bench import runtime  # imports torch, which is to come before onnxruntime

    runtime.share_pool = False
    import onnxruntime

    create, key = onnxruntime.InferenceSession.__init__, "session.intra_op.allow_spinning"

    def init(self: Any, path_or_bytes: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        try:
            options.get_session_config_entry(key)
        except RuntimeError:  # the test has not set it
            options.add_session_config_entry(key, "0")
        create(self, path_or_bytes, options, *arguments, **named)

    onnxruntime.InferenceSession.__init__ = init
