"""The batcher with a runner of the test's own: which requests are joined, wait, fail or are dropped."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop

from twinop.deploy.errors import ModelError
from twinop.deploy.service import batching
from twinop.deploy.service.batching import Batcher
from twinop.deploy.service.errors import (
    BROKEN,
    DEADLINE,
    INVALID,
    NOT_READY,
    OUT_OF_MEMORY,
    RUN_FAILED,
    RUN_TOO_LONG,
    Failure,
    ServiceError,
)
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.request import LARGE, Request, Result, in_thread_if_large
from twinop.deploy.service.settings import ModelSettings

Y = ("y",)


class Doubler:
    """Doubles x. Holds each run until the gate opens. A negative number makes the whole run fail.

    Attributes:
        batches: the rows of each member of each run.
        here: whether each run was on the event loop's thread.
    """

    def __init__(self, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.here: list[bool] = []
        self.gate = threading.Event()
        self.loop_thread = threading.get_ident()
        if not held:
            self.gate.set()

    def run(self, parts: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.batches.append([part["x"].shape[0] for part in parts])
        self.here.append(threading.get_ident() == self.loop_thread)
        assert self.gate.wait(60)
        x = np.concatenate([part["x"] for part in parts])
        if (x < 0).any():
            raise ServiceError(INVALID, "negative")
        return dict.fromkeys(outputs, x * 2)

    def terminate(self, now: bool = True) -> None: ...


def request(*rows: float, columns: int = 1, **more: Any) -> Request:
    x = np.repeat(np.array(rows, np.float32)[:, None], columns, 1)
    return Request("m", {"x": x}, arrived=time.monotonic(), **more)


def batcher(runner: Any, instances: int = 1, on_loop: bool = False, **settings: Any) -> Batcher:
    runners = [runner] * instances
    return Batcher(LoadedModel("m", 1, ModelSettings(**settings), None, runners, [], may_run_on_loop=on_loop))


async def behind_a_run(runner: Doubler, queue: Batcher, *requests: Request) -> list[Any]:
    """Hold the first request's run until the others wait, and return all results and errors."""
    runner.gate.clear()
    tasks = [asyncio.create_task(queue.submit(each, Y)) for each in requests]
    await until(lambda: queue.queued == len(requests) - 1)
    runner.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test be a coroutine, which ends within a minute, on the loop that serves."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(asyncio.wait_for(test(**fixtures), 60))

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def failure_of(outcome: Result | BaseException) -> Failure:
    assert isinstance(outcome, ServiceError), outcome
    return outcome.failure


@in_a_loop
async def test_what_arrives_while_the_instance_is_busy_is_joined() -> None:
    runner = Doubler()
    queue, rows = batcher(runner, max_batch_size=8), list[int]()
    queue.on_run = lambda number, seconds: rows.append(number)
    results = await behind_a_run(runner, queue, *[request(1, 2)] * 6)
    assert runner.batches == [[2], [2, 2, 2, 2], [2]]  # 8 rows at most; a lone request runs at once
    assert rows == [2, 8, 2]
    assert all(each.outputs["y"].tolist() == [[2], [4]] for each in results)
    runner = Doubler()
    await behind_a_run(runner, batcher(runner), *[request(1)] * 3)  # without a max_batch_size
    assert runner.batches == [[1], [1], [1]] and not any(runner.here)


