"""The plots: GB/s against size."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinop.console import out

from .cells import COPY, DOUBLE, IN_ORT, IN_TORCH, Cell, providers_of

# Strong colours for twinop's two runtimes, pale ones for peers, dashes for the copy.
_OPS_STYLES: Mapping[str, Mapping[str, Any]] = {
    COPY: {"color": "black", "linestyle": "--", "linewidth": 1.4, "marker": "", "zorder": 1},
    IN_TORCH: {"color": "#1f4e9e", "marker": "o", "linewidth": 2.0, "zorder": 4},
    IN_ORT: {"color": "#0b8a5f", "marker": "^", "linewidth": 2.0, "zorder": 3},
    "torch eager": {"color": "#c65d21", "marker": "s"},
    "torch.compile": {"color": "#e8a33d", "marker": "D"},
    "torch.compile max-autotune": {"color": "#a97200", "marker": "d"},
    "Triton": {"color": "#7b5cb8", "marker": "v"},
    "Liger": {"color": "#d6569a", "marker": "P"},
}
_ORT_COLORS = ("#8c2f6b", "#b9779f", "#d9b3ca")
_LETTERING: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw_ops(lines: Sequence[Mapping[str, Any]], machine: str, stem: Path, pages: Sequence[str] = ()) -> None:
    """Draws bandwidths: `stem`-overview.png, or instead `stem`-OP.png for each op of `pages`.

    The overview has a small panel for each op: forward, in the first dtype of the file. A page has a panel
    for each direction and dtype.
    """
    cells = [cell for cell in map(Cell, lines) if cell.kind == "bandwidth" and cell.dtype != DOUBLE]
    for op in pages:
        mine = [cell for cell in cells if cell.op == op]
        dtypes = {cell.dtype for cell in mine}
        _draw(
            _grouped(mine, lambda cell: f"{cell.direction}, {cell.dtype}"),
            (len(dtypes), 4.0, 3.4),
            f"{op}: {machine}",
            stem.with_name(f"{stem.name}-{op}.png"),
        )
    if cells and not pages:
        dtype = cells[0].dtype
        panels = _grouped(
            [cell for cell in cells if cell.direction == "forward" and cell.dtype == dtype],
            lambda cell: cell.op,
        )
        how = "device time, cold L2" if cells[0].device == "cuda" else "wall time"
        _draw(
            {op: _one_of_ort(mine) for op, mine in panels.items()},
            (min(len(panels), 4), 2.9, 2.3),
            f"{dtype}, forward, {how}: {machine}",
            stem.with_name(f"{stem.name}-overview.png"),
        )


def _grouped(cells: Sequence[Cell], name: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(name(cell), []).append(cell)
    return found


def _one_of_ort(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells with the fastest of ONNX Runtime's own ops only, and without variants of ours."""
    names = [name for name in providers_of(cells) if name.startswith("ORT")]
    best = min(names, key=lambda n: sum(c.us(n) for c in cells if n in c.times), default="")
    hidden = {*names, *(name for name in providers_of(cells) if name.startswith("twinop") and "," in name)}
    found = []
    for cell in cells:
        times = {name: time for name, time in cell.times.items() if name not in hidden}
        times |= {"ORT built-in": cell.times[best]} if best in cell.times else {}
        found.append(Cell({**cell.line, "times": times}))
    return found


def _panel(axis: Any, cells: Sequence[Cell]) -> None:
    """Draws a line for each provider, with the sizes at equal distances, because 4095 is next to 4096."""
    cells = sorted(cells, key=lambda cell: cell.size)
    ort = itertools.cycle(_ORT_COLORS)
    for provider in providers_of(cells):
        points = [(i, cell.gb_per_s(provider)) for i, cell in enumerate(cells) if provider in cell.times]
        style = {"markersize": 4, "linewidth": 1.1} | dict(_OPS_STYLES.get(provider, {"marker": "s"}))
        style |= {"color": next(ort)} if provider.startswith("ORT") else {}
        axis.plot(*zip(*points, strict=True), label=provider, **style)
    rows = cells[0].family == "rows"
    labels = [str(cell.size) if rows else f"$2^{{{cell.size.bit_length() - 1}}}$" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, rotation=45 if rows else 0)
    axis.grid(alpha=0.25)


def _draw(
    panels: Mapping[str, Sequence[Cell]], grid: tuple[int, float, float], title: str, path: Path
) -> None:
    """Writes a PNG file with these panels; `grid` is their number in a row, and the size of one in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, width, height = grid
    rows = math.ceil(len(panels) / columns)
    with plt.rc_context(_LETTERING):
        size = (2.6 + width * columns, 0.8 + height * rows)
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
