"""What one line of measurements says: the times of an op's providers on one shape and dtype."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

COPY = "torch copy_"
AGAIN = " again"  # the same run, measured twice per round: the difference between the two is noise
IN_TORCH, IN_ORT, BUILT_IN = "twinop in torch", "twinop in ORT", "ORT built-in"
OURS = (IN_TORCH, IN_ORT)
LEAST_TOLERANCE = 0.01


class Cell:
    """One op in one direction on one shape and dtype: a line of an ops report."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self.line, self.times = line, line["times"]

    def __getattr__(self, name: str) -> Any:
        if name in ("device", "op", "family", "direction", "dtype", "shape"):
            return self.line[name]
        raise AttributeError(name)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(self.line[name]) for name in ("op", "direction", "dtype", "shape"))

    @property
    def size(self) -> int:
        """The position on a plot's axis: columns of a row-wise op, else elements."""
        last = self.shape.split("x")[-1]
        return 1 << int(last[2:]) if last.startswith("2^") else int(last)

    @cached_property
    def tolerance(self) -> float:
        """The largest relative difference between a run and its repetition, at least 1 %."""
        pairs = [(name, name + AGAIN) for name in self.times if name + AGAIN in self.times]
        spread = [abs(self.us(again) / self.us(name) - 1) for name, again in pairs]
        return max([LEAST_TOLERANCE, *spread])

    def us(self, provider: str) -> float:
        """The median time in microseconds."""
        return float(self.times[provider]["median_us"])

    def gb_per_s(self, provider: str) -> float:
        return float(self.line["bytes"]) * 1e-3 / self.us(provider)


def providers_of(cells: Sequence[Cell]) -> list[str]:
    """Lists the copy, then twinop, then the others, without repetitions."""
    names = dict.fromkeys(name for cell in cells for name in cell.times if not name.endswith(AGAIN))
    return sorted(names, key=lambda name: (name != COPY, name not in OURS, not name.startswith("twinop")))
