"""Runs models in ONNX Runtime in a process of their own, so that a crash does not end the export.

A server process imports ONNX Runtime once and forks for each request. A request then starts in milliseconds,
sees the current library files, and crashes alone.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from twinop import child
from twinop.errors import ExportError, TwinopError
from twinop.library import Library

from . import registration
from .choose_library import Libraries
from .create_session import session as open_session


@dataclass(frozen=True)
class Request:
    """One model to open on the CPU provider, and the inputs of each run.

    Attributes:
        model: a path or the bytes of a model.
        library: as in `deploy.session`.
        cases: numpy arrays by input name; names that the model does not have are left out.
        optimize: whether ONNX Runtime may run its own graph optimizations.
        until_one_runs: end with the first case that runs; those that fail before it have no outputs.
        required: how many of the cases must run; others that fail have no outputs.
    """

    model: Path | bytes
    library: Libraries | bool
    cases: Sequence[Mapping[str, Any]] = ()
    optimize: bool = True
    until_one_runs: bool = False
    required: float = inf
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)


@dataclass(frozen=True)
class Answer:
    """What ONNX Runtime made of a request.

    Attributes:
        libraries: those that were registered.
        outputs: of each case, as numpy arrays in the model's order.
        note: what a user should know about the runs, or "".
    """

    libraries: Sequence[Library]
    outputs: list[list[Any]]
    note: str = ""


class OrtCrash(Exception):
    """ONNX Runtime ended its process; the text names the signal."""


class Server:
    """The process that forks for each request. It is started by the first one, and again if it has ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork of this process must have a server of its own
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(self, request: Request) -> Answer:
        """Opens the model in another process and runs its cases.

        Raises:
            TwinopError: the session cannot be made; as `deploy.session` raises it.
            ExportError: a run failed.
            OrtCrash: the process ended before it answered.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (BrokenPipeError, EOFError, pickle.UnpicklingError):
                raise OrtCrash(f"exit code {process.wait()}") from None
            except BaseException:  # interrupted: the next request would get the answer that is still to come
                self.close()
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _started(self) -> "subprocess.Popen[bytes]":
        if self.process is None or self._owner != os.getpid() or self.process.poll() is not None:
            self._owner = os.getpid()
            self.process = subprocess.Popen(
                child.python(f"from {__name__} import serve; serve()"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the caller's
            )
        return self.process

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None and self._owner == os.getpid():
            self.process.kill()
            self.process.communicate()


SERVER = Server()


# -------------------------------------------------------------------- in the other process


def serve() -> None:
    """Answers requests from standard input until it ends."""
    # Before the first fork, so that no request pays for them.
    import onnxruntime  # noqa: F401

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what ONNX Runtime prints out of the answers
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            try:
                answers.write(pickle.dumps(_answer(request)))
                answers.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # never an ordinary exit: there ONNX Runtime waits for threads that a fork lacks
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            pickle.dump(OrtCrash(name), answers)
            answers.flush()


def _answer(request: Request) -> Answer | Exception:
    import onnxruntime

    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    registration.may_end = True  # this process ends anyway, and another one would take longer than a run
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # nobody waits for a next run
    if not request.optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # no library found: the caller reports it
            session = open_session(
                request.model, ["CPUExecutionProvider"], request.library, session_options=options
            )
        outputs = []
        for index, case in enumerate(request.cases):
            feeds = {name: array for name, array in case.items() if name in session.inputs}
            try:
                outputs.append(list(session.run(feeds).values()))
                if request.until_one_runs:
                    break
            except TwinopError as error:
                if request.until_one_runs or index >= request.required:
                    outputs.append([])
                    continue
                shapes = ", ".join(f"{name} {array.shape}" for name, array in case.items())
                raise ExportError(
                    f"the exported model fails in ONNX Runtime for {shapes}: {error}"
                ) from error
        return Answer(session.libraries, outputs)
    except TwinopError as error:
        return error
