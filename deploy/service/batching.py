"""Queue and run the requests of one model version, joining those that arrive while all instances are busy.

An idle instance runs a request at once. Requests that arrive while every instance is busy are joined into the
next run: a lone request waits for nothing, and a busy server gets the largest batches. Only
max_queue_delay_us makes an idle instance wait for more rows. A run that takes less time than handing it to a
thread runs on the event loop's thread (short_runs.py).
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from . import logs
from .errors import DEADLINE, NOT_READY, OVERLOADED, RUN_FAILED, ServiceError
from .request import Request, Result
from .settings import ModelSettings
from .short_runs import ShortRuns

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs one batch at a time: an `instance.Instance`."""

    def run(self, parts: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run the requests in `parts` together, and return their joined outputs."""


@dataclass(slots=True, eq=False)
class _Member:
    """A request that waits or runs."""

    request: Request
    outputs: tuple[str, ...]
    rows: int
    key: Any  # requests with equal keys may share a run
    future: asyncio.Future[Result]

    def gone(self, now: float) -> bool:
        """Return whether nobody waits for the answer any more."""
        if self.future.done():
            return True
        deadline = self.request.deadline
        if deadline is None or now < deadline:
            return False
        self.expire()
        return True

    def expire(self) -> None:
        if not self.future.done():
            self.future.set_exception(
                ServiceError(DEADLINE, "the request's time was over before it was answered")
            )


_Outcome = dict[str, np.ndarray] | ServiceError


class Batcher:
    """The queue and the instances of one version. Call its methods on the event loop's thread."""

    def __init__(
        self,
        name: str,
        version: int,
        instances: Sequence[Runner],
        settings: ModelSettings,
        *,
        may_block: bool = False,
    ) -> None:
        """If `may_block`, short runs may run on the event loop's thread."""
        self._name = name
        self._version = version
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._idle = list(instances)
        self._instances = len(instances)
        self._waiting: deque[_Member] = deque()
        self._pool = ThreadPoolExecutor(len(instances), thread_name_prefix=f"{name}-{version}")
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self._seconds_per_run = 0.0  # a moving average for Retry-After
        self._splits = True
        self._is_dispatching = False
        self._short = ShortRuns(may_block and not settings.max_queue_delay_us)
        self.on_run: Callable[[int, float], None] = lambda rows, seconds: None

    @property
    def queued(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of busy instances."""
        return self._instances - len(self._idle)

    async def submit(self, request: Request, outputs: tuple[str, ...]) -> Result:
        """Queue a request that fits the model, and wait for its answer.

        Cancelling the caller drops the request unless it has started to run.

        Raises:
            ServiceError: the queue is full, the deadline has passed, the version is being unloaded, or the
                run failed.
        """
        if self._closed:
            raise ServiceError(NOT_READY, f"version {self._version} of model {self._name} is being unloaded")
        if len(self._waiting) >= self._settings.max_queue:
            raise self._overloaded()
        member = _Member(request, outputs, _rows(request), _key(request, outputs), self._loop.create_future())
        self._waiting.append(member)
        self._drained.clear()
        if self._settings.max_batch_size and self._short.include(_bytes([member])):
            self._dispatch_soon()
        else:
            self._dispatch()
        expiry = None
        if request.deadline is not None:
            left = request.deadline - time.monotonic()
            expiry = self._loop.call_later(max(left, 0), self._expire, member)
        try:
            return await member.future
        finally:
            if expiry is not None:
                expiry.cancel()
            if member.future.cancelled():
                self._forget(member)

    async def drain(self) -> None:
        """Accept no more requests, and return when all accepted ones are answered."""
        self._closed = True
        await self._drained.wait()
        self._pool.shutdown(wait=False)

    # -------------------------------------------------------------------------------- the queue

    def _dispatch_soon(self) -> None:
        """Dispatch after all requests of this loop iteration have been queued, so that they share a run."""
        if not self._is_dispatching:
            self._is_dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatching = False
        while self._idle and self._waiting:
            batch = self._take()
            if not batch:
                break
            if self._short.include(_bytes(batch)):
                self._work_here(self._idle[-1], batch)
            else:
                self._pool.submit(self._work, self._idle.pop(), batch)
        if not self._waiting and len(self._idle) == self._instances:
            self._drained.set()

    def _take(self) -> list[_Member]:
        """Return the oldest request and those that may share its run, or nothing to wait for more."""
        now = time.monotonic()
        while self._waiting and self._waiting[0].gone(now):
            self._waiting.popleft()
        if not self._waiting:
            return []
        limit = self._settings.max_batch_size
        if not limit:
            return [self._waiting.popleft()]
        first = self._waiting[0]
        batch, rows = [], 0
        for member in self._waiting:
            if member.key == first.key and rows + member.rows <= limit and not member.gone(now):
                batch.append(member)
                rows += member.rows
        if self._should_wait(first, rows, now):
            return []
        if len(batch) == 1:
            self._waiting.popleft()
        else:
            taken = set(map(id, batch))
            self._waiting = deque(member for member in self._waiting if id(member) not in taken)
        return batch

    def _should_wait(self, first: _Member, rows: int, now: float) -> bool:
        """Return whether max_queue_delay_us lets the batch wait for more rows."""
        delay = self._settings.max_queue_delay_us * 1e-6
        enough = max(self._settings.preferred_batch_sizes, default=self._settings.max_batch_size)
        left = first.request.arrived + delay - now
        if not delay or rows >= enough or left <= 0 or self._closed:
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(left, self._timed_out)
        return True

    def _timed_out(self) -> None:
        self._timer = None
        self._dispatch()

    def _expire(self, member: _Member) -> None:
        member.expire()  # regardless of the clock: uvloop's timers fire up to a millisecond early
        self._forget(member)

    def _forget(self, member: _Member) -> None:
        if member in self._waiting:
            self._waiting.remove(member)
            self._dispatch()  # sets `_drained` if this was the last request

    def _overloaded(self) -> ServiceError:
        seconds = len(self._waiting) * self._seconds_per_run / self._instances
        seconds /= max(self._settings.max_batch_size, 1)
        return ServiceError(
            OVERLOADED,
            f"model {self._name} has {len(self._waiting)} requests waiting, its limit: try again later",
            {"Retry-After": str(max(1, math.ceil(seconds)))},
        )

    def _work_here(self, instance: Runner, batch: list[_Member]) -> None:
        started, cpu = time.monotonic(), time.thread_time()
        outcomes = self._outcomes(instance, batch)
        self._short.check(time.thread_time() - cpu)
        self._settle(batch, outcomes, started, time.monotonic() - started)

    # ---------------------------------------------------------------------- a run, in a worker thread

    def _work(self, instance: Runner, batch: list[_Member]) -> None:
        started = time.monotonic()
        outcomes = self._outcomes(instance, batch)
        seconds = time.monotonic() - started
        self._loop.call_soon_threadsafe(self._finish, instance, batch, outcomes, started, seconds)

    def _outcomes(self, instance: Runner, batch: list[_Member]) -> list[_Outcome]:
        with logs.about(**_ids(batch), model=self._name, version=self._version):
            try:
                parts = [member.request.inputs for member in batch]
                found = instance.run(parts, batch[0].outputs)
                if len(batch) == 1:
                    return [found]
                if (split := self._split(found, batch)) is not None:
                    return split
            except Exception as error:
                if len(batch) == 1:
                    return [_as_service_error(error)]
        # One request fails, or the outputs' rows do not match the inputs': run each request alone.
        return [outcome for member in batch for outcome in self._outcomes(instance, [member])]

    def _split(self, found: Mapping[str, np.ndarray], batch: list[_Member]) -> list[_Outcome] | None:
        """Return each member's rows of the outputs; None if an output has a different number of rows."""
        rows = sum(member.rows for member in batch)
        for name, array in found.items():
            if array.ndim == 0 or array.shape[0] != rows:
                if self._splits:
                    self._splits = False
                    _log.warning(
                        "model %s: output %s has shape %s for %d rows, so requests are run one by one. Its "
                        "max_batch_size should be 0",
                        self._name, name, list(array.shape), rows,
                    )  # fmt: skip
                return None
        split: list[_Outcome] = []
        start = 0
        for member in batch:
            split.append({name: array[start : start + member.rows] for name, array in found.items()})
            start += member.rows
        return split

    # -------------------------------------------------------------------------------- back on the loop

    def _finish(
        self, instance: Runner, batch: list[_Member], outcomes: list[_Outcome], started: float, seconds: float
    ) -> None:
        self._idle.append(instance)
        if not any(isinstance(outcome, ServiceError) for outcome in outcomes):  # a failed run may end early
            self._short.learn(_bytes(batch), seconds)
        self._seconds_per_run += (seconds - self._seconds_per_run) * 0.1
        self._dispatch()  # start the next run before these answers are written
        self._settle(batch, outcomes, started, seconds)

    def _settle(self, batch: list[_Member], outcomes: list[_Outcome], started: float, seconds: float) -> None:
        rows = sum(member.rows for member in batch)
        self.on_run(rows, seconds)
        for member, outcome in zip(batch, outcomes, strict=True):
            if member.future.done():  # cancelled or expired
                continue
            if isinstance(outcome, ServiceError):
                member.future.set_exception(outcome)
                continue
            request = member.request
            queued = started - request.arrived
            member.future.set_result(
                Result(self._name, self._version, outcome, request.id, queued, seconds, rows)
            )


def _bytes(batch: Sequence[_Member]) -> int:
    return sum(array.nbytes for member in batch for array in member.request.inputs.values())


def _rows(request: Request) -> int:
    """Return the rows of the first input; 1 without inputs or for a scalar."""
    first = next(iter(request.inputs.values()), None)
    return first.shape[0] if first is not None and first.ndim else 1


def _key(request: Request, outputs: tuple[str, ...]) -> Any:
    """Return a key that requests share if they may share a run: inputs, dtypes, trailing shapes, outputs."""
    return outputs, frozenset((name, array.dtype, array.shape[1:]) for name, array in request.inputs.items())


def _ids(batch: Sequence[_Member]) -> dict[str, Any]:
    """Return the ids for log lines about a run, which happens outside of its requests' tasks."""
    if len(batch) == 1:
        return {"request_id": batch[0].request.id}
    return {"request_ids": [member.request.id for member in batch]}


def _as_service_error(error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    _log.error("a run failed unexpectedly", exc_info=error)
    return ServiceError(RUN_FAILED, "the model could not be run; the server's log says why")
