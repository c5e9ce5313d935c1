"""The plots: GB/s against size for the ops, latency and throughput against clients for the service."""

import io
import itertools
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinop.console import out

from .cells import COPY, DOUBLE, IN_ORT, IN_TORCH, Cell, Row, cells_of, providers_of
from .serving.servers import FASTAPI, GRPC, INSTANCES, KSERVE, MODELS, OURS, PROCESSES, REST, UNBATCHED

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
    "quack": {"color": "#00a3a3", "marker": ">"},
    "flashinfer": {"color": "#b03030", "marker": "h"},
}
_ORT_COLORS = ("#8c2f6b", "#b9779f", "#d9b3ca")
_SERVE_COLORS = {
    OURS: "#1f4e9e",
    UNBATCHED: "#0b8a5f",
    INSTANCES: "#8a3fa0",
    PROCESSES: "#c2185b",
    "twinop, CUDA graphs": "#d6569a",  # in a recorded report
    KSERVE: "#c65d21",
    FASTAPI: "#6b6b6b",
}
_SERVE_LINES: Mapping[str, Mapping[str, Any]] = {
    REST: {"marker": "o"},
    GRPC: {"marker": "^", "linestyle": "--"},
}
_SERVE_PANELS = (("p50_ms", "p50, ms"), ("p99_ms", "p99, ms"), ("per_second", "requests per second"))
_LETTERING: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


# ------------------------------------------------------------------------------------------- the ops


def draw_ops(rows: Sequence[Row], machine: str, stem: Path, pages: Sequence[str] = ()) -> None:
    """Draws a report's bandwidths: `stem`-overview.png, or instead `stem`-OP.png for each op of `pages`."""
    cells = [cell for cell in cells_of(rows) if cell.kind == "bandwidth" and cell.dtype != DOUBLE]
    for op in pages:
        _page(op, [cell for cell in cells if cell.op == op], machine, stem)
    if cells and not pages:
        _overview(cells, machine, stem)


def _page(op: str, cells: Sequence[Cell], machine: str, stem: Path) -> None:
    """Draws a panel for each dtype, and a second row of panels for backward."""
    directions = list(dict.fromkeys(cell.direction for cell in cells))
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    size = (2.4 + 4.0 * len(dtypes), 0.5 + 3.4 * len(directions))
    path = stem.with_name(f"{stem.name}-{op}.png")
    with _figure(len(directions), len(dtypes), size, path, sharey="row") as (figure, axes):
        for i, direction in enumerate(directions):
            for j, dtype in enumerate(dtypes):
                _panel(axes[i][j], [c for c in cells if (c.direction, c.dtype) == (direction, dtype)])
                axes[i][j].set_title(f"{direction}, {dtype}")
            axes[i][0].set_ylabel("GB/s, read and written")
        _finish(figure, axes)
        figure.suptitle(f"{op}: {machine}")


def _overview(cells: Sequence[Cell], machine: str, stem: Path) -> None:
    """Draws a small panel for each op: forward, in the first dtype of the report."""
    dtype = cells[0].dtype
    chosen = [cell for cell in cells if cell.direction == "forward" and cell.dtype == dtype]
    ops = list(dict.fromkeys(cell.op for cell in chosen))
    columns = min(len(ops), 4)
    rows = math.ceil(len(ops) / columns)
    path = stem.with_name(f"{stem.name}-overview.png")
    with _figure(rows, columns, (2.6 + 2.9 * columns, 0.8 + 2.3 * rows), path, sharey="row") as (
        figure,
        axes,
    ):
        panels = [axis for line in axes for axis in line]
        for axis, op in zip(panels, ops, strict=False):
            mine = [cell for cell in chosen if cell.op == op]
            best = _fastest_of_ort(mine)
            hidden = {n for n in providers_of(mine) if n.startswith(("ORT", f"{IN_TORCH},", f"{IN_ORT},"))}
            _panel(axis, mine, {best: "ORT built-in"} if best else {}, hidden=hidden - {best})
            axis.set_title(op)
            axis.set_xlabel("")
        for axis in panels[len(ops) :]:
            axis.set_axis_off()
        _finish(figure, axes)
        figure.supylabel("GB/s, read and written", fontsize=9)
        how = "device time, cold L2" if cells[0].device == "cuda" else "wall time"
        figure.suptitle(f"{dtype}, forward, {how}: {machine}")


