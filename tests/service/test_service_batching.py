"""The batcher with a runner of the test's own: which requests are joined, wait, fail or are dropped."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import uvloop
from service_batches import Doubler, batcher, failure_of, request, run, until

from twinop.deploy.service.errors import (
    DEADLINE,
    INVALID,
    NOT_READY,
    OVERLOADED,
    RUN_FAILED,
    ServiceError,
)
from twinop.deploy.service.request import Request, Result


def test_a_lone_request_runs_at_once() -> None:
    async def test() -> None:
        runner = Doubler()
        result = await batcher(runner, max_batch_size=8).submit(request(1, 2), ("y",))
        assert result.outputs["y"].tolist() == [[2], [4]]
        assert result.batch_size == 2

    run(test)


def test_what_arrives_while_the_instance_is_busy_is_joined() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_batch_size=8)
        tasks = [asyncio.create_task(queue.submit(request(i, i), ("y",))) for i in range(6)]
        await until(lambda: queue.queued == 5)
        runner.gate.set()
        results = await asyncio.gather(*tasks)
        assert runner.batches == [[2], [2, 2, 2, 2], [2]]  # 8 rows at most
        for i, result in enumerate(results):
            assert result.outputs["y"].tolist() == [[2 * i], [2 * i]]

    run(test)


def test_without_a_max_batch_size_nothing_is_joined() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(3)]
        await until(lambda: queue.queued == 2)
        runner.gate.set()
        await asyncio.gather(*tasks)
        assert runner.batches == [[1], [1], [1]]

    run(test)


def test_only_like_requests_are_joined_and_the_oldest_goes_first() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_batch_size=8)
        widths = [1, 3, 1, 3, 1]
        tasks = [
            asyncio.create_task(queue.submit(request(i, columns=w), ("y",))) for i, w in enumerate(widths)
        ]
        tasks.append(asyncio.create_task(queue.submit(request(9), ("y", "z"))))  # other outputs
        await until(lambda: queue.queued == 5)
        runner.gate.set()
        results = await asyncio.gather(*tasks)
        assert runner.batches == [[1], [1, 1], [1, 1], [1]]
        assert [result.outputs["y"].shape for result in results] == [(1, w) for w in [*widths, 1]]
        assert set(results[-1].outputs) == {"y", "z"}

    run(test)


def test_several_instances_run_side_by_side() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, instances=3)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(3)]
        await until(lambda: len(runner.batches) == 3)
        assert queue.running == 3
        runner.gate.set()
        await asyncio.gather(*tasks)
        assert queue.running == 0

    run(test)


def test_a_poisoned_request_fails_alone() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_batch_size=8)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in (1, 2, -3, 4)]
        await until(lambda: queue.queued == 3)
        runner.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert failure_of(outcomes[2]) is INVALID
        good = [outcome.outputs["y"].item() for outcome in outcomes if isinstance(outcome, Result)]
        assert good == [2, 4, 8]
        assert runner.batches == [[1], [1, 1, 1], [1], [1], [1]]

    run(test)


def test_outputs_with_other_rows_are_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    class Total(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            found = super().run(parts, outputs)
            return {name: value.sum(keepdims=True) for name, value in found.items()}

    async def test() -> None:
        runner = Total(held=True)
        queue = batcher(runner, max_batch_size=8)
        tasks = [asyncio.create_task(queue.submit(request(i, i), ("y",))) for i in range(3)]
        await until(lambda: queue.queued == 2)
        runner.gate.set()
        results = await asyncio.gather(*tasks)
        assert [result.outputs["y"].item() for result in results] == [0, 4, 8]
        assert runner.batches == [[2], [2, 2], [2], [2]]
        runner.gate.clear()
        tasks = [asyncio.create_task(queue.submit(request(i, i), ("y",))) for i in range(3)]
        await until(lambda: queue.queued == 2)
        runner.gate.set()
        await asyncio.gather(*tasks)
        assert runner.batches[4:] == [[2], [2], [2]]  # no longer joined

    run(test)
    assert "max_batch_size should be 0" in caplog.text


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_queue=2)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(3)]
        await until(lambda: queue.queued == 2)
        with pytest.raises(ServiceError, match="2 requests waiting, its limit") as caught:
            await queue.submit(request(9), ("y",))
        assert caught.value.failure is OVERLOADED
        assert int(caught.value.headers["Retry-After"]) >= 1
        runner.gate.set()
        await asyncio.gather(*tasks)

    run(test)


def test_a_deadline_ends_the_wait_and_the_work_is_dropped() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner)
        first = asyncio.create_task(queue.submit(request(1), ("y",)))
        await until(lambda: queue.running == 1)
        with pytest.raises(ServiceError, match="time was over") as caught:
            await queue.submit(request(2, deadline=time.monotonic() + 0.05), ("y",))
        assert caught.value.failure is DEADLINE
        assert queue.queued == 0
        runner.gate.set()
        await first
        assert len(runner.batches) == 1

    run(test)


def test_a_deadline_ends_a_run_for_its_client() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner)
        with pytest.raises(ServiceError) as caught:
            await queue.submit(request(1, deadline=time.monotonic() + 0.05), ("y",))
        assert caught.value.failure is DEADLINE
        runner.gate.set()
        assert (await queue.submit(request(2), ("y",))).outputs["y"].item() == 4  # the instance is free again

    run(test)


def test_cancelled_work_never_runs() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_batch_size=8)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(4)]
        await until(lambda: queue.queued == 3)
        tasks[2].cancel()
        await until(lambda: queue.queued == 2)
        runner.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[2], asyncio.CancelledError)
        assert runner.batches == [[1], [1, 1]]

    run(test)


def test_draining_answers_what_was_accepted_and_takes_no_more() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(3)]
        await until(lambda: queue.queued == 2)
        draining = asyncio.create_task(queue.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        with pytest.raises(ServiceError) as caught:
            await queue.submit(request(9), ("y",))
        assert caught.value.failure is NOT_READY
        runner.gate.set()
        assert len(await asyncio.gather(*tasks)) == 3
        await draining

    run(test)


def test_draining_an_idle_batcher_ends_at_once() -> None:
    async def test() -> None:
        await batcher(Doubler()).drain()

    run(test)


def test_draining_ends_when_the_last_waiter_is_cancelled() -> None:
    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(2)]
        await until(lambda: queue.queued == 1)
        draining = asyncio.create_task(queue.drain())
        tasks[1].cancel()
        runner.gate.set()
        await draining

    run(test)


def test_a_surprise_in_a_run_is_one_message(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Doubler):
        def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
            raise RuntimeError("/secret/path")

    async def test() -> None:
        with pytest.raises(ServiceError, match="could not be run") as caught:
            await batcher(Broken()).submit(request(1), ("y",))
        assert caught.value.failure is RUN_FAILED
        assert "secret" not in str(caught.value)

    run(test)
    assert "/secret/path" in caplog.text


def test_deadlines_of_any_fraction_are_kept_on_the_loop_that_serves() -> None:
    """uvloop's timers have whole milliseconds and may fire early."""

    async def test() -> None:
        runner = Doubler(held=True)
        queue = batcher(runner, max_queue=1000)
        first = asyncio.create_task(queue.submit(request(0), ("y",)))
        await until(lambda: queue.running == 1)
        seconds = np.random.default_rng(0).uniform(0.02, 0.3, 100)
        started = time.monotonic()
        waiting = [queue.submit(request(1, deadline=started + s), ("y",)) for s in seconds]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert queue.running == 1  # the run is still held
        assert {failure_of(outcome) for outcome in outcomes} == {DEADLINE}
        runner.gate.set()
        await first

    uvloop.run(asyncio.wait_for(test(), 60))


def test_a_request_without_inputs_and_a_scalar_have_one_row() -> None:
    async def test() -> None:
        class Constant(Doubler):
            def run(self, parts: Any, outputs: Any) -> dict[str, np.ndarray]:
                return dict.fromkeys(outputs, np.ones(1))

        queue = batcher(Constant())
        for inputs in ({}, {"x": np.array(1, np.float32)}):
            result = await queue.submit(Request("m", inputs, arrived=time.monotonic()), ("y",))
            assert result.batch_size == 1

    run(test)
