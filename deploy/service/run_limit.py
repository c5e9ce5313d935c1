"""End a run that takes longer than run_timeout_seconds, and report one that does not end."""

import asyncio
import time
from collections.abc import Callable

HANGS_AFTER = 5.0  # seconds; ONNX Runtime ends a run after its current node


class RunLimit:
    """Watches a worker thread's runs of one batch, one after the other. `begin` is for that thread.

    Attributes:
        exceeded: a run was told to end.
        seconds: the limit.
    """

    def __init__(self, seconds: float, end: Callable[[], None], hangs: Callable[[], None]) -> None:
        """`end` tells the run to end. `hangs` is called if it has not returned HANGS_AFTER seconds later."""
        self.exceeded = False
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
