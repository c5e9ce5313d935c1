"""Measuring of cells: all providers of a cell in one process, in turn."""

from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile

from twinop.torch_op.rules import as_tuple

from .cases import Case, Sample
from .cells import AGAIN, COPY, IN_ORT, IN_TORCH
from .entries import Entry
from .providers import Providers, Subject
from .timing import DeviceTimer, Run, Time, host_times_apart

SHORT_BYTES = 512 << 20
"""Cells that move less than this take 0.13 ms on an H200 and are noisier: they get three times the rounds."""


class Machine:
    """Measures cells on a device.

    Args:
        timer: None on a CPU.
        rounds: on a GPU, of each cell; on a CPU, at most.
        seconds: of each cell on a CPU, at most.
    """

    def __init__(
        self, providers: Providers, timer: DeviceTimer | None, *, rounds: int, seconds: float
    ) -> None:
        functorch_config.donated_buffer = False  # backward runs many times on what forward saved
        self.device, self.providers = providers.device, providers
        self.rounds, self.seconds = rounds, seconds
        self.timer = timer
        self._sources: dict[torch.dtype, Tensor] = {}

    def line(self, case: Case, entry: Entry) -> dict[str, Any]:
        """Builds, checks and measures all providers of a cell, and returns the line about it."""
        sample = Sample.drawn(case, entry, self.device)
        subjects, missing = self.providers.subjects(sample)
        runs = {name: subject.run for name, subject in subjects.items()}
        times = self._times(runs, sample.bytes, case.torch_dtype)
        return case.label() | {"bytes": sample.bytes, "times": times, "missing": missing}

    def _copy(self, moved: int, dtype: torch.dtype) -> Run:
        """Returns a copy_ that moves as many bytes."""
        size = max(moved // 2 // dtype.itemsize, 1)
        if dtype not in self._sources or self._sources[dtype].numel() < size:
            self._sources[dtype] = torch.randn(size, dtype=dtype, device=self.device)
        source = self._sources[dtype][:size]
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _times(self, runs: dict[str, Run], moved: int, dtype: torch.dtype) -> dict[str, Time]:
        """Measures the runs, the copy, and twinop and the copy a second time."""
        if IN_TORCH in runs:
            runs[IN_TORCH + AGAIN] = runs[IN_TORCH]
        runs[COPY] = self._copy(moved, dtype)
        runs[COPY + AGAIN] = runs[COPY]
        if self.timer is not None:
            return self.timer.times(runs, rounds=self.rounds * (3 if moved < SHORT_BYTES else 1))
        if IN_ORT in runs:
            runs[IN_ORT + AGAIN] = runs[IN_ORT]
        return host_times_apart(runs, rounds=self.rounds, seconds=self.seconds)


def captured(run: Run, stream: torch.cuda.Stream) -> Subject:
    """Returns the replay of a CUDA graph of a call, with its results, if there are any.

    It does not use torch.cuda.graph(), which collects garbage for each of hundreds of graphs.
    """
    for _ in range(3):
        run()
    torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # of the current stream, which is `stream`
    try:
        result: Any = run()
    finally:
        graph.capture_end()

    def replay() -> None:
        graph.replay()
        _ = run  # it may hold memory that the graph reads

    replay()
    return Subject(replay, () if result is None else as_tuple(result))


def device_work(run: Run) -> dict[str, int] | None:
    """Counts what a run queues on the GPU; None where torch's profiler does not see it."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum("memcpy" in name.lower() for name in names)
    return {"kernels": len(names) - copies, "copies": copies} if names else None
