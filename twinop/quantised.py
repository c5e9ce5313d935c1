"""Which weights of ONNX Runtime's MatMulNBits `linear_q` reads. Needs numpy only."""

from typing import Any

import numpy as np

BITS, BLOCKS = (4, 8), (32, 128)


def why_not(n: int, k: int, bits: int, block: int, zero_points: Any = np.uint8) -> str:
    """Returns why `linear_q` has no kernel for such a weight, or "" if it has one.

    Args:
        n, k: the attributes N and K of MatMulNBits.
        zero_points: their dtype; uint8 where there are none.
    """
    if bits not in BITS:
        return f"weights of {bits} bits; linear_q has those of 4 and 8"
    if block not in BLOCKS:
        return f"blocks of {block}; linear_q has those of 32 and 128"
    if zero_points != np.uint8:
        return f"zero points of {np.dtype(zero_points).name}; linear_q has those of uint8"
    if n % 8 != 0 or k % 32 != 0:
        return f"N = {n} and K = {k}; linear_q needs multiples of 8 and 32"
    return ""
