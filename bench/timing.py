"""Timing several runs against each other: in turn, so that all see the same clocks and neighbours."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], object]

_FLUSH_BYTES = (
    1 << 30
)  # read and set in 0.6 ms: longer than any host needs to queue a run, and larger than any L2


@dataclass(frozen=True)
class Time:
    """Of one run, in seconds. Nine of ten runs took longer than `low`.

    `host`: of device times, what queueing a run took the host; as `low`, for a full queue makes it wait.
    """

    median: float
    low: float
    runs: int
    host: float | None = None

    @classmethod
    def of(cls, samples: list[float], host: list[float] | None = None) -> "Time":
        ordered = sorted(samples)
        queueing = sorted(host)[len(host) // 10] if host else None
        return cls(statistics.median(ordered), ordered[len(ordered) // 10], len(ordered), queueing)


@dataclass(frozen=True)
class Restored:
    """A run that spoils its inputs: `restore` mends them before each, outside the time."""

    run: Run
    restore: Run

    def __call__(self) -> object:
        return self.run()


def _restore(run: Run) -> None:
    if isinstance(run, Restored):
        run.restore()


def host_times(
    runs: Mapping[str, Run], *, rounds: int, seconds: float, warmup: int = 5, after: Run | None = None
) -> dict[str, Time]:
    """Wall time of runs that are over when they return.

    Args:
        runs: by name. Every round runs each once, in turn another one first.
        rounds: at most this many.
        seconds: stop after this time, once there are 15 rounds.
        after: called after each run, within its time (a synchronize).
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    clock = time.perf_counter
    deadline = clock() + seconds
    for i in range(-warmup, rounds):
        for name, run in order:
            _restore(run)
            start = clock()
            run()
            if after is not None:
                after()
            elapsed = clock() - start
            if i >= 0:
                samples[name].append(elapsed)
        order.append(order.pop(0))
        if i >= 15 and clock() > deadline:
            break
    return {name: Time.of(times) for name, times in samples.items()}


class DeviceTimer:
    """Device time on one CUDA stream: a read and a memset before each run hide the host and empty the L2."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.flush = torch.zeros(_FLUSH_BYTES // 8, dtype=torch.int64, device=stream.device)

    def _empty_cache(self) -> None:
        """Leaves L2 full of lines to write, as a kernel finds it behind others.

        A memset alone does not evict what a run marked to be kept: after relu of 2^24 elements in bfloat16 on
        an H200 its 32 MiB were read in 13.8 us instead of 15.1, others in 15.6; not so after other reads.
        """
        self.flush.amax()
        self.flush.zero_()

    def times(self, runs: Mapping[str, Run], *, rounds: int, warmup: int = 3) -> dict[str, Time]:
        """Device time of what each run queues on the stream, which is also torch's current one meanwhile."""
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        host: dict[str, list[float]] = {name: [] for name in runs}
        order = list(runs.items())
        with torch.cuda.stream(self.stream), torch.no_grad():
            for i in range(-warmup, rounds):
                for name, run in order:
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    _restore(run)
                    self._empty_cache()
                    start.record(self.stream)
                    before = time.perf_counter()
                    run()
                    queued = time.perf_counter() - before
                    end.record(self.stream)
                    if i >= 0:
                        events[name].append((start, end))
                        host[name].append(queued)
                order.append(order.pop(0))
        torch.cuda.synchronize(self.stream.device)
        return {
            name: Time.of([start.elapsed_time(end) * 1e-3 for start, end in pairs], host[name])
            for name, pairs in events.items()
        }
