"""Measuring of what is compared: made, checked and timed side by side, in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from twinop.torch_op.rules import as_tuple

from .measurements import BenchError, reason_of
from .timing import DeviceTimer, Run, host_times_apart

COPY = "torch copy_"
AGAIN = " again"  # the same run, measured twice per round: the difference between the two is noise
IN_TORCH, IN_ORT, BUILT_IN = "twinop in torch", "twinop in ORT", "ORT built-in"
OURS = (IN_TORCH, IN_ORT)


@dataclass
class Subject:
    """A run, the tensors that it writes if it does not return them, and facts about it for its row."""

    run: Run
    bound: tuple[Tensor, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def result(self) -> tuple[Tensor, ...]:
        """Runs once and returns the outputs."""
        for tensor in self.bound:
            tensor.fill_(float("nan"))
        returned = self.run()
        return self.bound or as_tuple(returned)


def checked(
    makers: Mapping[str, Callable[[], Subject]], check: Callable[[str, Subject], None]
) -> tuple[dict[str, Subject], dict[str, str]]:
    """Makes subjects by name. Returns those that `check` accepts, and why the others are missing."""
    good, missing = {}, {}
    for name, make in makers.items():
        try:
            subject = make()
            check(name, subject)
            good[name] = subject
        except Exception as failure:  # a missing library or kernel, a compiler's error, a wrong result
            missing[name] = reason_of(failure)
    return good, missing


def side_by_side(
    makers: Mapping[str, Callable[[], Subject]],
    check: Callable[[str, Subject], None],
    timer: DeviceTimer | None,
    *,
    rounds: int,
    again: Sequence[str],
    seconds: float = 1.0,
) -> dict[str, Any]:
    """Makes, checks and times subjects, some twice (`again`); returns "times" and "missing" of a line."""
    subjects, missing = checked(makers, check)
    runs = {name: subject.run for name, subject in subjects.items()}
    runs |= {name + AGAIN: runs[name] for name in again if name in runs}
    if timer is not None:
        times = timer.times(runs, rounds=rounds)
    else:
        times = host_times_apart(runs, rounds=rounds, seconds=seconds)
    return {"times": times, "missing": missing}


def require(error: float, tolerance: float) -> None:
    """Raises BenchError if the relative error of a result is larger than `tolerance`."""
    if not error <= tolerance:
        raise BenchError(f"wrong result: relative error {error:.1e}")


def captured(run: Run, stream: torch.cuda.Stream) -> Subject:
    """Returns the replay of a CUDA graph of a call, with its results, if there are any."""
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result: Any = run()

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
