"""Functions in processes of their own, with a time limit: one that crashes or hangs ends nothing else.

A process imports its module at once and calls the function when it is told to, so that imports, which take
seconds, run beside other work.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from twinop import child

from .report import reason_of

FAILURE = "failure"
PREPARE_LIMIT, MEASURE_LIMIT = 240.0, 400.0  # seconds; max-autotune takes minutes
THREADS = 2  # of a process that prepares
AHEAD = 3  # processes that are ready to measure


class Worker:
    """A process that will call a function.

    Args:
        function: "module:name"; takes and returns what JSON can hold.
        folder: the process gets a folder of its own in it.
        beside: it runs beside other work, with few threads and without a GPU.
    """

    def __init__(self, function: str, folder: Path, *, beside: bool = False) -> None:
        own = Path(tempfile.mkdtemp(dir=folder))
        self._result, self._log = own / "result.json", own / "log.txt"
        environment = dict(os.environ)
        if beside:
            few = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
            environment |= few | {"CUDA_VISIBLE_DEVICES": ""}
        command = child.module(__spec__.name, function, str(self._result))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that a kill reaches its own processes too
            )

    def result(self, arguments: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Lets the process call the function.

        Args:
            arguments: of the function, by name.
            limit: seconds.

        Returns:
            What the function returned; or {"failure": reason}, if it raised, crashed or took too long.
        """
        try:
            self._process.communicate(json.dumps(arguments).encode() + b"\n", timeout=limit)
        except subprocess.TimeoutExpired:
            self.stop()
            return {FAILURE: f"stopped after {limit:g} s"}
        if self._result.exists():  # whatever happens at the exit of CUDA's libraries
            found: dict[str, Any] = json.loads(self._result.read_text())
            return found
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""  # ONNX Runtime's begins with a signature and ends with the reason
        said = last if len(last) <= 300 else f"{last[:80]} ... {last[-220:]}"
        return {FAILURE: f"the process ended with {self._process.returncode}: {said}"}

    def stop(self) -> None:
        """Ends the process and those that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Pipeline:
    """Calls of a module's functions `prepare` and `measure`, each in a process of its own.

    On a GPU, several processes prepare while one measures, and the next ones to measure are started ahead. On
    a CPU nothing runs beside what is measured.

    Args:
        count: the calls of `measure` that are expected.
        at_once: the calls of `prepare` at a time, at most.

    Attributes:
        folder: for the files of the calls, until the end of the pipeline.
    """

    def __init__(self, module: str, device: torch.device, count: int, at_once: int) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._module, self._count, self._on_cpu = module, count, device.type == "cpu"
        self._pool = ThreadPoolExecutor(max(1, min(at_once, len(os.sched_getaffinity(0)) // THREADS)))
        self._prepared: list[Future[dict[str, Any]]] = []
        self._workers: list[Worker] = []
        self._ready: deque[Worker] = deque()
        for _ in range(0 if self._on_cpu else AHEAD):
            self._start_ahead()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown()
        self._temporary.cleanup()

    def prepare(self, **arguments: Any) -> Future[dict[str, Any]]:
        """Calls `prepare` when a process is free."""

        def call() -> dict[str, Any]:
            return self._start("prepare", beside=True).result(arguments, PREPARE_LIMIT)

        self._prepared.append(self._pool.submit(call))
        return self._prepared[-1]

    def measure(self, **arguments: Any) -> dict[str, Any]:
        """Calls `measure`, on a CPU after all that was to be prepared."""
        if self._on_cpu:
            wait(self._prepared)
        self._start_ahead()
        worker = self._ready.popleft() if self._ready else self._start("measure")
        return worker.result(arguments, MEASURE_LIMIT)

    def _start_ahead(self) -> None:
        if self._count:
            self._count -= 1
            self._ready.append(self._start("measure"))

    def _start(self, function: str, beside: bool = False) -> Worker:
        self._workers.append(worker := Worker(f"{self._module}:{function}", self.folder, beside=beside))
        return worker


def _main(function: str, result: str) -> None:
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    asked = sys.stdin.readline()
    if not asked:  # the parent has ended
        return
    try:
        found = call(**json.loads(asked))
    except Exception as failure:  # of an exporter, a compiler or a runtime: each is the row's result
        traceback.print_exc()
        found = {FAILURE: reason_of(failure)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
