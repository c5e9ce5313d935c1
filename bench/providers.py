"""Who computes a cell, and how: twinop in both runtimes, torch, the compiled torch, and the peers."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twinop import torch_op
from twinop.bench import peers, runtime
from twinop.bench.cases import FORWARD, Case, as_tuple
from twinop.bench.cells import DOUBLE, IN_ORT, IN_TORCH
from twinop.bench.peers import Entry
from twinop.bench.runs import backward_run, named, onnx_nodes, relative_error
from twinop.bench.timing import Restored, Run
from twinop.torch_op.registry import functions

EAGER, COMPILE, AUTOTUNE = "torch eager", "torch.compile", "torch.compile max-autotune"
_MODES = {COMPILE: "default", AUTOTUNE: "max-autotune-no-cudagraphs"}

# The relative error (2-norm, against fp64) above which a result is wrong, and not timed.
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4, "float64": 1e-10}


@dataclass
class Subject:
    """A run, and the tensors that it writes where it does not return them."""

    run: Run
    bound: tuple[Tensor, ...] = ()

    def result(self) -> tuple[Tensor, ...]:
        """Runs once."""
        for tensor in self.bound:
            tensor.fill_(float("nan"))
        if isinstance(self.run, Restored):
            self.run.restore()
        returned = self.run()
        return self.bound or as_tuple(returned)


@dataclass
class Budget:
    """Seconds for torch.compile, shared out evenly over the ops that are still to come."""

    seconds: float
    ops: int
    spent: float = 0.0
    _allowed: float = 0.0

    def next_op(self) -> None:
        self._allowed = self.spent + max(self.seconds - self.spent, 0.0) / max(self.ops, 1)
        self.ops -= 1

    @property
    def left(self) -> bool:
        return self.spent < self._allowed


@dataclass
class Problem:
    """A cell of a provider that was not measured."""

    case: Case
    provider: str
    reason: str

    def row(self) -> dict[str, str]:
        case = self.case
        return {
            "op": case.entry,
            "direction": case.direction,
            "dtype": case.dtype,
            "shape": case.shape_name,
            "provider": self.provider,
            "reason": self.reason,
        }


@dataclass
class Providers:
    """Builds the runs of a cell.

    Args:
        wanted: parts of providers' names, or None for all.
        stream: of torch and ONNX Runtime alike; None on the CPU.
        only: build these alone, by their full names.
    """

    device: torch.device
    stream: torch.cuda.Stream | None
    threads: int
    wanted: Sequence[str] | None
    budget: Budget
    only: Sequence[str] | None = None
    problems: list[Problem] = field(default_factory=list)
    ran: dict[str, list[str]] = field(default_factory=dict)  # ONNX Runtime's own: the nodes that really ran
    _sessions: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _broken: dict[str, str] = field(default_factory=dict)

    def takes(self, provider: str) -> bool:
        if self.only is not None and provider not in self.only:
            return False
        return self.wanted is None or any(part.lower() in provider.lower() for part in self.wanted)

    def build(
        self, case: Case, entry: Entry, inputs: Mapping[str, Tensor], outputs: tuple[Tensor, ...]
    ) -> dict[str, Subject]:
        """All providers of a cell that can be built; why others cannot goes to `problems`.

        Args:
            outputs: where ONNX Runtime writes; of a backward case, the gradients of the outputs.
        """
        makers: dict[str, Callable[[], Subject]] = {
            IN_TORCH: lambda: self._torch(self._ours(entry), case, inputs, outputs),
            EAGER: lambda: self._torch(entry.eager, case, inputs, outputs),
        }
        if case.direction == FORWARD:
            makers[IN_ORT] = lambda: self._onnx(case, entry, IN_ORT, inputs, outputs)
            for provider in entry.ort:
                makers[provider] = partial(self._onnx, case, entry, provider, inputs, outputs)
        for provider, peer in entry.peers.items():
            if case.direction == FORWARD or provider == "Liger":
                makers[provider] = partial(self._peer, provider, peer, case, inputs, outputs)
        torch._dynamo.reset()  # one function is compiled for 8 shapes at most
        for provider in _MODES:
            if self._compiles(provider, case):
                makers[provider] = partial(self._compiled, provider, entry, case, inputs, outputs)
        if case.dtype == DOUBLE:
            makers = {name: make for name, make in makers.items() if name in (IN_TORCH, IN_ORT, EAGER)}
        built: dict[str, Subject] = {}
        for provider, make in makers.items():
            if self.takes(provider):
                self._try(case, provider, make, built)
        return built

    def check(
        self, case: Case, subjects: dict[str, Subject], expected: Sequence[Tensor]
    ) -> dict[str, Subject]:
        """Those whose result is right; the others become problems."""
        good: dict[str, Subject] = {}
        for provider, subject in subjects.items():
            start = time.perf_counter()
            try:
                error = max(relative_error(a, b) for a, b in zip(subject.result(), expected, strict=True))
            except Exception as failure:  # whatever a peer raises when it runs at last
                self._remember(case, provider, failure)
                continue
            finally:
                if provider in _MODES:
                    self.budget.spent += time.perf_counter() - start
            if error <= TOLERANCE[case.dtype]:
                good[provider] = subject
            else:
                self.problems.append(Problem(case, provider, f"wrong result: relative error {error:.1e}"))
        return good

    def close(self) -> None:
        """Ends the sessions."""
        self._sessions.clear()

    # ------------------------------------------------------------------------------------ makers

    def _try(self, case: Case, provider: str, make: Callable[[], Subject], built: dict[str, Subject]) -> None:
        if provider in self._broken:
            self.problems.append(Problem(case, provider, self._broken[provider]))
            return
        try:
            built[provider] = make()
        except Exception as failure:  # no library, no kernel for the dtype, a compiler that is missing
            self._remember(case, provider, failure)

    def _remember(self, case: Case, provider: str, failure: Exception) -> None:
        reason = reason_of(failure)
        self.problems.append(Problem(case, provider, reason))
        if isinstance(failure, ImportError) or provider == "load_inline":
            self._broken[provider] = reason  # a minute's compilation is not tried again

    def _ours(self, entry: Entry) -> Callable[..., Any]:
        return partial(functions[entry.op], **entry.attributes)

    def _torch(
        self,
        function: Callable[..., Any],
        case: Case,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> Subject:
        if case.direction == FORWARD:
            return Subject(partial(function, *inputs.values()))
        return Subject(backward_run(function, list(inputs.values()), outputs))

    def _peer(
        self,
        provider: str,
        peer: str,
        case: Case,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> Subject:
        function = peers.resolve(peer)
        if case.direction == FORWARD:
            return Subject(partial(function, *inputs.values()))
        if peer not in peers.SPOILS_INPUTS:
            return Subject(backward_run(function, list(inputs.values()), outputs))
        own = [tensor.clone() for tensor in inputs.values()]

        def restore() -> None:
            for tensor, original in zip(own, inputs.values(), strict=True):
                tensor.data.copy_(original)  # .data: autograd must not see that the saved tensors change

        return Subject(Restored(backward_run(function, own, outputs), restore))

    def _compiles(self, provider: str, case: Case) -> bool:
        """Within the budget, and the long autotuning for one dtype and few shapes only."""
        if self.device.type == "cpu" and self.wanted is None:
            return False
        if provider == AUTOTUNE and (case.dtype != "bfloat16" or case.shape not in AUTOTUNED):
            return False
        if self.takes(provider) and not self.budget.left:
            self.problems.append(Problem(case, provider, "not compiled: the time for compilation is spent"))
            return False
        return True

    def _compiled(
        self,
        provider: str,
        entry: Entry,
        case: Case,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> Subject:
        start = time.perf_counter()
        try:
            compiled = torch.compile(
                named(entry.eager, provider), fullgraph=True, dynamic=False, mode=_MODES[provider]
            )
            return self._torch(compiled, case, inputs, outputs)
        finally:
            self.budget.spent += time.perf_counter() - start

    def _onnx(
        self,
        case: Case,
        entry: Entry,
        provider: str,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
    ) -> Subject:
        bound = dict(zip(torch_op.records()[entry.op].outputs, outputs, strict=True))
        key = (case.entry, case.dtype, str(len(case.shape)), provider)
        if key not in self._sessions:
            self._sessions[key] = self._open(entry, provider, inputs, bound)
        session = self._sessions[key]
        run = runtime.bind(session, inputs, bound, synchronize=self.stream is None)
        return Subject(run, tuple(bound.values()))

    def _open(
        self, entry: Entry, provider: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Any:
        nodes, opset = onnx_nodes(entry, provider)
        return runtime.open_session(
            runtime.one_op(nodes, inputs, outputs, opset),
            self.device,
            library="custom_ops",
            cpu_threads=self.threads,
            stream=self.stream,
            optimize=provider != IN_ORT,
        )


def reason_of(failure: Exception) -> str:
    """One line; of ONNX Runtime's, what it says behind its codes."""
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    text = f"{type(failure).__name__}: {first}" if first else type(failure).__name__
    return re.sub(r"^BenchError: .*?\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", text)[:300]


# Where the compiler may try all of its settings: it takes its time.
AUTOTUNED = ((1 << 28,), (1 << 26,), (32768, 4096), (4096, 65536), (64, 4096))
