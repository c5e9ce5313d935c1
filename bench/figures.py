"""The report's plots, as Triton's perf_report draws them: GB/s against size, a line a provider."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinop.bench.cells import COPY, DOUBLE, Cell, providers_of

# twinop's two runtimes in strong colours, peers in pale ones; dashes are the ceiling.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    COPY: {"color": "black", "linestyle": "--", "linewidth": 1.4, "marker": "", "zorder": 1},
    "twinop in torch": {"color": "#1f4e9e", "marker": "o", "linewidth": 2.0, "zorder": 4},
    "twinop in ORT": {"color": "#0b8a5f", "marker": "^", "linewidth": 2.0, "zorder": 3},
    "torch eager": {"color": "#c65d21", "marker": "s"},
    "torch.compile": {"color": "#e8a33d", "marker": "D"},
    "torch.compile max-autotune": {"color": "#a97200", "marker": "d"},
    "Triton": {"color": "#7b5cb8", "marker": "v"},
    "Liger": {"color": "#d6569a", "marker": "P"},
    "load_inline": {"color": "#6b6b6b", "marker": "x"},
    "numba": {"color": "#3f9fc4", "marker": "*"},
    "apex": {"color": "#4d7a1f", "marker": "<"},
    "quack": {"color": "#00a3a3", "marker": ">"},
    "flashinfer": {"color": "#b03030", "marker": "h"},
}
_ORT_COLORS = ("#8c2f6b", "#b9779f", "#d9b3ca")
_LETTERING: Any = {
    "svg.hashsalt": "twinop",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(cells: Sequence[Cell], machine: str, stem: Path) -> list[Path]:
    """Writes `stem`-OP.png for each op, `stem`-overview.png and .svg; returns what it wrote."""
    cells = [cell for cell in cells if cell.kind == "bandwidth" and cell.dtype != DOUBLE]
    paths = []
    for op in dict.fromkeys(cell.op for cell in cells):
        paths.append(_page(op, [cell for cell in cells if cell.op == op], machine, stem))
    if cells:
        paths += _overview(cells, machine, stem)
    return paths


def _page(op: str, cells: Sequence[Cell], machine: str, stem: Path) -> Path:
    """A panel a dtype; a second row of panels for backward."""
    directions = list(dict.fromkeys(cell.direction for cell in cells))
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    shape = (len(directions), len(dtypes))
    with _figure(*shape, (2.4 + 4.0 * len(dtypes), 0.5 + 3.4 * len(directions))) as (plt, figure, axes):
        for i, direction in enumerate(directions):
            for j, dtype in enumerate(dtypes):
                chosen = [c for c in cells if (c.direction, c.dtype) == (direction, dtype)]
                _panel(axes[i][j], chosen)
                axes[i][j].set_title(f"{direction}, {dtype}")
            axes[i][0].set_ylabel("GB/s, read and written")
        _finish(figure, axes)
        figure.suptitle(f"{op}: {machine}")
        path = stem.with_name(f"{stem.name}-{op}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path


def _overview(cells: Sequence[Cell], machine: str, stem: Path) -> list[Path]:
    """A small panel an op: forward, in the first dtype that was measured."""
    dtype = cells[0].dtype
    chosen = [cell for cell in cells if cell.direction == "forward" and cell.dtype == dtype]
    ops = list(dict.fromkeys(cell.op for cell in chosen))
    columns = min(len(ops), 4)
    rows = math.ceil(len(ops) / columns)
    with _figure(rows, columns, (2.6 + 2.9 * columns, 0.8 + 2.3 * rows)) as (plt, figure, axes):
        panels = [axis for line in axes for axis in line]
        for axis, op in zip(panels, ops, strict=False):
            mine = [cell for cell in chosen if cell.op == op]
            best = _stock(mine)
            others = {name for name in providers_of(mine) if name.startswith("ORT") and name != best}
            _panel(axis, mine, {best: "ORT built-in"} if best else {}, hidden=others)
            axis.set_title(op)
            axis.set_xlabel("")
        for axis in panels[len(ops) :]:
            axis.set_axis_off()
        _finish(figure, axes)
        figure.supylabel("GB/s, read and written", fontsize=9)
        figure.suptitle(f"{dtype}, forward, device time, cold L2: {machine}")
        paths = [stem.with_name(f"{stem.name}-overview{suffix}") for suffix in (".svg", ".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=110)
        plt.close(figure)
    return paths


def _stock(cells: Sequence[Cell]) -> str | None:
    """The fastest of ONNX Runtime's own, where it is measured."""
    names = [name for name in providers_of(cells) if name.startswith("ORT")]
    return min(
        names, key=lambda name: sum(cell.us(name) for cell in cells if name in cell.rows), default=None
    )


def _panel(
    axis: Any,
    cells: Sequence[Cell],
    names: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> None:
    """Sizes at equal distances, the smallest first: 4095 and 4096 columns lie apart."""
    cells = sorted(cells, key=lambda cell: cell.size)
    ort = 0
    for provider in (name for name in providers_of(cells) if name not in hidden):
        points = [(i, c.rows[provider]["gb_per_s"]) for i, c in enumerate(cells) if provider in c.rows]
        style = {"markersize": 4, "linewidth": 1.1} | dict(_STYLES.get(provider, {"marker": "s"}))
        if provider.startswith("ORT"):
            style["color"] = _ORT_COLORS[ort % len(_ORT_COLORS)]
            ort += 1
        axis.plot(*zip(*points, strict=True), label=(names or {}).get(provider, provider), **style)
    rows = bool(cells) and cells[0].family == "rows"
    labels = [str(cell.size) if rows else f"$2^{{{cell.size.bit_length() - 1}}}$" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, rotation=45 if rows else 0)
    axis.grid(alpha=0.25)
    axis.set_xlabel("columns" if rows else "elements")


def _finish(figure: Any, axes: Any) -> None:
    """Once all lines are drawn: the axes of a row share their limits."""
    for row in axes:
        for axis in row:
            axis.set_ylim(bottom=0)
    lines = {line.get_label(): line for row in axes for axis in row for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)


@contextmanager
def _figure(rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_LETTERING):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", sharey="row"
        )
        yield plt, figure, axes
