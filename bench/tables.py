"""The tables of an ops report: the speed of every provider, the errors, and the bars that are met."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinop.console import out

from . import report
from .cells import COPY, OURS, Cell, Row, Verdict, cells_of, copy_bar, gap, providers_of
from .report import flag

HIDDEN_US = 500  # the read and the memset before each run take at least this long on an H200
MISSES = 60  # as many missed bars are printed


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
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.device, cell.kind, cell.op, cell.direction, cell.dtype), []).append(cell)
    for (device, kind, op, direction, dtype), chosen in groups.items():
        what = "GB/s (share of the copy; *: the host was late)"
        if device == "cpu":
            what = "microseconds on the CPU"
        elif kind == "latency":
            what = "microseconds per call in a CUDA graph"
        chosen.sort(key=lambda cell: cell.size if kind == "bandwidth" else int(cell.shape.split("x")[0]))
        backward = " backward" if direction == "backward" else ""
        table = report.table(f"{op}{backward}, {dtype}: {what}", ["", *(cell.shape for cell in chosen)])
        for provider in providers_of(chosen):
            texts = (_text(cell, provider) if provider in cell.rows else "" for cell in chosen)
            table.add_row(provider, *texts, end_section=provider == COPY)
        table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in chosen))
        out.print(table)


def _text(cell: Cell, provider: str) -> str:
    us = cell.us(provider)
    if cell.device == "cpu" or cell.kind == "latency":
        text = f"{us:.1f}" if cell.device == "cpu" else f"{us:.2f}"
        best = cell.best_peer
        good = us <= cell.us(best) * (1 + cell.tolerance) if best is not None else None
    else:
        late = cell.rows[provider].get("host_us", 0) > HIDDEN_US
        share = f" ({cell.share(provider):.2f})" if provider != COPY else ""
        text = f"{cell.gb_per_s(provider):.0f}{'*' if late else ''}{share}"
        least = copy_bar(cell) * (1 - cell.tolerance)
        good = cell.share(provider) >= least if cell.direction == "forward" else None
    return flag(text, good) if provider in OURS and good is not None else text


def show_numerics(rows: Sequence[Row]) -> None:
    """Prints the largest error of each op and dtype: twinop, torch eager and ONNX Runtime's own ops.

    The errors are in units in the last place of the exact result in the result's dtype, for layer norms of 1
    at least; 0.5 is correctly rounded. 16-bit ops of one input are measured on every finite value.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    columns = ["op", "dtype", *OURS, "torch eager", "ONNX Runtime's own"]
    for row in rows:
        line = found.setdefault((row["op"], row["dtype"]), {**dict.fromkeys(columns, ""), **row})
        if row["provider"] in columns:
            line[row["provider"]] = row["max_ulp"]
        else:
            own = f"{row['provider'].removeprefix('ORT ')} {row['max_ulp']:.3g}"
            line[columns[-1]] = "; ".join(filter(None, (line[columns[-1]], own)))
    if rows:
        report.show_rows(f"Largest error in ulp, {rows[0]['device']}", list(found.values()), columns)


def show_problems(problems: Sequence[Mapping[str, str]]) -> None:
    """Prints what was not measured and why, with one line for all cells that have the same reason."""
    by_reason: dict[tuple[str, str], Counter[str]] = {}
    for each in problems:
        by_reason.setdefault((each["provider"], each["reason"]), Counter())[each["op"]] += 1
    for (provider, reason), ops in by_reason.items():
        cells = ", ".join(f"{op} ({count})" for op, count in ops.items())
        text = f"not measured: {provider}: {cells}: {reason}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Prints how many cells meet each bar, then the cells that miss one, the worst first."""
    table = report.table("Bars", ["", "cells", "met", "missed"])
    met = Counter(verdict["group"] for verdict in verdicts if verdict["passed"])
    for group, count in Counter(verdict["group"] for verdict in verdicts).items():
        missed = count - met[group]
        table.add_row(group, str(count), str(met[group]), flag(str(missed), missed == 0))
    out.print(table)
    missed_ones = sorted((v for v in verdicts if not v["passed"]), key=gap, reverse=True)
    report.show_bars(missed_ones[:MISSES])
    if len(missed_ones) > MISSES:
        out.print(f"... and {len(missed_ones) - MISSES} more, in the JSON file", highlight=False)
    out.print(f"{len(verdicts) - len(missed_ones)} of {len(verdicts)} bars met", highlight=False)
