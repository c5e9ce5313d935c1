"""Tables and plots of measurements.

python lab/draw.py lab/results/serve-nvidia-h200.jsonl --plot serve.png
"""

import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.models import ROWS, milliseconds
from twinop.bench.measurements import machine_title, read
from twinop.cli.console import clear_errors

FLOOR = "the memory's time"
DECODERS = {"twinop in ORT": "b-o", "ORT": "C1-s", "torch.compile": "C2D", FLOOR: "k--"}
SERVE = {"p50_ms": "p50, ms", "p99_ms": "p99, ms", "per_second": "requests per second"}


def medians(line: dict[str, Any]) -> dict[str, float]:
    """Returns the times of a line by provider."""
    times = {name: each.get("median_us", each.get("p50_ms")) for name, each in line["times"].items()}
    return times | ({FLOOR: line["floor_us"]} if "floor_us" in line else {})


def draw_models(lines: list[dict[str, Any]], plt: Any) -> None:
    """Draws a panel for each model, with a bar for each column that computes the same."""
    rows = -(-len(lines) // 3)
    _, axes = plt.subplots(rows, 3, figsize=(15.5, 2.3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(lines) :]:
        axis.axis("off")
    for axis, line in zip(axes.flat, lines, strict=False):
        ms = dict(reversed(milliseconds(line).items()))
        colors = ["#1f4e9e" if name.startswith("twinop") else "#b5b5b5" for name in ms]
        axis.bar_label(axis.barh(list(ms), list(ms.values()), color=colors), fmt=" %.2f", fontsize=8)
        axis.margins(x=0.14)
        axis.set_title(textwrap.fill(ROWS[line["op"]].title, 56), fontsize=9)


def draw_serve(lines: list[dict[str, Any]], plt: Any) -> None:
    """Draws a column of panels for each model, with a line for each server and protocol."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    size = (1.2 + 3.6 * len(models), 8.0)
    figure, axes = plt.subplots(3, len(models), figsize=size, squeeze=False, layout="constrained")
    for column, model in enumerate(models):
        mine = sorted((line for line in lines if line["model"] == model), key=lambda line: line["clients"])
        for axis, (key, label) in zip(axes[:, column], SERVE.items(), strict=True):
            for way in (way for way in mine[0]["times"] if "," in way):
                style = "--^" if way.endswith("gRPC") else "-o"
                points = [(line["clients"], line["times"][way][key]) for line in mine if way in line["times"]]
                axis.plot(*zip(*points, strict=True), style, label=way)
            axis.set(xscale="log", yscale="log", ylabel=label, xlabel="clients", title=model)
            axis.set_xticks([line["clients"] for line in mine], [str(line["clients"]) for line in mine])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def draw_decoders(lines: list[dict[str, Any]], plt: Any) -> None:
    """Draws a panel for each context of each model and dtype."""
    panels: dict[str, dict[int, dict[int, dict[str, float]]]] = {}
    for line in lines:
        if "x" not in line["shape"] or "genai" in line["op"]:
            continue
        batch, context = map(int, line["shape"].split("x"))
        panels.setdefault(f"{line['op']}, {line['dtype']}", {}).setdefault(context, {})[batch] = medians(line)
    cells = [(title, context) for title in panels for context in sorted(panels[title])]
    columns = max(map(len, panels.values()))
    shape = (-(-len(cells) // columns), columns)
    size = (1.0 + 3.0 * shape[1], 0.8 + 2.5 * shape[0])
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    for axis, (title, context) in zip(axes.flat, cells, strict=False):
        mine = sorted(panels[title][context].items())
        for name, style in DECODERS.items():
            points = [(i, times[name]) for i, (_, times) in enumerate(mine) if name in times]
            axis.plot(*(zip(*points, strict=True) if points else ((), ())), style, label=name, markersize=4)
        axis.set_xticks(range(len(mine)), [str(batch) for batch, _ in mine])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{title}, {context:,} key{'s' * (context != 1)}", fontsize=9)
        axis.set_xlabel("sequences", fontsize=8)
    figure.supylabel("us a step")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, 2 * columns)
    )


DRAWN = {"models": draw_models, "serve": draw_serve, "decoder-tokens": draw_decoders}


def main(
    file: Annotated[Path, typer.Argument(help="A file of measurements.")],
    plot: Annotated[Path | None, typer.Option(help=f"A PNG file to draw: of {', '.join(DRAWN)}.")] = None,
) -> None:
    """Print a file of measurements as a table, a row for each cell and a column for each provider.

    The values are medians in microseconds, or in milliseconds of the service. It needs pandas.
    """
    with clear_errors():
        import pandas

        lines = read(file)
        labels = ("op", "model", "time", "clients", "dtype", "shape")
        cells = pandas.DataFrame([{name: line[name] for name in labels if name in line} for line in lines])
        table = pandas.DataFrame(map(medians, lines), index=pandas.MultiIndex.from_frame(cells))
        print(table.to_string(float_format="%.5g", na_rep=""))
        if plot is not None:
            import matplotlib.pyplot as plt

            DRAWN[lines[0]["benchmark"]](lines, plt)
            plt.suptitle(machine_title(lines[0]))
            plt.savefig(plot, dpi=110)


if __name__ == "__main__":
    typer.run(main)
