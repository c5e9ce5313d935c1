"""Short runs happen on the event loop's thread, all others in a worker thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_models
from service_loads import loaded

from twinop.deploy.service import short_runs
from twinop.deploy.service.batching import Batcher
from twinop.deploy.service.errors import DEADLINE, INVALID, ServiceError
from twinop.deploy.service.instance import Instance
from twinop.deploy.service.model_settings import ModelSettings
from twinop.deploy.service.request import Request
from twinop.deploy.service.served import ServedVersion


class Noting:
    """Doubles x, spends `seconds` of processor time, and records which runs were on the loop's thread."""

    def __init__(self) -> None:
        self.loop_thread = threading.get_ident()
        self.here: list[bool] = []
        self.batches: list[int] = []  # the number of requests in each run
        self.seconds = 0.0

    def run(self, parts: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.here.append(threading.get_ident() == self.loop_thread)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.batches.append(len(parts))
        x = np.concatenate([part["x"] for part in parts])
        if x.min() < 0:
            raise ServiceError(INVALID, "negative")
        return dict.fromkeys(outputs, x * 2)

    def terminate(self, now: bool = True) -> None: ...


def request(value: float = 1, rows: int = 1, **more: Any) -> Request:
    return Request("m", {"x": np.full((rows, 4), value, np.float32)}, arrived=time.monotonic(), **more)


def batcher(runner: Noting, may_run_on_loop: bool = True, **settings: Any) -> Batcher:
    return Batcher("m", 1, [runner], ModelSettings(**settings), may_run_on_loop=may_run_on_loop)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def ask(queue: Batcher, count: int = 1, **of: Any) -> None:
    for _ in range(count):
        result = await queue.submit(request(**of), ("y",))
        assert result.outputs["y"].tolist() == [[2] * 4] * of.get("rows", 1)


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit: on a busy machine NumPy's doubling may take longer than SHORT_SECONDS."""
    monkeypatch.setattr(short_runs, "SHORT_SECONDS", 1.0)


def test_after_a_short_run_no_thread_is_asked() -> None:
    async def test() -> None:
        runner, runs = Noting(), []
        queue = batcher(runner)
        queue.on_run = lambda rows, seconds: runs.append(rows)
        await ask(queue, 3)
        assert runner.here == [False, True, True] and runs == [1, 1, 1]
        await queue.drain()

    run(test)


def test_a_larger_request_goes_to_the_thread_until_it_was_short() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner)
        await ask(queue, 2, rows=2)
        await ask(queue, 2, rows=3)
        await ask(queue, rows=1)
        assert runner.here == [False, True, False, True, True]

    run(test)


def test_what_comes_together_shares_a_run_here_too() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner, max_batch_size=8)
        await ask(queue, rows=4)
        await asyncio.gather(*(ask(queue) for _ in range(3)))
        assert (runner.here, runner.batches) == ([False, True], [1, 3])
        await asyncio.gather(*(ask(queue, rows=2) for _ in range(3)))  # too large when joined
        assert (runner.here[2:], runner.batches[2:]) == ([False], [3])
        await asyncio.gather(*(ask(queue, rows=2) for _ in range(3)))
        assert (runner.here[3:], runner.batches[3:]) == ([True], [3])

    run(test)


def test_of_those_that_come_together_one_at_fault_fails_alone() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner, max_batch_size=8)
        await ask(queue, rows=4)
        outcomes = await asyncio.gather(
            ask(queue), queue.submit(request(-1), ("y",)), ask(queue), return_exceptions=True
        )
        assert [isinstance(outcome, ServiceError) for outcome in outcomes] == [False, True, False]
        assert runner.here == [False] + [True] * 4 and queue.running == queue.queued == 0
        await queue.drain()

    run(test)


@pytest.mark.parametrize(
    "settings",
    [
        {"may_run_on_loop": False},
        {"max_batch_size": 8, "max_queue_delay_us": 1},
        {"run_timeout_seconds": 60.0},
    ],
)
def test_on_a_gpu_and_where_runs_wait_or_are_watched_none_is_made_here(settings: dict[str, Any]) -> None:
    async def test() -> None:
        runner = Noting()
        await ask(batcher(runner, **settings), 3)
        assert runner.here == [False] * 3

    run(test)


def test_runs_that_are_not_short_go_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "SHORT_SECONDS", 0.0)

    async def test() -> None:
        runner = Noting()
        await ask(batcher(runner), 3)
        assert runner.here == [False] * 3

    run(test)


def test_a_model_that_blocked_the_loop_once_never_does_again() -> None:
    """For example a model with a loop whose length is in the request."""

    async def test() -> None:
        runner = Noting()
        queue = batcher(runner)
        await ask(queue, 2)
        runner.seconds = 2 * short_runs.LONG_SECONDS
        await ask(queue)
        runner.seconds = 0.0
        await ask(queue, 3)
        assert runner.here == [False, True, True, False, False, False]

    run(test)


@pytest.mark.parametrize(
    ("model", "settings", "here"),
    [
        (service_models.relu(), {}, False),
        (service_models.relu(), {"run_on_event_loop": True}, True),
        (service_models.identity("FP32"), {}, True),
    ],
)
def test_custom_ops_run_here_only_if_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, settings: dict[str, Any], here: bool
) -> None:
    threads = []
    run_instance = Instance.run

    def noted(self: Instance, *arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return run_instance(self, *arguments)

    ready = loaded(tmp_path, model, **settings)
    monkeypatch.setattr(Instance, "run", noted)

    async def test() -> None:
        version = ServedVersion(ready, lambda why: None)
        for _ in range(3):
            asked = request()
            await version.batcher.submit(asked, version.check(asked))
        assert [each == threading.get_ident() for each in threads] == [False, here, here]
        await version.batcher.drain()

    run(test)


def test_a_failure_here_is_that_requests_alone() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner)
        await ask(queue)
        with pytest.raises(ServiceError, match="negative"):
            await queue.submit(request(-1), ("y",))
        await ask(queue)
        assert runner.here == [False, True, True]

    run(test)


def test_nothing_is_learnt_from_a_failure() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner)
        with pytest.raises(ServiceError, match="negative"):
            await queue.submit(request(-1, rows=9), ("y",))
        await ask(queue)
        assert runner.here == [False, False]

    run(test)


def test_a_request_whose_time_is_over_is_not_run() -> None:
    async def test() -> None:
        runner = Noting()
        queue = batcher(runner)
        await ask(queue)
        with pytest.raises(ServiceError, match="time was over") as caught:
            await queue.submit(request(deadline=time.monotonic() - 1), ("y",))
        assert caught.value.failure is DEADLINE and runner.here == [False]

    run(test)
