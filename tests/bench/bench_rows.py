"""A line of measurements."""

from collections.abc import Mapping
from typing import Any

from twinop.bench.measure import IN_TORCH
from twinop.bench.providers import EAGER

COPY = {"torch copy_": 100.0, "torch copy_ again": 100.5}
FAST = COPY | {IN_TORCH: 100.0, EAGER: 130.0}


def line_of(
    times: Mapping[str, float], op: str = "relu", shape: str = "2^28", **other: Any
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "benchmark": "ops",
        "op": op,
        "family": "rows" if "x" in shape else "unary",
        "direction": "forward",
        "dtype": "bfloat16",
        "shape": shape,
        "bytes": 1 << 30,
        "missing": {},
        "machine": "NVIDIA H200",
        "device": "cuda",
        "cpu_cores": 1,
        "commit": "abc",
    }
    measured = {name: {"median_us": us, "low_us": us, "runs": 9} for name, us in times.items()}
    return line | other | {"times": measured}
