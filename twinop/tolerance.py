"""Compares the results of two ways to compute one thing: kernels, function bodies, torch."""

from typing import Any

import numpy as np

from .dtypes import to_array

TOLERANCE = {
    "float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2, "float8_e4m3fn": 0.13,
    "float8_e5m2": 0.26,
}  # fmt: skip
"""The largest accepted `difference` by dtype. Two implementations may sum in different orders."""


def difference(reference: Any, value: Any) -> float:
    """Returns the largest |reference - value|, divided by the largest |reference| or by 1 if that is larger.

    The result is infinite if shapes, dtypes, NaNs or infinities differ. For a dtype that is not in
    `TOLERANCE` it is 0 or infinite.

    Args:
        reference, value: numpy arrays or torch tensors.
    """
    reference, value = to_array(reference), to_array(value)
    if reference.dtype != value.dtype or reference.shape != value.shape:
        return float("inf")
    if reference.dtype.name not in TOLERANCE:
        return 0.0 if np.array_equal(reference, value) else float("inf")
    a, b = reference.astype(np.float64), value.astype(np.float64)
    finite = np.isfinite(a)
    if not (
        np.array_equal(finite, np.isfinite(b)) and np.array_equal(a[~finite], b[~finite], equal_nan=True)
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1.0))


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two arrays have the same bits, the sign of zero included. All NaNs count as equal.

    Args:
        a, b: numpy arrays or torch tensors.
    """
    a, b = to_array(a), to_array(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    number = a == a
    return np.array_equal(number, b == b) and a[number].tobytes() == b[number].tobytes()
