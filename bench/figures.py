"""The plot: GB/s against size."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinop.cli.console import out

from .cells import BUILT_IN, COPY, IN_ORT, IN_TORCH, Cell, providers_of
from .measurements import machine_title

# Strong colours for twinop's two runtimes, pale ones for the others, dashes for the copy.
_OPS_STYLES: Mapping[str, Mapping[str, Any]] = {
    COPY: {"color": "black", "linestyle": "--", "linewidth": 1.4, "marker": "", "zorder": 1},
    IN_TORCH: {"color": "#1f4e9e", "marker": "o", "linewidth": 2.0, "zorder": 4},
    IN_ORT: {"color": "#0b8a5f", "marker": "^", "linewidth": 2.0, "zorder": 3},
    "torch eager": {"color": "#c65d21", "marker": "s"},
    "torch.compile": {"color": "#e8a33d", "marker": "D"},
    BUILT_IN: {"color": "#8c2f6b", "marker": "s"},
}
_LETTERING: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw_ops(lines: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Draws `stem`-overview.png: forward bandwidths in the first dtype of the file, a panel for each op."""
    cells = [cell for cell in map(Cell, lines) if cell.direction == "forward"]
    if not cells:
        return
    dtype = cells[0].dtype
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.dtype == dtype:
            panels.setdefault(cell.op, []).append(cell)
    how = "device time, cold L2" if cells[0].device == "cuda" else "wall time"
    _draw(
        panels,
        f"{dtype}, forward, {how}: {machine_title(lines[0])}",
        stem.with_name(f"{stem.name}-overview.png"),
    )


def _panel(axis: Any, cells: Sequence[Cell]) -> None:
    """Draws a line for each provider, with the sizes at equal distances, because 4095 is next to 4096."""
    cells = sorted(cells, key=lambda cell: cell.size)
    for provider in providers_of(cells):
        points = [(i, cell.gb_per_s(provider)) for i, cell in enumerate(cells) if provider in cell.times]
        style = {"markersize": 4, "linewidth": 1.1} | dict(_OPS_STYLES.get(provider, {"marker": "s"}))
        axis.plot(*zip(*points, strict=True), label=provider, **style)
    rows = cells[0].family == "rows"
    labels = [str(cell.size) if rows else f"$2^{{{cell.size.bit_length() - 1}}}$" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, rotation=45 if rows else 0)
    axis.grid(alpha=0.25)


def _draw(panels: Mapping[str, Sequence[Cell]], title: str, path: Path) -> None:
    """Writes a PNG file with these panels, four in a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    with plt.rc_context(_LETTERING):
        size = (2.6 + 2.9 * columns, 0.8 + 2.3 * rows)
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", sharey="row"
        )
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (name, cells) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, cells)
            axis.set_title(name)
        for axis in axes.flat:  # last, because the axes of a row share limits
            axis.set_ylim(bottom=0)
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
        figure.supylabel("GB/s, read and written", fontsize=9)
        figure.supxlabel("elements, or columns of row-wise ops", fontsize=9)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)
        plt.close(figure)
    out.print(f"wrote {path}", soft_wrap=True)
