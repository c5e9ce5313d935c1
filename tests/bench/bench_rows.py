"""Returns the rows that a measurement adds to a report."""

from collections.abc import Mapping
from typing import Any

from twinop.bench.cells import IN_TORCH
from twinop.bench.providers import EAGER

COPY = {"torch copy_": 100.0, "torch copy_ again": 100.5}
FAST = COPY | {IN_TORCH: 100.0, EAGER: 130.0}


def rows_of(
    times: Mapping[str, float], op: str = "relu", shape: str = "2^28", **other: Any
) -> list[dict[str, Any]]:
    family = "rows" if "x" in shape else "unary"
    row = {
        "kind": "bandwidth",
        "device": "cuda",
        "op": op,
        "family": family,
        "direction": "forward",
        "dtype": "bfloat16",
        "shape": shape,
        "aligned": True,
        "bytes": 1 << 30,
        "runs": 9,
    }
    return [row | other | {"provider": name, "median_us": us, "low_us": us} for name, us in times.items()]
