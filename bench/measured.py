"""The measurements of a bandwidth report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from twinop.bench.timing import Time


@dataclass
class Measured:
    """Rows are dicts as they stand in the JSON file."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # provider -> why it was not measured

    def add(self, device: str, dtype: torch.dtype, elements: int, times: Mapping[str, Time]) -> None:
        """Bandwidth counts one read and one write of every element."""
        moved = 2 * elements * dtype.itemsize
        for provider, time in times.items():
            row = {
                "device": device,
                "dtype": name_of(dtype),
                "elements": elements,
                "provider": provider,
                "median_us": round(time.median * 1e6, 3),
                "low_us": round(time.low * 1e6, 3),
                "runs": time.runs,
                "gb_per_s": round(moved / time.median * 1e-9, 2),
            }
            self.rows.append(row)

    def us(self, dtype: str, elements: int, provider: str) -> float:
        """Median time; NaN if it was not measured."""
        wanted = (dtype, elements, provider)
        found = (r for r in self.rows if (r["dtype"], r["elements"], r["provider"]) == wanted)
        return next((float(row["median_us"]) for row in found), float("nan"))

    def ratio(self, dtype: str, elements: int, slower: str, faster: str) -> float:
        """How many times as long `slower` takes."""
        return self.us(dtype, elements, slower) / self.us(dtype, elements, faster)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
