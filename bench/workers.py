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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAILURE = "failure"


class Worker:
    """A process that will call a function.

    Args:
        function: "module:name"; takes and returns what JSON can hold.
        folder: for the files of this worker.
        threads: of torch on the CPU, if not all.
        gpu: whether it sees GPUs.
    """

    def __init__(self, function: str, folder: Path, *, threads: int = 0, gpu: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._result, self._log = folder / "result.json", folder / "log.txt"
        environment = dict(os.environ)
        if threads:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if not gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", __spec__.name, function, str(self._result)]
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


def _main(function: str, result: str) -> None:
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    asked = sys.stdin.readline()
    if not asked:  # the parent has ended
        return
    from .report import reason_of

    try:
        found = call(**json.loads(asked))
    except Exception as failure:  # of an exporter, a compiler or a runtime: each is the row's result
        import traceback

        traceback.print_exc()
        found = {FAILURE: reason_of(failure)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
