"""The report's tables: what every provider reached, and which bars are met."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinop.bench import report
from twinop.bench.cells import COPY, OURS, Cell, providers_of
from twinop.bench.verdicts import Verdict, copy_bar
from twinop.console import out

HIDDEN_US = 500  # what the read and the memset before each run take on an H200, at least


def show_cells(cells: Sequence[Cell]) -> None:
    """A table for each op, direction, dtype: a column a shape, a row a provider."""
    groups = dict.fromkeys((cell.device, cell.kind, cell.op, cell.direction, cell.dtype) for cell in cells)
    for group in groups:
        device, kind, op, direction, dtype = group
        chosen = [c for c in cells if (c.device, c.kind, c.op, c.direction, c.dtype) == group]
        chosen.sort(key=lambda cell: cell.size if kind == "bandwidth" else int(cell.shape.split("x")[0]))
        title = f"{op}{' backward' if direction == 'backward' else ''}, {dtype}"
        if device == "cpu":
            _times(f"{title}, CPU: microseconds", chosen, 1)
        elif kind == "latency":
            _times(f"{title}: microseconds a call, in a CUDA graph of many", chosen, 2)
        else:
            _bandwidth(f"{title}: GB/s (share of the copy)", chosen)


def _bandwidth(title: str, cells: Sequence[Cell]) -> None:
    late = any(row.get("host_us", 0) > HIDDEN_US for cell in cells for row in cell.rows.values())
    caption = "*: the host took longer to queue it than what precedes it hides" if late else None
    table = report.table(title, ["", *(cell.shape for cell in cells)], caption)
    for provider in providers_of(cells):
        texts = []
        for cell in cells:
            if provider not in cell.rows:
                texts.append("")
                continue
            row = cell.rows[provider]
            speed = f"{row['gb_per_s']:.0f}{'*' if row.get('host_us', 0) > HIDDEN_US else ''}"
            if provider == COPY:
                texts.append(speed)
                continue
            text = f"{speed} ({cell.share(provider):.2f})"
            if provider in OURS and cell.direction == "forward":
                text = _flag(text, cell.share(provider) >= copy_bar(cell) * (1 - cell.tolerance))
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
                text = _flag(text, cell.us(provider) <= cell.us(best) * (1 + cell.tolerance))
            texts.append(text)
        table.add_row(provider, *texts, end_section=provider == COPY)
    table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in cells))
    report.show(table)


def show_verdicts(verdicts: Sequence[Verdict], misses: int = 60) -> None:
    """Each bar with how many cells meet it, then the cells that do not, the worst first."""
    table = report.table("Bars", ["", "cells", "met", "missed"])
    met = Counter(verdict["group"] for verdict in verdicts if verdict["passed"])
    for group, count in Counter(verdict["group"] for verdict in verdicts).items():
        missed = count - met[group]
        table.add_row(group, str(count), str(met[group]), _flag(str(missed), missed == 0))
    report.show(table)
    missed_ones = sorted((v for v in verdicts if not v["passed"]), key=_gap, reverse=True)
    for verdict in missed_ones[:misses]:
        note = f" ({verdict['note']})" if "note" in verdict else ""
        text = f"{verdict['what']}: {verdict['value']}, bar {verdict['bar']}{note}"
        out.print("[red]missed:[/]", end=" ")
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(missed_ones) > misses:
        out.print(f"... and {len(missed_ones) - misses} more, in the JSON file", highlight=False)
    out.print(f"{len(verdicts) - len(missed_ones)} of {len(verdicts)} bars met", highlight=False)


def _gap(verdict: Verdict) -> float:
    """By what factor the bar is missed."""
    sign, bar = verdict["bar"].split()[:2]
    value, wanted = float(verdict["value"]), float(bar)
    return (wanted / value if sign == ">=" else value / wanted) if value > 0 and wanted > 0 else float("inf")


def show_problems(problems: Sequence[Mapping[str, str]]) -> None:
    """What was not measured, and why; cells with the same reason as one line."""
    grouped = Counter((each["op"], each["provider"], each["reason"]) for each in problems)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (op, provider, reason), count in grouped.items():
        by_reason.setdefault((provider, reason), []).append(f"{op} ({count})")
    for (provider, reason), ops in by_reason.items():
        text = f"not measured: {provider}: {', '.join(ops)}: {reason}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def show_seconds(seconds: Mapping[str, Any]) -> None:
    parts = ", ".join(f"{what} {value:.0f} s" for what, value in seconds.items())
    out.print(f"time: {parts}", highlight=False, soft_wrap=True)


def _flag(text: str, good: bool) -> str:
    return f"[green]{text}[/]" if good else f"[red]{text}[/]"