@in_a_loop
async def test_runs_as_small_as_a_short_one_are_on_the_loop_s_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives together shares one; after one that took long, all go to the workers."""
    monkeypatch.setattr(batching, "SHORT_SECONDS", 1.0)
    runner = Doubler()
    queue = batcher(runner, on_loop=True, max_batch_size=8, max_queue=1)
    for count in (2, 1, 3, 2):
        await queue.submit(request(*[1] * count), Y)
    await asyncio.gather(*(queue.submit(request(1), Y) for _ in range(3)))
    assert (runner.here, runner.batches[4:]) == ([False, True, False, True, True], [[1, 1, 1]])
    monkeypatch.setattr(batching, "LONG_SECONDS", 0.0)
    for _ in range(2):
        await queue.submit(request(1), Y)
    for more in ({"on_loop": False}, {"on_loop": True, "run_timeout_seconds": 60.0}):
        queue = batcher(runner, **more)
        for _ in range(2):
            await queue.submit(request(1), Y)
    assert runner.here[5:] == [True, False] + [False] * 4


@in_a_loop
async def test_only_like_requests_are_joined_and_the_oldest_goes_first() -> None:
    runner = Doubler(held=True)
    queue = batcher(runner, max_batch_size=8)
    widths = [1, 3, 1, 3, 1]
    tasks = [asyncio.create_task(queue.submit(request(i, columns=w), Y)) for i, w in enumerate(widths)]
    tasks.append(asyncio.create_task(queue.submit(request(9), ("y", "z"))))  # other outputs
    await until(lambda: queue.queued == 5)
    runner.gate.set()
    results = await asyncio.gather(*tasks)
    assert runner.batches == [[1], [1, 1], [1, 1], [1]]
    assert [result.outputs["y"].shape for result in results] == [(1, w) for w in [*widths, 1]]
    assert set(results[-1].outputs) == {"y", "z"}


@in_a_loop
async def test_a_poisoned_request_fails_alone() -> None:
    runner = Doubler()
    requests = [request(i) for i in (1, 2, -3, 4)]
    outcomes = await behind_a_run(runner, batcher(runner, max_batch_size=8), *requests)
    assert failure_of(outcomes.pop(2)) is INVALID
    assert [outcome.outputs["y"].item() for outcome in outcomes] == [2, 4, 8]
    assert runner.batches == [[1], [1, 1, 1], [1], [1], [1]]


@in_a_loop
async def test_outputs_with_other_rows_are_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    class Total(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            found = super().run(parts, outputs)
            return {name: value.sum(keepdims=True) for name, value in found.items()}

    runner = Total()
    queue = batcher(runner, max_batch_size=8)
    requests = [request(i, i) for i in range(3)]
    results = await behind_a_run(runner, queue, *requests)
    assert [result.outputs["y"].item() for result in results] == [0, 4, 8]
    assert runner.batches == [[2], [2, 2], [2], [2]]
    await behind_a_run(runner, queue, *requests)
    assert runner.batches[4:] == [[2], [2], [2]]  # no longer batched
    assert "Set max_batch_size to 0" in caplog.text


@in_a_loop
async def test_a_request_without_inputs_and_a_scalar_have_one_row() -> None:
    class Constant(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            return dict.fromkeys(outputs, np.ones(1))

    queue, rows = batcher(Constant()), list[int]()
    queue.on_run = lambda number, seconds: rows.append(number)
    for inputs in ({}, {"x": np.array(1, np.float32)}):
        await queue.submit(Request("m", inputs, arrived=time.monotonic()), Y)
    assert rows == [1, 1]


@in_a_loop
async def test_a_deadline_ends_the_wait_and_the_run_of_its_client() -> None:
    runner = Doubler(held=True)
    queue = batcher(runner)
    first = queue.submit(request(1, deadline=time.monotonic() + 0.2), Y)  # it runs
    second = queue.submit(request(2, deadline=time.monotonic() + 0.05), Y)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [failure_of(each) for each in outcomes] == [DEADLINE] * 2 and "time was over" in str(outcomes)
    assert queue.queued == 0
    runner.gate.set()
    assert (await queue.submit(request(3), Y)).outputs["y"].item() == 6  # the instance is free again
    assert len(runner.batches) == 2


@in_a_loop
async def test_deadlines_of_any_fraction_are_kept() -> None:
    """uvloop's timers have whole milliseconds and may fire early."""
    runner = Doubler(held=True)
    queue = batcher(runner, max_queue=1000)
    first = asyncio.create_task(queue.submit(request(0), Y))
    await until(lambda: not queue._idle)
    seconds = np.random.default_rng(0).uniform(0.02, 0.3, 100)
    started = time.monotonic()
    waiting = [queue.submit(request(1, deadline=started + s), Y) for s in seconds]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert not queue._idle  # the run is still held
    assert {failure_of(outcome) for outcome in outcomes} == {DEADLINE}
    runner.gate.set()
    await first


