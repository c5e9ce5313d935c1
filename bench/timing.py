"""Timing of several runs in turn, so that all of them meet the same clocks and the same other load."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

Run = Callable[[], object]

_FLUSH_BYTES = 1 << 30  # larger than any L2; reading and setting it hides the host for 0.6 ms


@dataclass(frozen=True)
class Time:
    """The times of one run in seconds.

    Attributes:
        low: the tenth percentile.
        host: of device times, what the host took to queue a run; the tenth percentile, because a full queue
            makes the host wait.
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

    def __truediv__(self, count: int) -> "Time":
        """The time of one call, of a run that makes so many."""
        return replace(self, median=self.median / count, low=self.low / count)

    def row(self) -> dict[str, Any]:
        """Returns what a file has of it."""
        return {
            "median_us": round(self.median * 1e6, 3),
            "low_us": round(self.low * 1e6, 3),
            "runs": self.runs,
        } | ({"host_us": round(self.host * 1e6, 1)} if self.host is not None else {})


def host_times(
    runs: Mapping[str, Run], *, rounds: int, seconds: float, after: Run | None = None
) -> dict[str, Time]:
    """Measures the wall time of runs that are complete when they return.

    Args:
        runs: by name. Each round executes each of them once and starts with a different one.
        rounds: the largest number of rounds.
        seconds: stop after this time, once there are 15 rounds.
        after: called after each run, within its time (a synchronize).
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    clock = time.perf_counter
    deadline = clock() + seconds
    for i in range(-5, rounds):  # the first ones warm up
        for name, run in order:
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


def host_times_apart(runs: Mapping[str, Run], *, rounds: int, seconds: float) -> dict[str, Time]:
    """Measures the wall time of ONNX Runtime's runs, then of torch's.

    The threads of either pool spin for a while after a run.
    """
    in_ort = {name: run for name, run in runs.items() if "ORT" in name}
    in_torch = {name: run for name, run in runs.items() if name not in in_ort}
    times = [host_times(part, rounds=rounds, seconds=seconds) for part in (in_ort, in_torch) if part]
    return {name: time for part in times for name, time in part.items()}


class DeviceTimer:
    """Measures device time on one CUDA stream. Other work before each run hides the host and empties L2."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.flush = torch.zeros(_FLUSH_BYTES // 8, dtype=torch.int64, device=stream.device)

    def _empty_cache(self) -> None:
        """Fills L2 with other lines.

        The read comes first because a memset does not evict the lines that a kernel has marked to keep.
        """
        self.flush.amax()
        self.flush.zero_()

    def times(self, runs: Mapping[str, Run], *, rounds: int) -> dict[str, Time]:
        """Measures the device time of what each run queues on the stream, which is torch's current one."""
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        host: dict[str, list[float]] = {name: [] for name in runs}
        order = list(runs.items())
        with torch.cuda.stream(self.stream), torch.no_grad():
            for i in range(-3, rounds):  # the first ones warm up
                for name, run in order:
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


@contextmanager
def timer_on(device: torch.device) -> Iterator[DeviceTimer | None]:
    """Yields the timer of a GPU, whose stream is torch's current one in the body; None for a CPU."""
    if device.type != "cuda":
        yield None
        return
    timer = DeviceTimer(torch.cuda.Stream(device))
    torch.cuda.synchronize(device)
    with torch.cuda.stream(timer.stream):
        yield timer
