"""The providers of a cell: twinop in both runtimes, torch, torch.compile, ONNX Runtime, a copy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from onnx import NodeProto
from torch._functorch import config as functorch_config

from twinop import torch_op
from twinop.record import tolerance
from twinop.testing.under_test import op_of
from twinop.torch_op.registry import functions

from . import runtime
from .cases import FORWARD, Case, Sample, relative_error, run_of
from .entries import Entry
from .measure import BUILT_IN, COPY, IN_ORT, IN_TORCH, Subject, require, side_by_side
from .measurements import BenchError
from .timing import DeviceTimer

EAGER, COMPILE = "torch eager", "torch.compile"

# A single op rounds less often than the models that the shared table is for.
TOLERANCE = tolerance.TOLERANCE | {"bfloat16": 2e-2, "float64": 1e-10}

SHORT_BYTES = 512 << 20
"""Cells that move less than this take 0.13 ms on an H200 and are noisier: they get three times the rounds."""


@dataclass
class Providers:
    """Builds, checks and measures the providers of cells."""

    device: torch.device
    timer: DeviceTimer | None  # of the GPU, whose stream torch and ONNX Runtime use; None on a CPU
    threads: int  # of ONNX Runtime's pool
    wanted: Sequence[str] | None  # parts of providers' names, or None for all
    rounds: int  # of each cell
    seconds: float  # of each cell on a CPU, at most
    compile_seconds: float = 0.0  # that torch.compile may still take

    def line(self, case: Case) -> dict[str, Any]:
        """Builds, checks and measures all providers of a cell, and returns the line about it."""
        if self.timer is not None:
            torch.cuda.empty_cache()  # ONNX Runtime has an allocator of its own
        sample = Sample.drawn(case, self.device)
        expected = sample.exact()

        def check(name: str, subject: Subject) -> None:
            if name != COPY:
                errors = (relative_error(a, b) for a, b in zip(subject.result(), expected, strict=True))
                require(max(errors), TOLERANCE[case.dtype])

        makers = self._makers(sample)
        if self.wanted is not None:
            parts = [part.lower() for part in self.wanted]
            makers = {name: makers[name] for name in makers if any(part in name.lower() for part in parts)}
        makers[COPY] = partial(_copy, sample)
        rounds, again = self.rounds * (3 if sample.bytes < SHORT_BYTES else 1), (IN_TORCH, IN_ORT, COPY)
        found = side_by_side(makers, check, self.timer, rounds=rounds, again=again, seconds=self.seconds)
        return case.label() | {"bytes": sample.bytes} | found

    def _makers(self, sample: Sample) -> dict[str, Callable[[], Subject]]:
        case, entry = sample.case, sample.case.entry
        function = functions.get(entry.op) or op_of(case.record).function
        makers: dict[str, Callable[[], Subject]] = {
            IN_TORCH: partial(_in_torch, partial(function, **entry.attributes), sample),
            EAGER: partial(_in_torch, entry.eager, sample),
        }
        if case.direction == FORWARD:
            makers[IN_ORT] = partial(self._in_ort, IN_ORT, sample)
            if entry.ort:
                makers[BUILT_IN] = partial(self._in_ort, BUILT_IN, sample)
        # On the CPU torch.compile is measured where the options name it, and for a user's ops.
        if self.device.type != "cpu" or self.wanted is not None or entry.library is not None:
            makers[COMPILE] = partial(self._compiled, sample)
        return makers

    def _compiled(self, sample: Sample) -> Subject:
        if self.compile_seconds <= 0:
            raise BenchError("not compiled: the time for compilation is spent")
        start = time.perf_counter()
        torch.compiler.reset()  # it compiles one function for at most 8 shapes
        functorch_config.donated_buffer = False  # backward runs many times on what forward saved
        try:
            subject = _in_torch(torch.compile(sample.case.entry.eager, fullgraph=True, dynamic=False), sample)
            subject.run()
            return subject
        finally:
            self.compile_seconds -= time.perf_counter() - start

    def _in_ort(self, provider: str, sample: Sample) -> Subject:
        entry = sample.case.entry
        nodes, opset = onnx_nodes(entry, provider)
        options: dict[str, Any] = {"library": entry.library, "cpu_threads": self.threads, "opset": opset}
        options["optimize"] = provider == BUILT_IN
        run = runtime.run_of(nodes, sample.inputs, sample.outputs, self.timer, **options)
        return Subject(run, tuple(sample.outputs.values()))


def _in_torch(function: Callable[..., Any], sample: Sample) -> Subject:
    inputs, outputs = (list(each.values()) for each in (sample.inputs, sample.outputs))
    return Subject(run_of(sample.case, function, inputs, outputs))


def _copy(sample: Sample) -> Subject:
    """Returns a copy_ that moves as many bytes as the op."""
    like = next(iter(sample.outputs.values()))
    source = torch.randn(sample.bytes // 2 // like.itemsize, dtype=like.dtype, device=like.device)
    return Subject(partial(torch.empty_like(source).copy_, source))


def onnx_nodes(entry: Entry, provider: str) -> tuple[list[NodeProto], int]:
    """Returns the nodes of a provider in ONNX Runtime, and their opset."""
    if provider == IN_ORT:
        return [runtime.custom_node(torch_op.records()[entry.op], entry.input_names, entry.attributes)], 20
    nodes = runtime.parse_nodes(entry.ort)
    return nodes, 23 if nodes[0].op_type == "RMSNormalization" else 20
