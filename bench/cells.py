"""Measured rows, looked at by cell: who is how fast, and how sure that is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

COPY = "torch copy_"
AGAIN = " again"  # the same run a second time in the round: what the two differ by is noise
IN_TORCH, IN_ORT = "twinop in torch", "twinop in ORT"
OURS = (IN_TORCH, IN_ORT)
LEAST_TOLERANCE = 0.01

Row = Mapping[str, Any]


DOUBLE = "float64"
"""Element-wise, where its arithmetic may be the limit: measured beside torch's own alone, without a bar."""


@dataclass
class Cell:
    """One op on one shape: the rows of all providers."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in ("kind", "device", "op", "family", "direction", "dtype", "shape", "aligned"):
            return self.first[name]
        raise AttributeError(name)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(self.first[name]) for name in ("kind", "op", "direction", "dtype", "shape"))

    @property
    def name(self) -> str:
        backward = " backward" if self.direction == "backward" else ""
        return f"{self.op}{backward}, {self.dtype}, {self.shape}"

    @property
    def size(self) -> int:
        """For the plots' axis: columns of a row-wise op, else elements."""
        last = self.shape.split("x")[-1]
        return 1 << int(last[2:]) if last.startswith("2^") else int(last)

    @cached_property
    def tolerance(self) -> float:
        """The largest difference between a run and the same run again, or 1 %."""
        pairs = [(name, name + AGAIN) for name in self.rows if name + AGAIN in self.rows]
        spread = [abs(self.us(again) / self.us(name) - 1) for name, again in pairs]
        return max([LEAST_TOLERANCE, *spread])

    def us(self, provider: str) -> float:
        return float(self.rows[provider]["median_us"]) if provider in self.rows else float("nan")

    @property
    def peers(self) -> list[str]:
        """Who is no part of twinop and no copy."""
        return [
            name
            for name in self.rows
            if name not in OURS and not name.startswith(COPY) and not name.endswith(AGAIN)
        ]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=self.us, default=None)

    def share(self, provider: str) -> float:
        """Of the copy's speed, on as many bytes."""
        return self.us(COPY) / self.us(provider)


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    found: dict[tuple[Any, ...], Cell] = {}
    for row in rows:
        key = tuple(row[name] for name in ("kind", "device", "op", "direction", "dtype", "shape"))
        found.setdefault(key, Cell(row)).rows[row["provider"]] = row
    return list(found.values())


def providers_of(cells: Sequence[Cell]) -> list[str]:
    """Ours first, then the others, without those that were only timed again."""
    names = dict.fromkeys(name for cell in cells for name in cell.rows if not name.endswith(AGAIN))
    return sorted(names, key=lambda name: (name != COPY, name not in OURS))
