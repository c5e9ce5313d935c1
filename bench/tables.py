"""The tables of an ops report: the speed of every provider, and what was not measured."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from twinop.cli.console import out

from .cells import COPY, OURS, Cell, providers_of

HIDDEN_US = 500  # the read and the memset before each run take at least this long on an H200


def table_of(title: str, columns: Iterable[str]) -> Table:
    """Returns an empty table. The first column is text, the others are numbers."""
    result = Table("", title=title, title_justify="left")
    for column in columns:
        result.add_column(column, justify="right", no_wrap=True)
    return result


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each op, direction and dtype (a column per shape), then what was not measured."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    missing: dict[tuple[str, str], Counter[str]] = {}
    for cell in map(Cell, lines):
        groups.setdefault((cell.device, cell.kind, cell.op, cell.direction, cell.dtype), []).append(cell)
        for provider, reason in cell.line["missing"].items():
            missing.setdefault((provider, reason), Counter())[cell.op] += 1
    for (device, kind, op, direction, dtype), cells in groups.items():
        what = "GB/s (share of the copy; *: the host was late)"
        if device == "cpu":
            what = "microseconds on the CPU"
        elif kind == "latency":
            what = "microseconds per call in a CUDA graph"
        cells.sort(key=lambda cell: cell.size if kind == "bandwidth" else int(cell.shape.split("x")[0]))
        backward = " backward" if direction == "backward" else ""
        table = table_of(f"{op}{backward}, {dtype}: {what}", (cell.shape for cell in cells))
        for provider in providers_of(cells):
            texts = (_text(cell, provider) if provider in cell.times else "" for cell in cells)
            style = "green" if provider in OURS else None
            table.add_row(provider, *texts, end_section=provider == COPY, style=style)
        table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in cells))
        out.print(table)
    for (provider, reason), ops in missing.items():
        which = ", ".join(f"{op} ({count})" for op, count in ops.items())
        said = f"not measured: {provider}: {which}: {reason}"
        out.print(said, soft_wrap=True)


def _text(cell: Cell, provider: str) -> str:
    us = cell.us(provider)
    if cell.device == "cpu" or cell.kind == "latency":
        return f"{us:.1f}" if cell.device == "cpu" else f"{us:.2f}"
    late = cell.times[provider].get("host_us", 0) > HIDDEN_US
    share = f" ({cell.us(COPY) / us:.2f})" if provider != COPY and COPY in cell.times else ""
    return f"{cell.gb_per_s(provider):.0f}{'*' * late}{share}"
