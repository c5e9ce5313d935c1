"""What `twinop bench` shows: tables, what was not measured, regressions, and the plot."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from twinop.cli.console import out

from .measure import AGAIN, BUILT_IN, COPY, IN_ORT, IN_TORCH, OURS
from .measurements import machine_title

_LEAST_TOLERANCE = 0.01
HIDDEN_US = 500  # the read and the memset before each run take at least this long on an H200

# Strong colours for twinop's two runtimes, pale ones for the others, dashes for the copy.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    COPY: {"color": "black", "linestyle": "--", "linewidth": 1.4, "marker": "", "zorder": 1},
    IN_TORCH: {"color": "#1f4e9e", "marker": "o", "linewidth": 2.0, "zorder": 4},
    IN_ORT: {"color": "#0b8a5f", "marker": "^", "linewidth": 2.0, "zorder": 3},
    "torch eager": {"color": "#c65d21"},
    "torch.compile": {"color": "#e8a33d", "marker": "D"},
    BUILT_IN: {"color": "#8c2f6b"},
}


class Cell:
    """One op in one direction on one shape and dtype: a line of an ops report."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.line, self.times, self.device = line, line["times"], line["device"]
        self.key = self.op, self.direction, self.dtype, self.shape = tuple(
            str(line[name]) for name in ("op", "direction", "dtype", "shape")
        )

    @property
    def size(self) -> int:
        """The position on a plot's axis: columns of a row-wise op, else elements."""
        last = self.shape.split("x")[-1]
        return 1 << int(last[2:]) if last.startswith("2^") else int(last)

    @property
    def tolerance(self) -> float:
        """The largest relative difference between a run and its repetition, at least 1 %."""
        pairs = [(name, name + AGAIN) for name in self.times if name + AGAIN in self.times]
        spread = [abs(self.us(again) / self.us(name) - 1) for name, again in pairs]
        return max([_LEAST_TOLERANCE, *spread])

    def us(self, provider: str) -> float:
        """The median time in microseconds."""
        return float(self.times[provider]["median_us"])

    def gb_per_s(self, provider: str) -> float:
        return float(self.line["bytes"]) * 1e-3 / self.us(provider)


def providers_of(cells: Sequence[Cell]) -> list[str]:
    """Lists the copy, then twinop, then the others, without repetitions."""
    names = dict.fromkeys(name for cell in cells for name in cell.times if not name.endswith(AGAIN))
    return sorted(names, key=lambda name: (name != COPY, name not in OURS, not name.startswith("twinop")))


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each op, direction and dtype (a column per shape), then what was not measured."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    missing: dict[tuple[str, str], Counter[str]] = {}
    for cell in map(Cell, lines):
        groups.setdefault((cell.op, cell.direction, cell.dtype), []).append(cell)
        for provider, reason in cell.line["missing"].items():
            missing.setdefault((provider, reason), Counter())[cell.op] += 1
    for (op, direction, dtype), cells in groups.items():
        on_cpu = cells[0].device == "cpu"
        what = "microseconds on the CPU" if on_cpu else "GB/s (share of the copy; *: the host was late)"
        cells.sort(key=lambda cell: cell.size)
        backward = " backward" if direction == "backward" else ""
        table = Table("", title=f"{op}{backward}, {dtype}: {what}", title_justify="left")
        for cell in cells:
            table.add_column(cell.shape, justify="right", no_wrap=True)
        for provider in providers_of(cells):
            style = "green" if provider in OURS else None
            texts = (_text(cell, provider) for cell in cells)
            table.add_row(provider, *texts, end_section=provider == COPY, style=style)
        table.add_row("tolerance", *(f"{cell.tolerance:.1%}" for cell in cells))
        out.print(table)
    for (provider, reason), ops in missing.items():
        which = ", ".join(f"{op} ({count})" for op, count in ops.items())
        out.print(f"not measured: {provider}: {which}: {reason}", soft_wrap=True)


def _text(cell: Cell, provider: str) -> str:
    if provider not in cell.times:
        return ""
    us = cell.us(provider)
    if cell.device == "cpu":
        return f"{us:.1f}"
    late = cell.times[provider].get("host_us", 0) > HIDDEN_US
    share = f" ({cell.us(COPY) / us:.2f})" if provider != COPY and COPY in cell.times else ""
    return f"{cell.gb_per_s(provider):.0f}{'*' * late}{share}"


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws forward bandwidths against size in the first dtype of the lines: a panel for each op."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels: dict[str, list[Cell]] = {}
    for cell in map(Cell, lines):
        if cell.direction == "forward" and cell.dtype == lines[0]["dtype"]:
            panels.setdefault(cell.op, []).append(cell)
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(2.6 + 2.9 * columns, 0.8 + 2.3 * rows), layout="constrained")
        for number, (name, cells) in enumerate(panels.items(), 1):
            _panel(figure.add_subplot(rows, columns, number, title=name), cells)
        drawn = {str(line.get_label()): line for axis in figure.axes for line in axis.get_lines()}
        figure.legend(drawn.values(), drawn.keys(), loc="outside right center", frameon=False)
        figure.supylabel("GB/s, read and written", fontsize=9)
        figure.supxlabel("elements, or columns of row-wise ops", fontsize=9)
        how = "device time, cold L2" if lines[0]["device"] == "cuda" else "wall time"
        figure.suptitle(f"{lines[0]['dtype']}, forward, {how}: {machine_title(lines[0])}")
        figure.savefig(path, dpi=110)
    out.print(f"wrote {path}", soft_wrap=True)


def _panel(axis: Any, cells: Sequence[Cell]) -> None:
    """Draws a line for each provider, with the sizes at equal distances, because 4095 is next to 4096."""
    cells = sorted(cells, key=lambda cell: cell.size)
    for provider in providers_of(cells):
        points = [(i, cell.gb_per_s(provider)) for i, cell in enumerate(cells) if provider in cell.times]
        style = {"marker": "s", "markersize": 4, "linewidth": 1.1} | dict(_STYLES.get(provider, {}))
        axis.plot(*zip(*points, strict=True), label=provider, **style)
    is_rows = "x" in cells[0].shape
    labels = [str(cell.size) if is_rows else f"$2^{{{cell.size.bit_length() - 1}}}$" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, rotation=45 if is_rows else 0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
