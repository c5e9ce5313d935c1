"""The tables of an ops report: the speed of every provider, the errors, and the bars that are met."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinop.console import out

from . import report
from .cells import COPY, IN_ORT, IN_TORCH, OURS, Cell, Row, Verdict, cells_of, copy_bar, gap, providers_of
from .report import flag

HIDDEN_US = 500  # the read and the memset before each run take at least this long on an H200
MISSES = 60  # as many missed bars are printed

_ULP_CAPTION = (
    "In units in the last place (ulp) of the exact result in the result's dtype, for layer norms of 1 at "
    "least; 0.5 is correctly rounded. 16-bit ops of one input: every finite value."
)


def show_document(document: Mapping[str, Any]) -> None:
    """Prints all tables of an ops report."""
    show_cells(cells_of(document["rows"]))
    show_numerics(document["numerics"])
    show_problems(document["not_measured"])
    show_verdicts(document["bars"])
    parts = ", ".join(f"{what} {value:.0f} s" for what, value in document["seconds"].items())
    out.print(f"time: {parts}", highlight=False, soft_wrap=True)


def show_cells(cells: Sequence[Cell]) -> None:
    """Prints a table for each op, direction and dtype: a column per shape, a row per provider."""
    groups = dict.fromkeys((cell.device, cell.kind, cell.op, cell.direction, cell.dtype) for cell in cells)
    for group in groups:
        device, kind, op, direction, dtype = group
        chosen = [c for c in cells if (c.device, c.kind, c.op, c.direction, c.dtype) == group]
        chosen.sort(key=lambda cell: cell.size if kind == "bandwidth" else int(cell.shape.split("x")[0]))
        title = f"{op}{' backward' if direction == 'backward' else ''}, {dtype}"
        if device == "cpu":
            _times(f"{title}, CPU: microseconds", chosen, 1)
        elif kind == "latency":
            _times(f"{title}: microseconds per call, many calls in a CUDA graph", chosen, 2)
        else:
            _bandwidth(f"{title}: GB/s (share of the copy)", chosen)


def _bandwidth(title: str, cells: Sequence[Cell]) -> None:
    late = any(row.get("host_us", 0) > HIDDEN_US for cell in cells for row in cell.rows.values())
    caption = "*: the host took longer to queue the run than the preceding work hides" if late else None
    table = report.table(title, ["", *(cell.shape for cell in cells)], caption)
    for provider in providers_of(cells):
        texts = []
        for cell in cells:
            if provider not in cell.rows:
                texts.append("")
                continue
            late = cell.rows[provider].get("host_us", 0) > HIDDEN_US
            text = f"{cell.gb_per_s(provider):.0f}{'*' if late else ''}"
            if provider != COPY:
                text = f"{text} ({cell.share(provider):.2f})"
            if provider in OURS and cell.direction == "forward":
                text = flag(text, cell.share(provider) >= copy_bar(cell) * (1 - cell.tolerance))
            texts.append(text)
        table.add_row(provider, *texts, end_section=provider == COPY)
    table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in cells))
    report.show(table)


def _times(title: str, cells: Sequence[Cell], digits: int) -> None:
    table = report.table(title, ["", *(cell.shape for cell in cells)])
    for provider in providers_of(cells):
        texts = []
        for cell in cells:
            text = f"{cell.us(provider):.{digits}f}" if provider in cell.rows else ""
            if provider in OURS and provider in cell.rows and (best := cell.best_peer) is not None:
                text = flag(text, cell.us(provider) <= cell.us(best) * (1 + cell.tolerance))
            texts.append(text)
        table.add_row(provider, *texts, end_section=provider == COPY)
    table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in cells))
    report.show(table)


def show_numerics(rows: Sequence[Row]) -> None:
    """Prints the largest error of each op and dtype: twinop, torch eager and ONNX Runtime's own ops."""
    if not rows:
        return
    eager = "torch eager"
    columns = ["", "dtype", IN_TORCH, IN_ORT, eager, "ONNX Runtime's own"]
    table = report.table(f"Largest error in ulp, {rows[0]['device']}", columns, _ULP_CAPTION)
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        errors = {r["provider"]: r["max_ulp"] for r in rows if (r["op"], r["dtype"]) == (op, dtype)}
        others = [error for name, error in errors.items() if name not in OURS]
        cells = []
        for name in (IN_TORCH, IN_ORT, eager):
            text = f"{errors[name]:.3g}" if name in errors else ""
            if name in OURS and name in errors and others:
                text = flag(text, errors[name] <= max(others) + 1e-3)
            cells.append(text)
        ort = {name.removeprefix("ORT "): e for name, e in errors.items() if name.startswith("ORT ")}
        table.add_row(op, dtype, *cells, "; ".join(f"{name} {error:.3g}" for name, error in ort.items()))
    report.show(table)


def show_problems(problems: Sequence[Mapping[str, str]]) -> None:
    """Prints what was not measured and why, with one line for all cells that have the same reason."""
    grouped = Counter((each["op"], each["provider"], each["reason"]) for each in problems)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (op, provider, reason), count in grouped.items():
        by_reason.setdefault((provider, reason), []).append(f"{op} ({count})")
    for (provider, reason), ops in by_reason.items():
        text = f"not measured: {provider}: {', '.join(ops)}: {reason}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Prints how many cells meet each bar, then the cells that miss one, the worst first."""
    table = report.table("Bars", ["", "cells", "met", "missed"])
    met = Counter(verdict["group"] for verdict in verdicts if verdict["passed"])
    for group, count in Counter(verdict["group"] for verdict in verdicts).items():
        missed = count - met[group]
        table.add_row(group, str(count), str(met[group]), flag(str(missed), missed == 0))
    report.show(table)
    missed_ones = sorted((v for v in verdicts if not v["passed"]), key=gap, reverse=True)
    for verdict in missed_ones[:MISSES]:
        text = f"{verdict['what']}: {verdict['value']}, bar {verdict['bar']}"
        out.print("[red]missed:[/]", end=" ")
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(missed_ones) > MISSES:
        out.print(f"... and {len(missed_ones) - MISSES} more, in the JSON file", highlight=False)
    out.print(f"{len(verdicts) - len(missed_ones)} of {len(verdicts)} bars met", highlight=False)
