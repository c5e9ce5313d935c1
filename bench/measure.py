"""Measuring the cells of the case table: every provider of a cell in one process, in turn."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twinop.bench import report
from twinop.bench.cases import Case, bytes_moved, latency_table, make_inputs, make_outputs, table
from twinop.bench.cells import AGAIN, COPY, IN_ORT, IN_TORCH
from twinop.bench.latency import latencies
from twinop.bench.peers import Entry
from twinop.bench.providers import Providers
from twinop.bench.runs import reference
from twinop.bench.timing import DeviceTimer, Run, Time, host_times
from twinop.bench.warm import configure_compiler
from twinop.console import err

# 0.13 ms on an H200, of which one run differs from the next by 1 to 2 %: three times the rounds.
_SHORT_BYTES = 512 << 20


@dataclass
class Report:
    """What a report has measured so far. Rows are dicts as they stand in the JSON file."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # where the report's own time went

    def spend(self, what: str, start: float) -> None:
        self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - start, 2)

    def add(self, case: Case, device: str, moved: int, times: Mapping[str, Time]) -> None:
        for provider, each in times.items():
            row: dict[str, Any] = {
                "kind": case.kind,
                "device": device,
                "op": case.entry,
                "family": case.family,
                "direction": case.direction,
                "dtype": case.dtype,
                "shape": case.shape_name,
                "aligned": case.aligned,
                "bytes": moved,
                "provider": provider,
                "median_us": round(each.median * 1e6, 3),
                "low_us": round(each.low * 1e6, 3),
                "runs": each.runs,
                "gb_per_s": round(moved / each.median * 1e-9, 2),
            }
            if each.host is not None:
                row["host_us"] = round(each.host * 1e6, 1)
            self.rows.append(row)


@dataclass
class Machine:
    """The device that is measured, and its clock."""

    device: torch.device
    providers: Providers
    rounds: int
    seconds: float  # of a cell on the CPU
    timer: DeviceTimer | None
    report: Report = field(default_factory=Report)
    _sources: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def cell(self, case: Case, entry: Entry) -> None:
        """Builds, checks and measures one cell."""
        start = time.perf_counter()
        compiled = self.providers.budget.spent
        inputs = make_inputs(case, entry, self.device)
        outputs = make_outputs(case, entry, self.device)
        expected = reference(case, entry, inputs, outputs)
        moved = bytes_moved(list(inputs.values()), outputs, case)
        subjects = self.providers.build(case, entry, inputs, outputs)
        subjects = self.providers.check(case, subjects, expected)
        del expected
        compiled = self.providers.budget.spent - compiled
        self.report.seconds["compiling"] = round(self.report.seconds.get("compiling", 0.0) + compiled, 2)
        self.report.spend("building and checking", start + compiled)
        start = time.perf_counter()
        runs = {name: subject.run for name, subject in subjects.items()}
        self.report.add(case, self.device.type, moved, self._times(runs, moved, case.torch_dtype))
        self.report.spend("measuring", start)

    def latency(self, case: Case, entry: Entry) -> None:
        """As `cell`, but of few rows, in a CUDA graph of many calls: what a launch costs."""
        inputs = make_inputs(case, entry, self.device)
        outputs = make_outputs(case, entry, self.device)
        expected = reference(case, entry, inputs, outputs)
        moved = bytes_moved(list(inputs.values()), outputs, case)
        start = time.perf_counter()
        compiled = self.providers.budget.spent
        subjects = self.providers.check(case, self.providers.build(case, entry, inputs, outputs), expected)
        compiled = self.providers.budget.spent - compiled
        self.report.seconds["compiling"] = round(self.report.seconds.get("compiling", 0.0) + compiled, 2)
        assert self.timer is not None
        times = latencies(self.providers, self.timer, case, entry, subjects, inputs, outputs, self.rounds)
        self.report.add(case, self.device.type, moved, times)
        self.report.spend("latency", start + compiled)

    def _copy(self, moved: int, dtype: torch.dtype) -> Run:
        """copy_ of a tensor, such that as many bytes move."""
        size = max(moved // 2 // dtype.itemsize, 1)
        if dtype not in self._sources or self._sources[dtype].numel() < size:
            self._sources[dtype] = torch.randn(size, dtype=dtype, device=self.device)
        source = self._sources[dtype][:size]
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _times(self, runs: dict[str, Run], moved: int, dtype: torch.dtype) -> dict[str, Time]:
        if IN_TORCH in runs:
            runs[IN_TORCH + AGAIN] = runs[IN_TORCH]
        runs[COPY] = self._copy(moved, dtype)
        runs[COPY + AGAIN] = runs[COPY]
        if self.timer is not None:
            return self.timer.times(runs, rounds=self.rounds * (3 if moved < _SHORT_BYTES else 1))
        # The threads of either pool spin on for a while after a run: each runtime is measured apart.
        if IN_ORT in runs:
            runs[IN_ORT + AGAIN] = runs[IN_ORT]
        in_ort = {name: run for name, run in runs.items() if "ORT" in name}
        in_torch = {name: run for name, run in runs.items() if name not in in_ort}
        times: dict[str, Time] = {}
        for part in filter(None, (in_ort, in_torch)):
            times |= host_times(part, rounds=self.rounds, seconds=self.seconds)
        return times


def machine(device: torch.device, providers: Providers, *, rounds: int, seconds: float) -> Machine:
    timer = None
    if device.type == "cuda":
        assert providers.stream is not None
        timer = DeviceTimer(providers.stream)
    configure_compiler()
    return Machine(device, providers, rounds, seconds, timer)


def measure(
    where: Machine,
    entries: Mapping[str, Entry],
    *,
    quick: bool,
    kinds: Sequence[str],
    save: Callable[[], object],
) -> None:
    """All cells of these ops; `save` is called after each op, for a report that is cut off."""
    cells: dict[str, list[Case]] = {}
    for name, entry in entries.items():
        cells[name] = table(name, entry, where.device.type, quick) if "bandwidth" in kinds else []
        if "latency" in kinds and where.device.type == "cuda":
            cells[name] += latency_table(name, entry, quick)
    with ExitStack() as stack:
        step = stack.enter_context(report.progress("cells", sum(map(len, cells.values()))))
        if where.providers.stream is not None:
            stack.enter_context(torch.cuda.stream(where.providers.stream))
        stack.enter_context(torch.no_grad())
        for name, entry in entries.items():
            where.providers.budget.next_op()
            start = time.perf_counter()
            for case in cells[name]:
                step(str(case))
                if case.kind == "latency":
                    where.latency(case, entry)
                else:
                    where.cell(case, entry)
            where.providers.close()
            if where.device.type == "cuda":
                torch.cuda.empty_cache()
            save()
            if not err.is_terminal:
                err.print(f"{name}: {len(cells[name])} cells, {time.perf_counter() - start:.0f} s")
