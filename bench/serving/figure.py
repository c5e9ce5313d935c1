"""The serving report's plot: latency and throughput against the number of clients, a column a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinop.bench.serving.models import MODELS
from twinop.bench.serving.servers import FASTAPI, GRAPHS, GRPC, INSTANCES, KSERVE, OURS, REST, UNBATCHED

_STYLES: dict[tuple[str, str], dict[str, Any]] = {
    (OURS, REST): {"color": "#1f4e9e", "marker": "o", "linewidth": 2.0},
    (OURS, GRPC): {"color": "#0b8a5f", "marker": "^", "linewidth": 2.0},
    (UNBATCHED, REST): {"color": "#1f4e9e", "marker": "o", "linestyle": ":"},
    (INSTANCES, REST): {"color": "#8a3fa0", "marker": "v", "linestyle": "--"},
    (GRAPHS, REST): {"color": "#8a3fa0", "marker": "*", "linestyle": "-."},
    (KSERVE, REST): {"color": "#c65d21", "marker": "s"},
    (KSERVE, GRPC): {"color": "#e8a33d", "marker": "D"},
    (FASTAPI, REST): {"color": "#6b6b6b", "marker": "x"},
}
_PANELS = (("p50_ms", "p50, ms"), ("p99_ms", "p99, ms"), ("per_second", "requests a second"))


def draw(rows: Sequence[Mapping[str, Any]], machine: str, path: Path) -> Path:
    """Writes one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator, ScalarFormatter

    models = [model for model in MODELS if any(row["model"] == model.name for row in rows)]
    lettering: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(lettering):
        size = (1.2 + 3.6 * len(models), 8.0)
        grid = (len(_PANELS), len(models))
        figure, axes = plt.subplots(*grid, figsize=size, squeeze=False, layout="constrained")
        for column, model in enumerate(models):
            for row, (key, label) in enumerate(_PANELS):
                axis = axes[row][column]
                for (server, protocol), style in _STYLES.items():
                    points = sorted(
                        (each["clients"], each[key])
                        for each in rows
                        if (each["model"], each["server"], each["protocol"]) == (model.name, server, protocol)
                    )
                    if points:
                        axis.plot(*zip(*points, strict=True), label=f"{server}, {protocol}", **style)
                clients = sorted({each["clients"] for each in rows})
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
        figure.legend(
            *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
        )
        figure.suptitle(f"The inference service beside plain servers: {machine}, through loopback")
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path
