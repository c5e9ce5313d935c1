"""The limits of requests and runs: the memory of requests, and the time of a run."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import OVER_BUDGET, TOO_LARGE, ServiceError
from .request import LARGE

HANGS_AFTER = 5.0  # seconds; ONNX Runtime ends a run after its current node


@dataclass(frozen=True)
class Limit:
    """The largest request, or the largest JSON in one. The other fields are for the message."""

    bytes: int
    setting: str = "max_request_bytes"
    what: str = "request"
    advice: str = ""

    def exceeded(self) -> ServiceError:
        said = f"the {self.what} is larger than {self.bytes} bytes ({self.setting}){self.advice}"
        return ServiceError(TOO_LARGE, said)


class Budget:
    """The bytes of all requests that are being read or answered. An eighth is kept for small requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0


class RequestMemory:
    """The memory of one request, which announces its bytes. As a context manager it gives all of it back."""

    def __init__(self, budget: Budget, announced: int = 0) -> None:
        self._budget = budget
        self._announced = announced
        self._bytes = 0

    def reserve(self, size: int) -> None:
        """Count bytes before they are kept, or give some back; raise ServiceError if too few are left."""
        budget = self._budget
        is_small = max(self._announced, self._bytes + size) <= LARGE
        most = budget.most if is_small else budget.most - budget.most // 8
        if size > 0 and budget.used + size > most:
            raise ServiceError(
                OVER_BUDGET,
                f"the requests in flight hold {budget.used} of {budget.most} bytes (max_bytes_in_flight), "
                "which leaves too few for this one: try again later",
                {"Retry-After": "1"},
            )
        self.record(size)

    def record(self, size: int) -> None:
        """Count bytes that exist already, such as an answer."""
        self._bytes += size
        self._budget.used += size

    def __enter__(self) -> "RequestMemory":
        return self

    def __exit__(self, *_: Any) -> None:
        self.record(-self._bytes)


class RunLimit:
    """Watches a worker thread's runs of one batch, one after the other. `begin` is for that thread."""

    def __init__(self, seconds: float, end: Callable[[], None], hangs: Callable[[], None]) -> None:
        """`end` tells the run to end. `hangs` is called if it has not returned HANGS_AFTER seconds later."""
        self.exceeded = False  # a run was told to end
        self.seconds = seconds
        self._end, self._hangs = end, hangs
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._check)
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left = self._began + self.seconds - time.monotonic()
        if left > 0:  # another run has begun since, or uvloop's timer fired early
            self._timer = self._loop.call_later(max(left, 0.001), self._check)
            return
        self.exceeded = True
        self._end()
        self._timer = self._loop.call_later(HANGS_AFTER, self._hangs)