def _fastest_of_ort(cells: Sequence[Cell]) -> str | None:
    """Returns the fastest provider of ONNX Runtime's own."""
    names = [name for name in providers_of(cells) if name.startswith("ORT")]
    times = {name: sum(cell.us(name) for cell in cells if name in cell.rows) for name in names}
    return min(names, key=times.__getitem__, default=None)


def _panel(
    axis: Any, cells: Sequence[Cell], names: Mapping[str, str] | None = None, hidden: Collection[str] = ()
) -> None:
    """Draws a line for each provider, with the sizes at equal distances, because 4095 is next to 4096."""
    cells = sorted(cells, key=lambda cell: cell.size)
    ort = 0
    for provider in (name for name in providers_of(cells) if name not in hidden):
        points = [(i, cell.gb_per_s(provider)) for i, cell in enumerate(cells) if provider in cell.rows]
        style = {"markersize": 4, "linewidth": 1.1} | dict(_OPS_STYLES.get(provider, {"marker": "s"}))
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
    """Starts each axis at 0 and adds the legend. Call it last, because the axes of a row share limits."""
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)


# ------------------------------------------------------------------------------------------- models


def draw_models(panels: Mapping[str, Mapping[str, float]], machine: str, path: Path) -> None:
    """Draws the report on whole models: a panel for each, with a bar for each column that computes the same.

    Args:
        panels: milliseconds by the model's title and the column.
    """
    across = 3
    down = -(-len(panels) // across)
    with _figure(down, across, (15.5, 2.3 * down), path) as (figure, axes):
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        for axis, (title, columns) in zip(axes.flat, panels.items(), strict=False):
            names = list(columns)[::-1]
            ours = [name.startswith("twinop") for name in names]
            colors = ["#1f4e9e" if mine else "#b5b5b5" for mine in ours]
            drawn = axis.barh(names, [columns[name] for name in names], color=colors)
            axis.bar_label(drawn, fmt=" %.2f", fontsize=8)
            axis.margins(x=0.14)
            name, size = title.split(", ", 1)
            axis.set_title(f"{name}\n{textwrap.fill(size, 56)}", fontsize=9)
            axis.tick_params(labelsize=8)
        figure.suptitle(f"Whole models, ms: {machine}")


# ------------------------------------------------------------------------------------------- the service


def draw_serve(rows: Sequence[Row], machine: str, path: Path) -> None:
    """Draws the serving report: a column of panels for each model, a line for each server and protocol."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    models = [model for model in MODELS if any(row["model"] == model.name for row in rows)]
    clients = sorted({each["clients"] for each in rows})
    size = (1.2 + 3.6 * len(models), 8.0)
    with _figure(len(_SERVE_PANELS), len(models), size, path) as (figure, axes):
        for column, model in enumerate(models):
            for axis, (key, label) in zip(axes[:, column], _SERVE_PANELS, strict=True):
                for server, protocol in itertools.product(_SERVE_COLORS, _SERVE_LINES):
                    wanted = (model.name, server, protocol)
                    chosen = [r for r in rows if (r["model"], r["server"], r["protocol"]) == wanted]
                    points = sorted((each["clients"], each[key]) for each in chosen)
                    if points:
                        style = {"color": _SERVE_COLORS[server], **_SERVE_LINES[protocol]}
                        axis.plot(*zip(*points, strict=True), label=f"{server}, {protocol}", **style)
                axis.set_xscale("log", base=2)
                axis.set_xticks(clients, [str(each) for each in clients])
                axis.xaxis.set_minor_locator(NullLocator())
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(ScalarFormatter())
                axis.grid(alpha=0.25)
                if column == 0:
                    axis.set_ylabel(label)
            axes[0][column].set_title(model.title)
            axes[-1][column].set_xlabel("clients")
        lines = axes[0][0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"The inference service beside plain servers: {machine}, through loopback")


@contextmanager
def _figure(
    rows: int, columns: int, size: tuple[float, float], path: Path, sharey: Any = False
) -> Iterator[Any]:
    """Yields a figure and its axes. Writes the PNG file when the body is done, and says so."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    with plt.rc_context(_LETTERING):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", sharey=sharey
        )
        yield figure, axes
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=110)
        plt.close(figure)
    with Image.open(buffer) as image:
        # A palette makes the file a third as large. The octree keeps the colours of thin lines.
        palette = image.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette.save(path, optimize=True)
    out.print(f"wrote {path}", highlight=False, soft_wrap=True)
