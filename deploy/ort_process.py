"""Runs models in a process of its own: one that crashes or never ends is then an error of the caller's.

A server process imports ONNX Runtime once and forks. The fork answers all calls, until one of them crashes
or the environment has other settings; the server waits for it. Both are one process group, which ends with
the process that started it.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import select
import signal
import subprocess
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from twinop.errors import LibraryError, TwinopError, TwinopWarning, command_line, in_command, option
from twinop.libraries.library import find_library, read_library
from twinop.record.op_spec import DOMAIN
from twinop.system import python_child

_PR_SET_PDEATHSIG = 1
_PIPE = 1 << 20  # bytes: with 64 KiB, the default, both processes wait for each other all the time
_READ_ONCE = ("CUDA_", "OMP_", "ORT_", "TWINOP_")  # variables that libraries read with their first call
_seconds: ContextVar[float] = ContextVar("seconds", default=600.0)


class OrtCrash(Exception):
    """ONNX Runtime ended its process; the text names the signal."""


class Endless(Exception):
    """A call did not go on within its time."""

    answers: list[Any]  # that came before


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limits the time without progress of the calls in its block; TwinopError: it is over, or a crash."""
    before = _seconds.set(seconds)
    try:
        yield
    except OrtCrash as crash:
        raise TwinopError(
            f"ONNX Runtime crashes on this model ({crash}). Try another version of it, or its option "
            "graph_optimization_level = ORT_DISABLE_ALL"
        ) from crash
    except Endless as error:
        raise TwinopError(str(error)) from error
    finally:
        _seconds.reset(before)


class Server:
    """The process that answers calls. It is started by the first one, and again if it has ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork of this process must have a server of its own
        self._lock = threading.Lock()
        self._read: dict[str, str] | None = None  # the environment of its start
        atexit.register(self.close)

    def run(self, function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
        """Returns the items that a function yields in another process; TwinopError, OrtCrash or Endless."""
        if not python_child.executable():
            python_child.warn_unprotected(
                "the model runs in this one, and may end it or never come to an end"
            )
            return list(function(*arguments))
        answers: list[Any] = []
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                call = function, arguments, dict(os.environ), os.getcwd(), in_command()
                pickle.dump(call, process.stdin, pickle.HIGHEST_PROTOCOL)
                process.stdin.flush()
                while (answer := pickle.load(self._answers))[0] == "item":
                    answers.append(answer[1])
            except (BrokenPipeError, EOFError, pickle.UnpicklingError):
                self.close()
                status = process.returncode
                ended_by = [each.name for each in signal.Signals if each in (-status, status - 128)]
                raise OrtCrash(ended_by[0] if ended_by else f"exit code {status}") from None
            except BaseException as error:  # the next call would get the answers that are still to come
                self.close()
                if isinstance(error, Endless):
                    error.answers = answers
                raise
        kind, value, said = answer
        for each in said:
            warnings.warn(each, TwinopWarning, stacklevel=2)
        if kind == "error":
            raise value
        return answers

    def start(self, *modules: str) -> None:
        """Starts the process now, so that the first call need not wait for its imports, nor for those of the
        modules that calls name."""
        with self._lock:
            if python_child.executable():
                self._started(modules)

    def _started(self, modules: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        read = {name: os.environ[name] for name in os.environ if name.startswith(_READ_ONCE)}
        if self._read != read:
            self.close()
        if self.process is None or self._owner != os.getpid() or self.process.poll() is not None:
            self._owner, self._read = os.getpid(), read
            arguments = ", ".join(map(repr, (os.getpid(), *modules)))
            command = python_child.python(f"from {__name__} import serve; serve({arguments})")
            pipe = subprocess.PIPE  # in a session of its own: Ctrl-C is the caller's
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            for each in (self.process.stdin, self.process.stdout):
                with suppress(OSError):  # the system limits what all pipes of a user may hold
                    fcntl.fcntl(each, fcntl.F_SETPIPE_SZ, _PIPE)  # type: ignore[arg-type]
            self._answers = io.BufferedReader(_Answers(self.process.stdout))
        return self.process

    def close(self) -> None:
        """Ends the process, and what it has started."""
        if self.process is not None and self._owner == os.getpid():
            with suppress(BrokenPipeError), self.process:
                self.process.terminate()


SERVER = Server()


class _Answers(io.RawIOBase):
    """What comes from the other process, each part of it within the time limit."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._poll = pipe.fileno(), select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._poll.poll(1000 * (seconds := _seconds.get())):
            raise Endless(
                f"the model does not come to an end: no progress in {seconds:g} s. Allow more with "
                f"{option('timeout')}, or give other inputs if they say how long it runs"
            )
        return os.readv(self._pipe, [buffer])


def serve(parent: int, *modules: str) -> None:
    """Answers calls from standard input, in the other process, until it ends or the process `parent` does.
    Modules are imported once for all calls."""

    def end(*_: Any) -> None:  # the signal comes for the end of any thread of the parent's
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    end()
    import onnx
    import onnxruntime  # no call pays for it

    from . import registration

    for each in modules:
        importlib.import_module(each)
    onnx.defs.has("Relu")  # makes the table of operators
    with suppress(LibraryError):  # the copy and the records serve each run, as long as the file is the same
        read_library(own := find_library("custom_ops").resolve(), registration.copied(own).path)
        for path in own.parent.glob("lib*.so"):
            with suppress(LibraryError):
                read_library(path, domain=DOMAIN)

    gc.freeze()
    calls, answers, server = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb"), os.getpid()
    os.dup2(2, 1)  # keeps what models and ONNX Runtime print out of the answers
    if (forked := os.fork()) != 0:  # Python takes no signal while a model runs, so this process waits for it

        def close(*_: Any) -> None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(forked, signal.SIGKILL)
                os.waitpid(forked, 0)  # its time counts among that of the caller's children
            os.killpg(0, signal.SIGKILL)

        signal.signal(signal.SIGTERM, close)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the caller may have blocked it
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == server and calls.peek():
            registration.skip_subprocess_probe, registration.loaded_before = False, frozenset()
            onnxruntime.set_seed(time.monotonic_ns())  # a model that draws numbers differs between two runs
            _answer(answers, pickle.load(calls))
            gc.collect()  # sessions, whose memory goes back to the system
            ctypes.CDLL(None).malloc_trim(0)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # perhaps in the middle of an answer, so the next call needs another pipe


def _answer(pipe: Any, call: Any) -> None:
    function, arguments, environment, folder, is_command = call

    def send(*answer: Any) -> None:
        pickle.dump(answer, pipe, pickle.HIGHEST_PROTOCOL)
        pipe.flush()

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    last: tuple[str, Any] = ("end", None)
    with command_line(is_command), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TwinopWarning)
        try:
            for item in function(*arguments):
                send("item", item)
        except (TwinopError, ModuleNotFoundError) as error:
            last = ("error", error)
    send(*last, [str(each.message) for each in caught if issubclass(each.category, TwinopWarning)])
