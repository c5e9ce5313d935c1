"""Measured rows, grouped by cell, and the bars that each cell must meet."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import report

COPY = "torch copy_"
AGAIN = " again"  # the same run, measured twice per round: the difference between the two is noise
IN_TORCH, IN_ORT = "twinop in torch", "twinop in ORT"
OURS = (IN_TORCH, IN_ORT)
LEAST_TOLERANCE = 0.01

DOUBLE = "float64"
"""Measured beside torch eager only, and without a bar."""

Row = Mapping[str, Any]
"""The measurements of one provider in one cell."""


@dataclass
class Cell:
    """One op in one direction on one shape and dtype: the rows of all providers."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in ("kind", "device", "op", "family", "direction", "dtype", "shape", "aligned", "bytes"):
            return self.first[name]
        raise AttributeError(name)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(self.first[name]) for name in ("kind", "op", "direction", "dtype", "shape"))

    @property
    def name(self) -> str:
        backward = " backward" if self.direction == "backward" else ""
        return f"{self.op}{backward}, {self.dtype}, {self.shape}"

    @property
    def size(self) -> int:
        """The position on a plot's axis: columns of a row-wise op, else elements."""
        last = self.shape.split("x")[-1]
        return 1 << int(last[2:]) if last.startswith("2^") else int(last)

    @cached_property
    def tolerance(self) -> float:
        """The largest relative difference between a run and its repetition, at least 1 %."""
        pairs = [(name, name + AGAIN) for name in self.rows if name + AGAIN in self.rows]
        spread = [abs(self.us(again) / self.us(name) - 1) for name, again in pairs]
        return max([LEAST_TOLERANCE, *spread])

    def us(self, provider: str) -> float:
        """Median time in microseconds; NaN if the provider was not measured."""
        return float(self.rows[provider]["median_us"]) if provider in self.rows else float("nan")

    def gb_per_s(self, provider: str) -> float:
        return float(self.bytes) * 1e-3 / self.us(provider)

    @property
    def peers(self) -> list[str]:
        """The providers that are neither twinop's nor a copy."""
        return [
            name for name in self.rows if not name.startswith(("twinop", COPY)) and not name.endswith(AGAIN)
        ]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=self.us, default=None)

    def share(self, provider: str) -> float:
        """The provider's speed as a share of the speed of a copy of as many bytes."""
        return self.us(COPY) / self.us(provider)


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """Groups rows by cell."""
    found: dict[tuple[Any, ...], Cell] = {}
    for row in rows:
        key = tuple(row[name] for name in ("kind", "device", "op", "direction", "dtype", "shape"))
        found.setdefault(key, Cell(row)).rows[row["provider"]] = row
    return list(found.values())


def providers_of(cells: Sequence[Cell]) -> list[str]:
    """Lists the copy, then twinop, then the others, without repetitions."""
    names = dict.fromkeys(name for cell in cells for name in cell.rows if not name.endswith(AGAIN))
    return sorted(names, key=lambda name: (name != COPY, name not in OURS, not name.startswith("twinop")))


# ------------------------------------------------------------------------------------------- verdicts

Verdict = dict[str, Any]
"""`what`, `value`, `bar`, `passed`, and `group`, the line of the table that it counts in."""

COPY_BARS = {"unary": 0.98, "binary": 0.97}  # shares of the copy's speed
ROW_BARS = {"swiglu": 0.97, "swiglu_packed": 0.97, "add_rms_norm": 0.97, "add_layer_norm": 0.97}
ROW_BAR, MISALIGNED_BAR, WIDE_BAR, WIDE = 0.93, 0.85, 0.85, "4096x65536"

BUILT_IN_SHAPE = "32768x4096"
BUILT_IN_ELEMENTS = "2^27"  # the same number of elements in one dimension, for elementwise ops
BUILT_IN_BARS = {"gelu": 3.3, "swiglu": 3.7, "softmax": 1.95, "layer_norm": 2.9, "rms_norm": 2.2}

MOST_TOLERANCE = 0.1  # more noise than this does not excuse a cell

BACKWARD_PEERS = ("torch.compile", "torch.compile max-autotune", "Liger")

CPU_ELEMENTWISE = 1.05  # the most that an op may take, as a multiple of the runtime's own time
CPU_ROWS = 0.8  # the least speed, as a share of the faster runtime's own


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Returns a verdict for each bar and cell, which allows for the tolerance of the cell."""
    found: list[Verdict] = []
    for cell in cells:
        if cell.dtype == DOUBLE:
            continue
        if cell.device == "cpu":
            found += _cpu(cell)
        elif cell.kind == "latency":
            found += _peers(cell, "latency under a CUDA graph, against the best peer")
        else:
            found += _copy(cell)
            found += _peers(cell, f"{cell.direction}, against the best peer")
            found += _built_in(cell)
    return found


def numeric_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Returns the verdicts on errors: twinop is never the worst, and 16-bit elementwise ops stay in 1 ulp."""
    found: list[Verdict] = []
    for (op, dtype, family), providers in report.by_cell(rows, "op", "dtype", "family").items():
        errors = {name: row["max_ulp"] for name, row in providers.items()}
        others = [error for name, error in errors.items() if name not in OURS]
        bounds = {"numerics, never the worst": max(others) + 1e-3} if others else {}
        if family != "rows" and dtype != "float32":
            bounds["numerics, element-wise in 16 bits, ulp"] = 1.0
        for ours in filter(errors.__contains__, OURS):
            for group, bound in bounds.items():
                what = f"{group}: {ours}, {op}, {dtype}"
                found.append({"group": group} | report.bar(what, errors[ours], bound))
    return found


