"""A GPU that is gone, a kernel that hangs: the server says so, answers, and ends with code 70."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import service_models as models
from models import node
from onnx import helper
from service_fixtures import Served, receive, serve, tensor, wait_until
from service_rows import ROW

from twinop.deploy.errors import RunError
from twinop.deploy.service.errors import BROKEN, OUT_OF_MEMORY, RUN_FAILED, ServiceError
from twinop.deploy.service.instance import Instance
from twinop.libraries.library import find_library

TRUSTING = ("--allow-model-libraries",)  # the library lies beside the model
IMPATIENT = """
import sys
from twinop.cli import app
from twinop.deploy.service import batching
batching.HANGS_AFTER = 2.0
app(sys.argv[1:])
"""
STALLS = 1000.0  # test.stall sleeps x milliseconds on the CPU, and asserts on CUDA if x is larger


def place_stall(folder: Path, settings: str = "", name: str = "stall") -> None:
    """Write a model of test.stall's op, with a built-in one behind it, and its library beside it."""
    model = models.make(
        [node("CustomStall", ["x"], ["s"], domain="test.stall"), node("Relu", ["s"], ["y"], "relu", "")],
        [models.info("x", "FP32", models.ROWS)],
        [models.info("y", "FP32", models.ROWS)],
    )
    model.opset_import.append(helper.make_opsetid("test.stall", 1))
    path = models.place(folder, name, model, settings=settings)
    shutil.copy(find_library("test_stall"), path.parent)


def stalling(milliseconds: float) -> dict[str, Any]:
    return tensor("x", "FP32", [1, 4], [milliseconds, 0.0, 0.0, 0.0])


def said(served: Served, words: str) -> int:
    return sum(words in line["message"] for line in served.log)


def test_a_run_that_takes_too_long_is_ended_and_one_that_hangs_ends_the_server(tmp_path: Path) -> None:
    """One that takes too long is ended alone; those behind one that does not end get an error, too."""
    place_stall(tmp_path, "run_timeout_seconds = 0.5")
    with serve(tmp_path, *TRUSTING, program=("-c", IMPATIENT)) as served, ExitStack() as stack:
        answer = served.infer("stall", stalling(1200))
        assert answer.status == 504 and "took longer than this model's 0.5 s" in answer.error
        assert said(served, "took longer than run_timeout_seconds (0.5)") == 1
        assert served.infer("stall", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        pool = stack.enter_context(ThreadPoolExecutor())
        asked = [pool.submit(served.infer, "stall", stalling(600_000))]
        wait_until(lambda: served.metric("twinop_in_flight", model="stall") == 1)
        asked += [pool.submit(served.infer, "stall", ROW) for _ in range(2)]
        kept = stack.enter_context(served.connect(60))
        found = [each.result(60) for each in asked]
        assert [answer.status for answer in found] == [503] * 3
        assert all("does not end" in answer.error for answer in found)
        kept.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\n\r\n")
        with suppress(ConnectionError):  # closed already, which says the same to whoever probes
            assert receive(kept).status == 503
        served.is_stopped = True
        assert served.process.wait(60) == 70
        assert said(served, "the server stops and must be restarted: a run of model stall does not end") == 1


PROSE = "an illegal memory access was encountered, CUDA failure 700, device-side assert triggered"


class Driver:
    """A stand-in for libcuda.so.1 that answers every question about a context with `code`."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[str]()

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    def __getattr__(self, name: str) -> Any:
        def answer(*_: Any) -> int:
            self.calls.append(name)
            return self.code if name == "cuStreamQuery" else 0

        return answer


class Failing:
    """A session whose runs fail."""

    def __init__(self, device: str, error: Exception) -> None:
        self.device, self.error = device, error

    def run_checked(self, *arguments: Any) -> Any:
        raise self.error


def failure_of(device: str, error: Exception) -> ServiceError:
    session: Any = Failing(device, error)
    with pytest.raises(ServiceError) as caught:
        Instance(session).run([{}], [])
    return caught.value


@pytest.mark.parametrize("error", [RuntimeError("Reshape failed"), RunError(PROSE), MemoryError()])
@pytest.mark.parametrize("code", [700, 710, 719, 999])
def test_the_driver_says_a_gpu_is_lost(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    driver = Driver(code)
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: driver)
    found = failure_of("cuda:1", error)
    assert found.failure is BROKEN and f"cannot be used any more, CUDA_ERROR_{code}" in str(found)
    taken = [driver.calls.count(f"cuDevicePrimaryCtx{name}") for name in ("Retain", "Release_v2")]
    assert taken == [1, 1]


@pytest.mark.parametrize("driver", [None, Driver(0), Driver(600), Driver(901)])
def test_an_error_of_one_request(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """Whatever the text says: a model's names are in it."""
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: driver)
    assert failure_of("cuda:0", RunError(PROSE)).failure is RUN_FAILED


def test_on_the_cpu_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinop.deploy.cuda.driver", lambda: Driver(700))
    assert failure_of("cpu", RunError(PROSE)).failure is RUN_FAILED


NO_MEMORY = (
    "Failed to allocate memory for requested buffer of size 4000",
    "CUDA error: out of memory",
    "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


@pytest.mark.parametrize("text", NO_MEMORY)
def test_out_of_memory(text: str) -> None:
    found = failure_of("cpu", RuntimeError(text))
    assert found.failure is OUT_OF_MEMORY and "not enough memory for this request" in str(found)


@pytest.mark.cuda
def test_an_assertion_on_the_gpu_ends_the_server(tmp_path: Path) -> None:
    place_stall(tmp_path)
    with serve(tmp_path, *TRUSTING, "--provider", "cuda") as served:
        assert served.infer("stall", ROW).status == 200
        answer = served.infer("stall", stalling(STALLS + 1))
        assert answer.status == 503 and "the GPU cannot be used any more" in answer.error
        served.is_stopped = True
        assert served.process.wait(60) == 70
        assert said(served, "the server stops and must be restarted: the GPU cannot be used any more") == 1