@in_a_loop
async def test_cancelled_work_never_runs() -> None:
    runner = Doubler(held=True)
    queue = batcher(runner, max_batch_size=8)
    tasks = [asyncio.create_task(queue.submit(request(i), Y)) for i in range(4)]
    await until(lambda: queue.queued == 3)
    tasks[2].cancel()
    await until(lambda: queue.queued == 2)
    runner.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[2], asyncio.CancelledError)
    assert runner.batches == [[1], [1, 1]]


@in_a_loop
async def test_a_surprise_in_a_run_is_one_message(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            raise RuntimeError("/secret/path")

    with pytest.raises(ServiceError, match="could not be run") as caught:
        await batcher(Broken()).submit(request(1), Y)
    assert caught.value.failure is RUN_FAILED
    assert "secret" not in str(caught.value)
    assert "/secret/path" in caplog.text


@in_a_loop
async def test_a_batch_that_broke_the_gpu_is_not_run_again() -> None:
    class Sticky(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            super().run(parts, outputs)
            raise ServiceError(BROKEN, "the GPU cannot be used any more")

    runner, broken = Sticky(), list[str]()
    queue = batcher(runner, max_batch_size=8)
    queue.on_broken = broken.append
    outcomes = await behind_a_run(runner, queue, *[request(1)] * 3)
    assert [failure_of(each) for each in outcomes] == [BROKEN] * 3
    assert runner.batches == [[1], [1, 1]] and broken == ["the GPU cannot be used any more"] * 3


@in_a_loop
async def test_each_run_of_a_batch_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that fails is run again, request by request: only one that takes too long is ended."""
    monkeypatch.setattr(batching, "HANGS_AFTER", 60.0)

    class Failing(Doubler):
        ended = threading.Event()

        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            if len(parts) > 1 or self.ended.wait(30.0 if parts[0]["x"].min() < 0 else 0.2):
                raise ValueError
            return super().run(parts, outputs)

        def terminate(self, now: bool = True) -> None:
            self.ended.set() if now else self.ended.clear()

    queue = batcher(Failing(), max_batch_size=16, run_timeout_seconds=1)
    first = asyncio.create_task(queue.submit(request(0), Y))
    asked = [queue.submit(request(value), Y) for value in range(1, 8)]
    assert len(await asyncio.gather(first, *asked)) == 8
    with pytest.raises(ServiceError) as caught:
        await queue.submit(request(-1), Y)
    assert caught.value.failure is RUN_TOO_LONG
    assert (await queue.submit(request(1), Y)).outputs["y"] == 2


@in_a_loop
async def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is an error of the load: a request would wait forever."""
    start, refused = threading.Thread.start, [True, False]

    def limited(self: threading.Thread) -> None:
        if refused.pop():
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ModelError, match="m: can't start new thread, of 3"):
        batcher(Doubler(), instances=3)


def test_large_work_is_done_in_a_thread() -> None:
    """Others are answered beside it."""
    here = threading.get_ident()
    assert asyncio.run(in_thread_if_large(LARGE, threading.get_ident)) == here
    assert asyncio.run(in_thread_if_large(LARGE + 1, threading.get_ident)) != here


def test_work_on_a_request_that_takes_too_much_memory() -> None:
    def work() -> None:
        raise MemoryError

    for size in (0, LARGE + 1):
        with pytest.raises(ServiceError, match="not enough memory for this request") as caught:
            asyncio.run(in_thread_if_large(size, work))
        assert caught.value.failure is OUT_OF_MEMORY


@in_a_loop
async def test_draining_answers_what_was_accepted_and_takes_no_more() -> None:
    await batcher(Doubler()).drain()  # an idle one ends at once
    runner = Doubler(held=True)
    queue = batcher(runner)
    tasks = [asyncio.create_task(queue.submit(request(i), Y)) for i in range(3)]
    await until(lambda: queue.queued == 2)
    draining = asyncio.create_task(queue.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    with pytest.raises(ServiceError) as caught:
        await queue.submit(request(9), Y)
    assert caught.value.failure is NOT_READY
    tasks.pop().cancel()
    runner.gate.set()
    assert len(await asyncio.gather(*tasks)) == 2
    await draining
