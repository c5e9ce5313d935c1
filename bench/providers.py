"""The providers of a cell: twinop in both runtimes, torch, torch.compile, and ONNX Runtime's own nodes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from onnx import NodeProto
from torch import Tensor

from twinop import torch_op
from twinop.record import tolerance
from twinop.testing.under_test import op_of
from twinop.torch_op.registry import functions
from twinop.torch_op.rules import as_tuple

from . import runtime
from .cases import FORWARD, Sample, backward_run, relative_error
from .cells import AGAIN, BUILT_IN, IN_ORT, IN_TORCH
from .entries import Entry
from .measurements import BenchError, reason_of
from .timing import DeviceTimer, Run, host_times_apart

EAGER, COMPILE = "torch eager", "torch.compile"

# A single op rounds less often than the models that the shared table is for.
TOLERANCE = tolerance.TOLERANCE | {"bfloat16": 2e-2, "float64": 1e-10}


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
    """Makes, checks and measures subjects: device time, or wall time where there is no timer.

    Args:
        again: those that are measured twice.

    Returns:
        "times" and "missing" of a line.
    """
    subjects, missing = checked(makers, check)
    runs = {name: subject.run for name, subject in subjects.items()}
    runs |= {name + AGAIN: runs[name] for name in again if name in runs}
    if timer is not None:
        return {"times": timer.times(runs, rounds=rounds), "missing": missing}
    return {"times": host_times_apart(runs, rounds=rounds, seconds=seconds), "missing": missing}


def require(error: float, tolerance: float) -> None:
    """Raises BenchError if the relative error of a result is larger than `tolerance`."""
    if not error <= tolerance:
        raise BenchError(f"wrong result: relative error {error:.1e}")


@dataclass
class Providers:
    """Builds and checks the runs of a cell.

    Args:
        stream: the stream of torch and ONNX Runtime; None on the CPU.
        threads: of ONNX Runtime's pool.
        wanted: parts of providers' names, or None for all.
        compile_seconds: that torch.compile may still take.
    """

    device: torch.device
    stream: torch.cuda.Stream | None
    threads: int
    wanted: Sequence[str] | None
    compile_seconds: float = 0.0
    _sessions: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def takes(self, provider: str) -> bool:
        """Whether the options choose this provider."""
        return self.wanted is None or any(part.lower() in provider.lower() for part in self.wanted)

    def subjects(self, sample: Sample) -> tuple[dict[str, Subject], dict[str, str]]:
        """Builds the providers of a cell. Returns those that are right, and why others are missing."""
        expected = sample.exact()

        def check(_: str, subject: Subject) -> None:
            errors = (relative_error(a, b) for a, b in zip(subject.result(), expected, strict=True))
            require(max(errors), TOLERANCE[sample.case.dtype])

        makers = self._makers(sample)
        return checked({name: make for name, make in makers.items() if self.takes(name)}, check)

    def _makers(self, sample: Sample) -> dict[str, Callable[[], Subject]]:
        case, entry = sample.case, sample.entry
        makers: dict[str, Callable[[], Subject]] = {}
        function = functions.get(entry.op) or op_of(torch_op.records()[entry.op]).function
        makers[IN_TORCH] = partial(_in_torch, partial(function, **entry.attributes), sample)
        if case.direction == FORWARD:
            makers[IN_ORT] = partial(self._in_ort, IN_ORT, sample)
        makers[EAGER] = partial(_in_torch, entry.eager, sample)
        if case.direction == FORWARD and entry.ort:
            makers[BUILT_IN] = partial(self._in_ort, BUILT_IN, sample)
        torch.compiler.reset()  # it compiles one function for at most 8 shapes
        # On the CPU torch.compile is measured where the options name it, and for a user's ops.
        if self.device.type != "cpu" or self.wanted is not None or entry.library is not None:
            makers[COMPILE] = partial(self._compiled, sample)
        return makers

    def close(self) -> None:
        """Closes the sessions."""
        self._sessions.clear()

    def _compiled(self, sample: Sample) -> Subject:
        if self.compile_seconds <= 0:
            raise BenchError("not compiled: the time for compilation is spent")
        start = time.perf_counter()
        try:
            compiled = torch.compile(sample.entry.eager, fullgraph=True, dynamic=False)
            subject = _in_torch(compiled, sample)
            subject.run()
            return subject
        finally:
            self.compile_seconds -= time.perf_counter() - start

    def _in_ort(self, provider: str, sample: Sample) -> Subject:
        case = sample.case
        key = (case.entry, case.dtype, str(len(case.shape)), provider)
        if key not in self._sessions:
            nodes, opset = onnx_nodes(sample.entry, provider)
            self._sessions[key] = runtime.open_session(
                runtime.one_op(nodes, sample.inputs, sample.bound, opset),
                self.device,
                library=sample.entry.library or "custom_ops",
                cpu_threads=self.threads,
                stream=self.stream,
                optimize=provider == BUILT_IN,
            )
        synchronize = self.stream is None
        run = runtime.bind(self._sessions[key], sample.inputs, sample.bound, synchronize=synchronize)
        return Subject(run, sample.outputs)


def _in_torch(function: Callable[..., Any], sample: Sample) -> Subject:
    if sample.case.direction == FORWARD:
        return Subject(partial(function, *sample.inputs.values()))
    return Subject(backward_run(function, list(sample.inputs.values()), sample.outputs))


def onnx_nodes(entry: Entry, provider: str) -> tuple[list[NodeProto], int]:
    """Returns the nodes of a provider in ONNX Runtime, and their opset."""
    if provider == IN_ORT:
        return [runtime.custom_node(torch_op.records()[entry.op], entry.input_names, entry.attributes)], 20
    nodes = runtime.parse_nodes(entry.ort)
    return nodes, 23 if nodes[0].op_type == "RMSNormalization" else 20
