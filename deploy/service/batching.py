"""Queue and run the requests of one model version, joining those that arrive while all instances are busy.

An idle instance runs a request at once. Requests that arrive while every instance is busy are joined into the
next run: a lone request waits for nothing, and a busy server gets the largest batches. A run that takes less
time than handing it to a worker thread happens on the event loop's thread.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import ModelError
from . import logs
from .errors import BROKEN, DEADLINE, NOT_READY, OVERLOADED, RUN_FAILED, RUN_TOO_LONG, ServiceError
from .instance import Instance, LoadedModel
from .request import Request, Result

_log = logging.getLogger(__name__)

HANGS_AFTER = 5.0  # seconds; ONNX Runtime ends a run after its current node
SHORT_SECONDS = 50e-6  # about what handing a run to a thread and back costs
LONG_SECONDS = 10e-3  # of processor time; a longer run must not block the event loop
Outcome = dict[str, np.ndarray] | ServiceError


class QueuedRequest:
    """A request that waits or runs. Requests with equal keys may share a run."""

    def __init__(self, request: Request, outputs: tuple[str, ...], future: asyncio.Future[Result]) -> None:
        self.request, self.outputs, self.future = request, outputs, future
        inputs = request.inputs
        first = next(iter(inputs.values()), None)
        self.rows = first.shape[0] if first is not None and first.ndim else 1
        self.key = outputs, frozenset((name, each.dtype, each.shape[1:]) for name, each in inputs.items())

    def is_abandoned(self, now: float) -> bool:
        """Return whether nobody waits for the answer any more."""
        deadline = self.request.deadline
        if deadline is not None and now >= deadline:
            self.expire()
        return self.future.done()

    def expire(self) -> None:
        self.fail(ServiceError(DEADLINE, "the request's time was over before it was answered"))

    def fail(self, error: ServiceError) -> None:
        """Answer with an error, unless the request is answered or cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


Batch = Sequence[QueuedRequest]


def _split(found: Mapping[str, np.ndarray], batch: Batch) -> list[Outcome]:
    """Return each member's rows of the outputs."""
    split: list[Outcome] = []
    start = 0
    for member in batch:
        split.append({name: array[start : start + member.rows] for name, array in found.items()})
        start += member.rows
    return split


