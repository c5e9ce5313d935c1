"""Timing of several runs in turn, so that all of them meet the same clocks and the same other load."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[], object]

_FLUSH_BYTES = 1 << 30  # larger than any L2; reading and setting it hides the host for 0.6 ms


Time = dict[str, Any]
"""What a file has of the times of a run."""


def time_of(seconds: list[float], host: list[float] | None = None) -> Time:
    """Returns the median and the tenth percentile; that of `host`: a full queue makes the host wait."""
    low = sorted(seconds)[len(seconds) // 10]
    time = {"median_us": round(statistics.median(seconds) * 1e6, 3), "low_us": round(low * 1e6, 3)}
    queueing = {"host_us": round(sorted(host)[len(host) // 10] * 1e6, 1)} if host else {}
    return time | {"runs": len(seconds)} | queueing


def _in_turn(runs: Mapping[str, Run], rounds: range) -> Iterator[tuple[int, str, Run]]:
    """Yields each run once a round, and begins each round with a different one."""
    names = list(runs)
    for i in rounds:
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            yield i, name, runs[name]


def host_times(
    runs: Mapping[str, Run], *, rounds: int, seconds: float, after: Run | None = None
) -> dict[str, Time]:
    """Measures the wall time of runs and `after`, until `seconds` are over and there are 15 rounds."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.perf_counter
    deadline = clock() + seconds
    for i, name, run in _in_turn(runs, range(-5, rounds)):  # the first ones warm up
        start = clock()
        run()
        if after is not None:
            after()
        end = clock()
        if i >= 0:
            samples[name].append(end - start)
        if i >= 15 and end > deadline:
            break
    return {name: time_of(times) for name, times in samples.items()}


def host_times_apart(runs: Mapping[str, Run], *, rounds: int, seconds: float) -> dict[str, Time]:
    """Measures the wall time of ONNX Runtime's runs, then of torch's: their threads spin after a run."""
    in_ort = {name: run for name, run in runs.items() if "ORT" in name}
    in_torch = {name: run for name, run in runs.items() if name not in in_ort}
    times = [host_times(part, rounds=rounds, seconds=seconds) for part in (in_ort, in_torch) if part]
    return {name: time for part in times for name, time in part.items()}


class DeviceTimer:
    """Measures device time on one CUDA stream. Other work before each run hides the host and empties L2."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.flush = torch.zeros(_FLUSH_BYTES // 8, dtype=torch.int64, device=stream.device)

    def times(self, runs: Mapping[str, Run], *, rounds: int) -> dict[str, Time]:
        """Measures the device time of what each run queues on the stream, which is torch's current one."""
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        host: dict[str, list[float]] = {name: [] for name in runs}
        with torch.cuda.stream(self.stream), torch.no_grad():
            for i, name, run in _in_turn(runs, range(-3, rounds)):  # the first ones warm up
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.amax()  # a memset does not evict the lines that a kernel has marked to keep
                self.flush.zero_()
                start.record(self.stream)
                before = time.perf_counter()
                run()
                queued = time.perf_counter() - before
                end.record(self.stream)
                if i >= 0:
                    events[name].append((start, end))
                    host[name].append(queued)
        torch.cuda.synchronize(self.stream.device)
        return {
            name: time_of([start.elapsed_time(end) * 1e-3 for start, end in pairs], host[name])
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
