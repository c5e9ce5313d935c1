"""Bandwidth against size, one line per provider."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# One hue for twinop, greys and a second hue for the others; dashes are ceilings.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "torch copy_": {"color": "black", "linestyle": "--", "linewidth": 1.6},
    "twinop in ORT": {"color": "#0b6e4f", "marker": "o"},
    "twinop in ORT, vec4": {"color": "#3fa37c", "marker": "^"},
    "twinop in ORT, scalar": {"color": "#9bd3bb", "marker": "v"},
    "twinop in torch": {"color": "#1f4e9e", "marker": "o"},
    "twinop in torch, vec4": {"color": "#5b86cf", "marker": "^"},
    "twinop in torch, scalar": {"color": "#aac3ee", "marker": "v"},
    "torch eager": {"color": "#c65d21", "marker": "s"},
    "torch.compile": {"color": "#e8a33d", "marker": "D"},
    "ORT Relu": {"color": "#8c2f6b", "marker": "s"},
}


def plot(rows: Sequence[Mapping[str, Any]], title: str, stem: Path) -> list[Path]:
    """Writes `stem`.svg and `stem`.png: a panel per dtype. Rows have dtype, provider, elements, gb_per_s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    providers = [name for name in _STYLES if any(row["provider"] == name for row in rows)]
    style: Any = {
        "svg.hashsalt": "twinop",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, len(dtypes), figsize=(1.9 + 4.2 * len(dtypes), 4.2), sharey=True, squeeze=False
        )
        for axis, dtype in zip(axes[0], dtypes, strict=True):
            for provider in providers:
                points = sorted(
                    (row["elements"], row["gb_per_s"])
                    for row in rows
                    if row["dtype"] == dtype and row["provider"] == provider
                )
                options = {"markersize": 3.5, "linewidth": 1.2} | dict(_STYLES[provider])
                if points:
                    axis.plot(*zip(*points, strict=True), label=provider, **options)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(dtype)
            axis.set_xlabel("elements")
            axis.grid(alpha=0.25)
        axes[0][0].set_ylabel("GB/s, read and written")
        lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
        figure.suptitle(title)
        figure.set_layout_engine("constrained")
        paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
        plt.close(figure)
    return paths
