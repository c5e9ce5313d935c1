"""The tables of an ops report: the speed of every provider, and what was not measured."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from twinop.cli.console import out

from .cells import COPY, OURS, Cell, providers_of
from .measurements import BenchError

REGRESSION = 0.03
HIDDEN_US = 500  # the read and the memset before each run take at least this long on an H200


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each op, direction and dtype (a column per shape), then what was not measured."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    missing: dict[tuple[str, str], Counter[str]] = {}
    for cell in map(Cell, lines):
        groups.setdefault((cell.device, cell.op, cell.direction, cell.dtype), []).append(cell)
        for provider, reason in cell.line["missing"].items():
            missing.setdefault((provider, reason), Counter())[cell.op] += 1
    for (device, op, direction, dtype), cells in groups.items():
        on_cpu = device == "cpu"
        what = "microseconds on the CPU" if on_cpu else "GB/s (share of the copy; *: the host was late)"
        cells.sort(key=lambda cell: cell.size)
        backward = " backward" if direction == "backward" else ""
        table = Table("", title=f"{op}{backward}, {dtype}: {what}", title_justify="left")
        for cell in cells:
            table.add_column(cell.shape, justify="right", no_wrap=True)
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
    if cell.device == "cpu":
        return f"{us:.1f}"
    late = cell.times[provider].get("host_us", 0) > HIDDEN_US
    share = f" ({cell.us(COPY) / us:.2f})" if provider != COPY and COPY in cell.times else ""
    return f"{cell.gb_per_s(provider):.0f}{'*' * late}{share}"


def is_slower(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> bool:
    """Prints which of twinop's cells are slower than before, by more than 3 % and both tolerances.

    Raises:
        BenchError: they have no cell in common.
    """
    before = {cell.key: cell for cell in map(Cell, old)}
    compared, slower = 0, 0
    for cell in map(Cell, new):
        was = before.get(cell.key, cell)
        for name in OURS:
            if cell.key not in before or name not in cell.times or name not in was.times:
                continue
            compared += 1
            ratio = cell.us(name) / was.us(name)
            if ratio > 1 + max(REGRESSION, cell.tolerance, was.tolerance):
                slower += 1
                said = f"slower: {name}, {' '.join(cell.key)}: {was.us(name):.2f} us, now {cell.us(name):.2f}"
                out.print(said, soft_wrap=True)
    if not compared:
        raise BenchError("the two reports have no cell in common: nothing is compared")
    out.print(f"{compared} cells compared, {slower} slower by more than 3 %")
    return slower > 0
