"""Python processes that need not import torch: that takes longer than most of what tests do in one.

A process imports packages of others, and no module of twinop; it serves all processes of a run, as its
imports take eight seconds of a core. For each command it forks a child, with the command's arguments,
environment and folder. The child runs as a new process of Python would, but for this:
what Python and packages read from the environment as they start is that of the tests, such as the seed of
hashes; at its end nothing is destroyed; and nobody waits for processes that it leaves. Tests of imports and
of processes that must agree start processes of their own; so do the examples of docs/, whose end counts.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import read_once
from made_once import made_once

IMPORTED = (
    "torch._dynamo", "torch._functorch.aot_autograd", "torch._decomp.decompositions_for_jvp",
    "torch.export._trace", "torch.distributed.tensor.experimental", "torch.onnx._internal.exporter._core",
    "onnxscript.function_libs.torch_lib.ops", "onnx_ir", "onnxruntime", "pytest", "typer.main",
    "typer._adapters", "rich.table", "rich.progress",
)  # fmt: skip

OPSET = 20  # of an export by default


def _start(folder: Path) -> None:
    command = [sys.executable, __file__, str(folder / "socket")]
    subprocess.Popen(command, start_new_session=True).returncode = 0  # it ends with the run
    while not (folder / "socket").exists():
        time.sleep(0.01)


class _Server:
    """A connection, with a process of its own that forks from the one that has imported all."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(made_once("warm python", _start) / "socket"))
        self.file = self.socket.makefile("rw")
        self.group = int(self.file.readline() or 0)

    def run(self, request: Mapping[str, Any]) -> int:
        try:
            print(json.dumps(request), file=self.file, flush=True)
            if not (line := self.file.readline()):
                raise RuntimeError("the process that tests fork from has ended; stderr has what it said")
            return int(line)
        except BaseException:  # a test's time is over: the next one gets a process of its own
            with suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            _server.cache_clear()
            raise


_server = cache(_Server)


def run(
    arguments: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS...`, and returns what it printed."""
    command = [*map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        places = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        folder, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        code = _server().run({"command": command, "cwd": folder, "env": environment, "output": places})
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess([sys.executable, *command], code, out.read(), err.read())


def _become(request: Mapping[str, Any]) -> None:
    """Makes this process one of the command: all but its code."""
    for number, place in enumerate([os.devnull, *request["output"]]):
        file = os.open(place, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _accept(listening: socket.socket) -> socket.socket:
    """Forks a child for each connection, until the run is over; returns the connection in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.path.exists(listening.getsockname()):
        if select.select([listening], [], [], 1)[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                return connection
            connection.close()
    os._exit(0)


def _serve(connection: socket.socket) -> Mapping[str, Any]:
    """Forks a child for each request, and tells how it ended; returns the request in the child."""
    file = connection.makefile("rw")
    print(os.getpid(), file=file, flush=True)
    for line in file:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            _become(request)
            return dict(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=file, flush=True)
    os._exit(0)


def _run(kind: str, *rest: str) -> None:
    """Runs a command of Python, without `python`."""
    sys.argv[:] = [kind, *rest]
    if kind == "-c":
        sys.argv.pop(1)
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv.pop(0)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def _code_of(command: Sequence[str]) -> int:
    """Runs a command; returns the exit code that Python gives it."""
    try:
        _run(*command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _main() -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen()
    for name in IMPORTED:
        with suppress(ImportError):  # another release has no such module
            __import__(name)
    with suppress(AttributeError, KeyError):
        read_once.keep_opset(OPSET)
    # Packages are those of the tests. A command has the folders of its own PYTHONPATH alone.
    of_tests = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [folder for folder in sys.path if folder not in of_tests]
    gc.freeze()  # what is imported stays: children share its pages
    code = _code_of(_serve(_accept(listening))["command"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take a thousand modules down takes another second


if __name__ == "__main__":
    _main()
