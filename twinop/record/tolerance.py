"""Compares the results of two ways to compute one thing: kernels, function bodies, torch."""

from math import inf
from typing import Any

import ml_dtypes
import numpy as np

from .dtypes import to_array

TOLERANCE = {
    "float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2, "float8_e4m3fn": 0.13,
    "float8_e5m2": 0.26,
}  # fmt: skip
"""The largest accepted `difference` by dtype. Two implementations may sum in different orders."""

NOISE_FACTOR = 2.0
"""How many times the change is accepted that the last bits of inputs make in the reference (`nudged`)."""
MAX_USABLE_ERROR = 0.1
"""A change by the last bits with which numbers are of no use."""


def scale_of(reference: Any) -> float:
    """Returns the largest finite |reference|, at least the smallest normal number; 0 without a tolerance."""
    reference = to_array(reference)
    if reference.dtype.name not in TOLERANCE:
        return 0.0
    finite = np.abs(reference[np.isfinite(reference)].astype(np.float64))
    return float(finite.max(initial=ml_dtypes.finfo(reference.dtype).smallest_normal))


def difference(reference: Any, value: Any, least: float = 0.0) -> float:
    """Returns the largest |reference - value| as a share of the largest |reference|, see `scale_of`.

    What counts as the largest is at least `least`. The result is infinite if shapes, dtypes, NaNs or
    infinities differ. For a dtype that is not in `TOLERANCE` it is 0 or infinite. Both are numpy arrays or
    torch tensors.
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
    largest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return largest / max(scale_of(reference), least)


def accepted(dtype: str, noise: float = 0.0, scale: float = 1.0) -> float:
    """Returns the largest accepted `difference`.

    `noise` is the reference's own `difference` for `nudged` inputs. Numbers of a reference of this scale that
    are mere noise must be small beside 1.
    """
    least = TOLERANCE.get(dtype, 0.0)
    if noise == inf:
        return least
    return max(
        least, NOISE_FACTOR * noise if noise <= MAX_USABLE_ERROR else min(NOISE_FACTOR * noise, least / scale)
    )


def described_error(reference: Any, error: float, limit: float, least: float = 0.0) -> str:
    """Returns a `difference` that is not accepted, in words."""
    reference = to_array(reference)
    if reference.dtype.name not in TOLERANCE:
        return "they are not equal"
    if error == inf:
        return "NaN or infinities are not at the same places"
    scale, finite = max(scale_of(reference), least), np.abs(reference[np.isfinite(reference)])
    largest = f"the largest value is {float(finite.max(initial=0)):.1e}"
    return f"error {error * scale:.1e} where {largest}, accepted {limit * scale:.1e}"


def nudged(array: np.ndarray, by: float = 0.0, zeros: bool = False) -> np.ndarray:
    """Changes the last bits of numbers: a result that depends on them is not certain.

    They change by the share `by`, by default four units of the last place; `zeros` become tiny numbers.
    """
    if array.dtype.name not in TOLERANCE:
        return array
    limits, wide = ml_dtypes.finfo(array.dtype), array.astype(np.float64)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], array.shape)
    near = wide * (1 + signs * (by or 4 * float(limits.eps)))
    if zeros:
        near = np.where(wide == 0, signs * float(limits.smallest_normal), near)
    near = np.clip(near, float(limits.min), float(limits.max))
    return np.asarray(np.where(np.isfinite(wide), near, wide)).astype(array.dtype)


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether arrays or tensors have the same bits, also of zeros. All NaNs count as equal."""
    a, b = to_array(a), to_array(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    number = a == a
    return np.array_equal(number, b == b) and a[number].tobytes() == b[number].tobytes()
