"""A runner of the tests' own for the batcher, and what the tests of it share."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from twinop.deploy.service.batching import Batcher
from twinop.deploy.service.errors import INVALID, Failure, ServiceError
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.request import Request, Result
from twinop.deploy.service.settings import ModelSettings

Y = ("y",)


class Doubler:
    """Doubles x. Holds each run until the gate opens. A negative number makes the whole run fail.

    Attributes:
        batches: the rows of each member of each run.
    """

    def __init__(self, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.loop_thread = threading.get_ident()
        if not held:
            self.gate.set()

    def run(self, parts: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.batches.append([part["x"].shape[0] for part in parts])
        assert threading.get_ident() != self.loop_thread
        assert self.gate.wait(60)
        x = np.concatenate([part["x"] for part in parts])
        if (x < 0).any():
            raise ServiceError(INVALID, "negative")
        return dict.fromkeys(outputs, x * 2)

    def terminate(self, now: bool = True) -> None: ...


def request(*rows: float, columns: int = 1, **more: Any) -> Request:
    x = np.repeat(np.array(rows, np.float32)[:, None], columns, 1)
    return Request("m", {"x": x}, arrived=time.monotonic(), **more)


def batcher(runner: Any, instances: int = 1, **settings: Any) -> Batcher:
    runners = [runner] * instances
    return Batcher(LoadedModel("m", 1, ModelSettings(**settings), None, runners, []))


async def behind_a_run(runner: Doubler, queue: Batcher, *requests: Request) -> list[Any]:
    """Hold the first request's run until the others wait, and return all results and errors."""
    runner.gate.clear()
    tasks = [asyncio.create_task(queue.submit(each, Y)) for each in requests]
    await until(lambda: queue.queued == len(requests) - 1)
    runner.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def failure_of(outcome: Result | BaseException) -> Failure:
    assert isinstance(outcome, ServiceError), outcome
    return outcome.failure