class Run:
    """A batch on an instance, run at once or one request after the other, each for a limited time.

    `begin` is for the worker's thread. `exceeded`: a run was told to end.
    """

    def __init__(
        self, instance: Instance, batch: Batch, seconds: float | None, hangs: Callable[[Batch], None]
    ) -> None:
        """`hangs` is called if a run has not returned HANGS_AFTER seconds after it was told to end."""
        self.instance, self.batch, self.seconds, self.exceeded = instance, batch, seconds, False
        self.bytes = sum(array.nbytes for member in batch for array in member.request.inputs.values())
        self._hangs, self._began = hangs, time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._check, seconds)

    def begin(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.exceeded:
            self.instance.terminate(False)

    def _check(self, seconds: float) -> None:
        loop, left = asyncio.get_running_loop(), self._began + seconds - time.monotonic()
        if left > 0:  # another run has begun since, or uvloop's timer fired early
            self._timer = loop.call_later(max(left, 0.001), self._check, seconds)
            return
        self.exceeded = True
        self.instance.terminate()
        self._timer = loop.call_later(HANGS_AFTER, self._hangs, self.batch)


class Batcher:
    """The queue and the instances of one version. Call its methods on the event loop's thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        """ModelError: its threads cannot be started."""
        self._name, self._version, self._settings = loaded.name, loaded.version, loaded.settings
        self._loop = asyncio.get_running_loop()
        self._idle, self._instances = list(loaded.instances), len(loaded.instances)
        self._waiting: deque[QueuedRequest] = deque()
        self._rows_independent = loaded.rows_independent  # requests may share a run
        self._may_run_here = loaded.may_run_on_loop and self._settings.run_timeout_seconds is None
        self._short_bytes = -1  # of inputs: a run of no more was short
        self._pool = ThreadPoolExecutor(self._instances, f"{self._name}-{self._version}")
        all_started = threading.Barrier(self._instances)
        try:  # now: a request must not wait for a thread that cannot be started
            for _ in range(self._instances):
                self._pool.submit(all_started.wait)
        except RuntimeError as error:
            all_started.abort()
            raise ModelError(f"{self._name}: {error}, of {self._instances}: allow more, or memory") from error
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self.on_run: Callable[[int, float], None] = lambda rows, seconds: None
        self.on_broken: Callable[[str], None] = lambda why: None  # nothing more can be run in this process

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def submit(self, request: Request, outputs: tuple[str, ...]) -> Result:
        """Queue a request that fits the model, and wait for its answer.

        Cancelling the caller drops the request unless it has started to run.
        """
        if self._closed:
            raise ServiceError(NOT_READY, f"version {self._version} of model {self._name} is being unloaded")
        if len(self._waiting) >= self._settings.max_queue and not self._idle:
            raise ServiceError(
                OVERLOADED,
                f"model {self._name} has {len(self._waiting)} requests waiting, its limit: try again later",
                {"Retry-After": "1"},
            )
        member = QueuedRequest(request, outputs, self._loop.create_future())
        self._waiting.append(member)
        self._drained.clear()
        if self._short_bytes < 0:
            self._dispatch()
        else:  # then what arrived together shares a run
            self._loop.call_soon(self._dispatch)
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

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            batch = self._take()
            if not batch:
                break
            run = Run(self._idle.pop(), batch, self._settings.run_timeout_seconds, self._hangs)
            if run.bytes <= self._short_bytes:
                began = time.thread_time()
                self._work(run, self._loop.call_soon)
                if time.thread_time() - began > LONG_SECONDS:  # its time depends on more than the size
                    self._may_run_here, self._short_bytes = False, -1
            else:
                self._pool.submit(self._work, run, self._loop.call_soon_threadsafe)
        if not self._waiting and len(self._idle) == self._instances:
            self._drained.set()

    def _hangs(self, batch: Batch) -> None:
        """Answer all requests with an error, because a run does not end."""
        self._closed = True
        why = f"a run of model {self._name} does not end after run_timeout_seconds"
        for member in (*batch, *self._waiting):
            member.fail(ServiceError(BROKEN, why))
        self._waiting.clear()
        self._drained.set()
        self.on_broken(why)

    def _take(self) -> Batch:
        """Remove the oldest request from the queue, and those that may share its run."""
        now = time.monotonic()
        while self._waiting and self._waiting[0].is_abandoned(now):
            self._waiting.popleft()
        if not self._waiting:
            return []
        first, limit = self._waiting.popleft(), self._settings.max_batch_size
        batch, rows, rest = [first], first.rows, deque[QueuedRequest]()
        if not limit or not self._rows_independent:
            return batch
        for member in self._waiting:
            if member.key == first.key and rows + member.rows <= limit and not member.is_abandoned(now):
                batch.append(member)
                rows += member.rows
            else:
                rest.append(member)
        self._waiting = rest
        return batch

    def _expire(self, member: QueuedRequest) -> None:
        member.expire()  # regardless of the clock: uvloop's timers fire up to a millisecond early
        self._forget(member)

    def _forget(self, member: QueuedRequest) -> None:
        if member in self._waiting:
            self._waiting.remove(member)
            self._dispatch()  # sets `_drained` if this was the last request

    # ------------------------------------------------- a run, in a worker thread or the event loop's

    def _work(self, run: Run, call: Callable[..., object]) -> None:
        started = time.monotonic()
        outcomes = self._run(run, run.batch)
        seconds = time.monotonic() - started
        call(self._finish, run, outcomes, started, seconds)

    def _run(self, run: Run, batch: Batch) -> list[Outcome]:
        """Return the outputs of each request, or its error."""
        ids = [member.request.id for member in batch]
        about = {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}
        with logs.about(**about, model=self._name, version=self._version):
            run.begin()
            try:
                found = run.instance.run([member.request.inputs for member in batch], batch[0].outputs)
                if len(batch) == 1:
                    return [found]
                if self._has_all_rows(found, batch):
                    return _split(found, batch)
            except Exception as error:
                failure = self._failure(error, run)
                if len(batch) == 1 or failure.failure in (BROKEN, RUN_TOO_LONG):
                    return [failure] * len(batch)
        # One request fails, or the outputs' rows do not match the inputs': run each request alone.
        return [outcome for member in batch for outcome in self._run(run, [member])]

    def _failure(self, error: Exception, run: Run) -> ServiceError:
        if run.exceeded:
            _log.error("a run took longer than run_timeout_seconds (%g), and was ended", run.seconds)
            return ServiceError(RUN_TOO_LONG, f"the run took longer than this model's {run.seconds:g} s")
        if isinstance(error, ServiceError):
            return error
        _log.error("a run failed unexpectedly", exc_info=error)
        return ServiceError(RUN_FAILED, "the model could not be run; the server's log says why")

    def _has_all_rows(self, found: Mapping[str, np.ndarray], batch: Batch) -> bool:
        rows = sum(member.rows for member in batch)
        for name, array in found.items():
            if array.shape[:1] != (rows,):
                if self._rows_independent:
                    self._rows_independent = False
                    _log.warning(
                        "model %s: output %s has shape %s for %d rows, so requests are no longer "
                        "batched. Set max_batch_size to 0",
                        self._name, name, list(array.shape), rows,
                    )  # fmt: skip
                return False
        return True

    # -------------------------------------------------------------------------------- back on the loop

    def _finish(self, run: Run, outcomes: list[Outcome], started: float, seconds: float) -> None:
        run.stop()
        self._idle.append(run.instance)
        for outcome in outcomes:
            if isinstance(outcome, ServiceError) and outcome.failure is BROKEN:
                self.on_broken(str(outcome))
        self._dispatch()  # start the next run before these answers are written
        if self._may_run_here and seconds < SHORT_SECONDS and isinstance(outcomes[0], dict):
            self._short_bytes = max(self._short_bytes, run.bytes)
        rows = sum(member.rows for member in run.batch)
        self.on_run(rows, seconds)
        for member, outcome in zip(run.batch, outcomes, strict=True):
            if isinstance(outcome, ServiceError):
                member.fail(outcome)
            elif not member.future.done():  # neither cancelled nor expired
                queued = started - member.request.arrived
                member.future.set_result(Result(self._name, self._version, outcome, queued))
