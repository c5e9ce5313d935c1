"""Short runs happen on the event loop's thread, all others in a worker thread."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_models
from service_batches import Doubler, Y, batcher, failure_of, request, run
from service_loads import loaded

from twinop.deploy.service import limits
from twinop.deploy.service.batching import Batcher
from twinop.deploy.service.errors import DEADLINE, INVALID
from twinop.deploy.service.instance import Instance
from twinop.deploy.service.request import Request
from twinop.deploy.service.version import ServedVersion


async def ask(queue: Batcher, *rows: int) -> None:
    """Send a request for each number of rows, one after the other."""
    for count in rows:
        result = await queue.submit(request(*[1] * count), Y)
        assert result.outputs["y"].tolist() == [[2]] * count


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit: on a busy machine NumPy's doubling may take longer than SHORT_SECONDS."""
    monkeypatch.setattr(limits, "SHORT_SECONDS", 1.0)


def test_after_a_short_run_none_that_is_no_larger_is_handed_to_a_thread() -> None:
    async def test() -> None:
        runner, runs = Doubler(), []
        queue = batcher(runner, may_run_on_loop=True)
        queue.on_run = lambda rows, seconds: runs.append(rows)
        await ask(queue, 2, 2, 3, 3, 1)
        assert runner.here == [False, True, False, True, True] and runs == [2, 2, 3, 3, 1]
        await queue.drain()

    run(test)


def test_what_comes_together_shares_a_run_here_too() -> None:
    async def test() -> None:
        runner = Doubler()
        queue = batcher(runner, may_run_on_loop=True, max_batch_size=8)
        await ask(queue, 4)
        await asyncio.gather(*(ask(queue, 1) for _ in range(3)))
        assert (runner.here, runner.batches) == ([False, True], [[4], [1, 1, 1]])
        await asyncio.gather(*(ask(queue, 2) for _ in range(3)))  # too large when joined
        assert (runner.here[2:], runner.batches[2:]) == ([False], [[2, 2, 2]])
        asked = [queue.submit(request(value), Y) for value in (1, -1, 1)]
        outcomes: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        assert failure_of(outcomes[1]) is INVALID and outcomes[2].outputs["y"].item() == 2
        assert runner.here[3:] == [True] * 4  # together, then each alone

    run(test)


@pytest.mark.parametrize(
    "settings",
    [
        {"may_run_on_loop": False},
        {"may_run_on_loop": True, "run_timeout_seconds": 60.0},
    ],
)
def test_on_a_gpu_and_where_runs_wait_or_are_watched_none_is_made_here(settings: dict[str, Any]) -> None:
    async def test() -> None:
        runner = Doubler()
        await ask(batcher(runner, **settings), 1, 1, 1)
        assert runner.here == [False] * 3

    run(test)


def test_runs_that_are_not_short_go_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHORT_SECONDS", 0.0)

    async def test() -> None:
        runner = Doubler()
        await ask(batcher(runner, may_run_on_loop=True), 1, 1, 1)
        assert runner.here == [False] * 3

    run(test)


def test_a_model_that_blocked_the_loop_once_never_does_again() -> None:
    """For example a model with a loop whose length is in the request."""

    async def test() -> None:
        runner = Doubler()
        queue = batcher(runner, may_run_on_loop=True)
        await ask(queue, 1, 1)
        runner.seconds = 2 * limits.LONG_SECONDS
        await ask(queue, 1)
        runner.seconds = 0.0
        await ask(queue, 1, 1, 1)
        assert runner.here == [False, True, True, False, False, False]

    run(test)


def test_nothing_is_learnt_from_a_failure_and_what_is_late_is_not_run() -> None:
    async def test() -> None:
        runner = Doubler()
        queue = batcher(runner, may_run_on_loop=True)
        for asked, failure in (
            (request(*[-1] * 9), INVALID),
            (request(1), None),
            (request(-1), INVALID),
            (request(1, deadline=time.monotonic() - 1), DEADLINE),
        ):
            [outcome] = await asyncio.gather(queue.submit(asked, Y), return_exceptions=True)
            assert failure is None or failure_of(outcome) is failure
        assert runner.here == [False, False, True]

    run(test)


@pytest.mark.parametrize(
    ("model", "here"), [(service_models.relu(), False), (service_models.identity("FP32"), True)]
)
def test_custom_ops_do_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, here: bool
) -> None:
    threads = []
    run_instance = Instance.run

    def noted(self: Instance, *arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return run_instance(self, *arguments)

    ready = loaded(tmp_path, model)
    monkeypatch.setattr(Instance, "run", noted)

    async def test() -> None:
        version = ServedVersion(ready, lambda why: None)
        for _ in range(3):
            asked = Request("m", {"x": np.ones((1, 4), np.float32)}, arrived=time.monotonic())
            await version.batcher.submit(asked, version.check(asked))
        assert [each == threading.get_ident() for each in threads] == [False, here, here]
        await version.batcher.drain()

    run(test)