def summary(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Returns a line for each group: its cells, how many meet the bar, and the verdicts that miss it."""
    groups: dict[str, dict[str, Any]] = {}
    for verdict in found:
        group = groups.setdefault(
            verdict["group"], {"group": verdict["group"], "cells": 0, "met": 0, "missed": []}
        )
        group["cells"] += 1
        group["met"] += verdict["passed"]
        if not verdict["passed"]:
            group["missed"].append({name: value for name, value in verdict.items() if name != "group"})
    return list(groups.values())


def copy_bar(cell: Cell) -> float:
    """Returns the least share of the copy's speed for this cell."""
    if cell.family != "rows":
        return COPY_BARS[cell.family]
    if not cell.aligned:
        return MISALIGNED_BAR
    if cell.shape == WIDE:
        return WIDE_BAR
    return ROW_BARS.get(cell.op, ROW_BAR)


def _verdict(group: str, cell: Cell, who: str, value: float, bar: float, least: bool) -> Verdict:
    """Returns a verdict; `least` means that the value must be at least the bar, else at most."""
    what = f"{group}: {who}, {cell.name}"
    tolerance = min(cell.tolerance, MOST_TOLERANCE)
    return {"group": group} | report.bar(what, value, bar, least=least, tolerance=tolerance)


def _copy(cell: Cell) -> Iterator[Verdict]:
    if cell.direction == "backward" or COPY not in cell.rows:
        return
    bar = copy_bar(cell)
    group = f"share of the copy, {'rows' if cell.family == 'rows' else cell.family}"
    for ours in _measured(cell):
        yield _verdict(group, cell, ours, cell.share(ours), bar, True)


def _peers(cell: Cell, group: str) -> Iterator[Verdict]:
    peers = cell.peers
    if cell.direction == "backward":
        peers = [name for name in peers if name in BACKWARD_PEERS]
    if not peers:
        return
    best = min(peers, key=cell.us)
    for ours in _measured(cell):
        who = f"{ours} / {best}, time"
        yield _verdict(group, cell, who, cell.us(ours) / cell.us(best), 1.0, False)


def _built_in(cell: Cell) -> Iterator[Verdict]:
    """Compares with the node that a stock export holds: the first ONNX Runtime peer in bench/peers."""
    wanted = BUILT_IN_SHAPE if cell.family == "rows" else BUILT_IN_ELEMENTS
    built_in = next((name for name in cell.rows if name.startswith("ORT") and AGAIN not in name), None)
    if cell.dtype != "bfloat16" or cell.shape != wanted or cell.op not in BUILT_IN_BARS or not built_in:
        return
    if OURS[1] in cell.rows:
        value = cell.us(built_in) / cell.us(OURS[1])
        bar = BUILT_IN_BARS[cell.op]
        yield _verdict("in ORT, times as fast as its built-in", cell, built_in, value, bar, True)


def _cpu(cell: Cell) -> Iterator[Verdict]:
    """Compares elementwise ops with the same runtime's own op, and row-wise ops with the faster runtime's."""
    if cell.direction == "backward":
        return
    own = {
        OURS[0]: [name for name in cell.peers if name == "torch eager"],
        OURS[1]: [name for name in cell.peers if name.startswith("ORT")],
    }
    for ours in _measured(cell):
        rows = cell.family == "rows"
        rivals = [*own[OURS[0]], *own[OURS[1]]] if rows else own[ours]
        if not rivals:
            continue
        best = min(rivals, key=cell.us)
        if rows:
            speed = cell.us(best) / cell.us(ours)
            yield _verdict("CPU, rows, speed", cell, f"{ours} / {best}", speed, CPU_ROWS, True)
        else:
            times = cell.us(ours) / cell.us(best)
            yield _verdict("CPU, element-wise, time", cell, f"{ours} / {best}", times, CPU_ELEMENTWISE, False)


def _measured(cell: Cell) -> list[str]:
    return [name for name in OURS if name in cell.rows]


def gap(verdict: Mapping[str, Any]) -> float:
    """Returns the factor by which a verdict misses its bar."""
    sign, bar = verdict["bar"].split()[:2]
    value, wanted = float(verdict["value"]), float(bar)
    return (wanted / value if sign == ">=" else value / wanted) if value > 0 and wanted > 0 else float("inf")
