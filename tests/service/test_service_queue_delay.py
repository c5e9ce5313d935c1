"""An idle instance waits for more rows with max_queue_delay_us, and for that alone."""

import asyncio
import time

from service_batches import Doubler, batcher, request, run


def test_a_queue_delay_waits_for_the_preferred_size_and_no_longer() -> None:
    async def test() -> None:
        runner = Doubler()
        queue = batcher(runner, max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay_us=5_000_000)
        tasks = [asyncio.create_task(queue.submit(request(i), ("y",))) for i in range(4)]
        await asyncio.gather(*tasks)
        assert runner.batches == [[1, 1, 1, 1]]
        queue = batcher(runner, max_batch_size=8, max_queue_delay_us=50_000)
        started = time.monotonic()
        await queue.submit(request(1), ("y",))
        assert time.monotonic() - started >= 0.05

    run(test)


def test_requests_of_another_shape_do_not_wait_for_the_first_ones_company() -> None:
    async def test() -> None:
        runner = Doubler()
        queue = batcher(runner, max_batch_size=2, max_queue_delay_us=60_000_000)
        first = asyncio.create_task(queue.submit(request(1), ("y",)))
        others = [queue.submit(request(i, columns=3), ("y",)) for i in (2, 3)]
        await asyncio.gather(*others)
        assert runner.batches == [[1, 1]] and not first.done()
        await queue.submit(request(4), ("y",))
        assert (await first).outputs["y"].item() == 2 and runner.batches == [[1, 1], [1, 1]]

    run(test)
