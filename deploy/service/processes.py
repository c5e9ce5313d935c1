"""Run several processes of the service behind one port, and start those anew that end.

The supervisor binds the ports, so that an error about them comes once, but does not listen. Each of its
processes does, and the kernel spreads the connections over them. The supervisor imports neither NumPy nor
ONNX Runtime: their threads would not survive a fork.
"""

import ctypes
import logging
import math
import mmap
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from twinop.errors import TwinopError

from .addresses import reserved
from .settings import Settings, SettingsError

_log = logging.getLogger(__name__)

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1
_BYTES = 4096  # of the board, for each process
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 30.0  # before a process is started anew
_STEADY_SECONDS = 60.0  # one that ran for this long is started anew after the first delay
_EXIT_SECONDS = 5.0  # beyond the grace time


class State(IntEnum):
    """What a process does."""

    ENDED = 0
    STARTING = 1
    READY = 2


class Board:
    """The state of each process, and why it ended, in memory that all of them share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = mmap.mmap(-1, count * _BYTES)

    def state(self, number: int) -> State:
        return State(self._memory[number * _BYTES])

    def reason(self, number: int) -> str:
        """Return why a process ended; "" if it did not say."""
        said = self._memory[number * _BYTES + 1 : (number + 1) * _BYTES]
        return said.rstrip(b"\0").decode(errors="replace")

    def set(self, number: int, state: State, reason: str = "") -> None:
        said = bytes([state]) + reason.encode()[: _BYTES - 1]
        self._memory[number * _BYTES : (number + 1) * _BYTES] = said.ljust(_BYTES, b"\0")


@dataclass(frozen=True)
class Member:
    """What one of the processes knows of itself and of the others. They are numbered from 0."""

    number: int
    board: Board
    key: str

    def address(self, number: int) -> str:
        """Return where a process answers the others: an abstract Unix socket."""
        return f"\0twinop-{self.key}-{number}"

    def ready(self) -> None:
        """Tell the others and the supervisor that this process is ready."""
        self.board.set(self.number, State.READY)
        os.kill(os.getppid(), signal.SIGCHLD)  # the supervisor looks at the board


@dataclass
class _Process:
    number: int
    pid: int = 0  # 0 while it does not run
    started: float = 0.0
    failures: int = 0  # in a row
    due: float = 0.0  # when to start it anew


class Supervisor:
    """Starts the processes, starts those anew that end, and passes SIGTERM and SIGINT on to them."""

    def __init__(self, settings: Settings, serve: Callable[[Settings, Member], None]) -> None:
        """Bind the ports. `serve` runs in each process, with the settings and the bound ports.

        Raises:
            AddressError: a port is in use, or cannot be shared.
        """
        server = settings.server
        self._sockets = [reserved(server.host, server.http_port, "--http-port")]
        if server.grpc_port is not None:
            self._sockets.append(reserved(server.host, server.grpc_port, "--grpc-port"))
        ports = [each.getsockname()[1] for each in self._sockets] + [None]
        self._ports = {"http_port": ports[0], "grpc_port": ports[1]}
        self._settings = settings.model_copy(update={"server": server.model_copy(update=self._ports)})
        self._serve = serve
        self._board = Board(server.processes)
        self._key = secrets.token_hex(8)
        self._processes = [_Process(number) for number in range(server.processes)]
        self._was_one_ready = self._were_all_ready = False
        self._kill_at: float | None = None  # set when stopping
        self._code = 0

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Return the exit code: 1 if accepted requests were not answered.

        Raises:
            TwinopError: none of the processes can start. The message lists the causes.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for process in self._processes:
            self._start(process)
        while self._kill_at is None or any(process.pid for process in self._processes):
            self._wait()
            self._reap()
            if self._kill_at is None:
                self._look_after()
        return self._code

    def _wait(self) -> None:
        """Wait for a signal, or until something is due. Pass on what asks the service to stop."""
        due = self._kill_at or math.inf
        if self._kill_at is None and self._was_one_ready:
            due = min((process.due for process in self._processes if not process.pid), default=due)
        caught = signal.sigtimedwait(_SIGNALS, min(max(due - time.monotonic(), 0), 3600))
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            self._kill_at = time.monotonic() + self._settings.server.grace_seconds + _EXIT_SECONDS
            self._pass_on(signal.SIGTERM)
        elif caught is None and self._kill_at is not None:
            self._pass_on(signal.SIGKILL)
            self._kill_at = math.inf

    def _pass_on(self, sign: signal.Signals) -> None:
        for process in self._processes:
            if process.pid:
                os.kill(process.pid, sign)

    def _reap(self) -> None:
        for process in self._processes:
            if process.pid and (found := os.waitpid(process.pid, os.WNOHANG))[0]:
                self._ended(process, os.waitstatus_to_exitcode(found[1]))

    def _ended(self, process: _Process, code: int) -> None:
        process.pid = 0
        was_ready = self._board.state(process.number) == State.READY
        how = f"it ended with exit code {code}" if code >= 0 else f"{signal.Signals(-code).name} ended it"
        self._board.set(process.number, State.ENDED, self._board.reason(process.number) or how)
        if self._kill_at is not None:
            self._code = self._code or int(code != 0 and was_ready)
        now = time.monotonic()
        if now - process.started > _STEADY_SECONDS:
            process.failures = 0
        process.due = now + min(_FIRST_DELAY * 2**process.failures, _LONGEST_DELAY)
        process.failures += 1

    def _look_after(self) -> None:
        """Report when all are ready, and start those anew that ended, unless none could start at all."""
        states = {self._board.state(process.number) for process in self._processes}
        self._was_one_ready = self._was_one_ready or State.READY in states
        if not self._was_one_ready and states == {State.ENDED}:
            reasons = (self._board.reason(process.number) for process in self._processes)
            raise TwinopError("\n".join(dict.fromkeys(reasons)))
        if not self._were_all_ready and states == {State.READY}:
            self._were_all_ready = True
            _log.info("ready", extra=self._ports)
        for process in self._processes:
            if self._was_one_ready and not process.pid and process.due <= time.monotonic():
                reason = self._board.reason(process.number)
                _log.error("process %d is started anew: %s", process.number, reason)
                self._start(process)

    def _start(self, process: _Process) -> None:
        self._board.set(process.number, State.STARTING)
        process.started = time.monotonic()
        process.pid = os.fork()
        if not process.pid:
            self._become(Member(process.number, self._board, self._key))

    def _become(self, member: Member) -> NoReturn:
        """Serve, in a process that has just begun. It stops when the supervisor ends for any reason."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._serve(self._settings, member)  # ends the process
        except TwinopError as error:
            self._board.set(member.number, State.ENDED, str(error))
        except Exception as error:
            _log.exception("process %d cannot start", member.number)
            self._board.set(member.number, State.ENDED, f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)


def use_gpu(device: int) -> None:
    """Let this process, which has not used CUDA yet, see one GPU only.

    Raises:
        SettingsError: there is no such GPU.
    """
    from ..cuda import device_count

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(device)] if visible is None else visible.split(",")[device : device + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    if device_count()[0] != 1:
        of = "" if visible is None else f" of CUDA_VISIBLE_DEVICES={visible}"
        raise SettingsError(
            f"devices: there is no GPU {device}{of}. `nvidia-smi -L` lists those of a machine"
        )
