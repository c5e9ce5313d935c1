"""How far two ways of computing the same model may be apart: with kernels, with function bodies, in torch."""

import numpy as np

# Largest accepted |difference| / max(1, |reference's largest|): other operators sum in another order.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


def difference(reference: np.ndarray, value: np.ndarray) -> float:
    """The difference in the measure of `TOLERANCE`; infinite if shapes, NaNs or infinities differ.

    Of what is no floating-point number: 0 if all is equal, else infinite.
    """
    if reference.dtype != value.dtype or reference.shape != value.shape:
        return float("inf")
    if reference.dtype.name not in TOLERANCE:
        return 0.0 if np.array_equal(reference, value) else float("inf")
    a, b = reference.astype(np.float64), value.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1.0))
