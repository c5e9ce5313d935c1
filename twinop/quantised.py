"""Packs the integer weights of ONNX Runtime's MatMulNBits for `linear_q`. Needs numpy only.

The kernel reads a weight of n rows in groups of 8 rows, and each group in chunks of 512 bytes, which are
512 / bits columns: for each row and each part of 8 columns of a slice of 32, what one thread multiplies.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import TwinopError

BITS, BLOCKS = (4, 8), (32, 128)


@dataclass(frozen=True)
class PackedWeight:
    """The inputs `weight`, `scale` and `zero` of `linear_q`. Without `zero` it is 8, or 128 with 8 bits."""

    weight: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]
    zero: np.ndarray[Any, Any] | None


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


def pack(
    b: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    zero_points: np.ndarray[Any, Any] | None,
    *,
    n: int,
    k: int,
    bits: int,
    block: int,
) -> PackedWeight:
    """Packs what MatMulNBits holds.

    Args:
        b: uint8 [N, blocks of a row, block * bits / 8], the input B. The first of two weights of 4 bits lies
            in the lower half of a byte.
        scales: [N, blocks of a row] in any shape, of any dtype.
        zero_points: uint8 [N, bytes of a row] in any shape, packed as B is.
        n, k, bits, block: the attributes.

    Raises:
        TwinopError: `why_not`, or an array of another size.
    """
    if reason := why_not(n, k, bits, block, np.uint8 if zero_points is None else zero_points.dtype):
        raise TwinopError(f"cannot pack a weight with {reason}")
    blocks = -(-k // block)
    sizes = {"B": (b, n * blocks * block * bits // 8), "scales": (scales, n * blocks)}
    if zero_points is not None:
        sizes["zero_points"] = (zero_points, n * -(-blocks * bits // 8))
    for name, (array, size) in sizes.items():
        if array.size != size:
            raise TwinopError(
                f"{name} has {array.size} elements, expected {size}: N = {n}, K = {k}, {bits} bits, "
                f"blocks of {block}"
            )
    columns = 512 // bits  # of a chunk
    chunks = -(-k // columns)
    codes = np.zeros((n, chunks * columns), np.uint8)
    codes[:, :k] = _integers(b.reshape(n, -1), bits)[:, :k]
    parts = codes.reshape(n // 8, 8, chunks, columns // 32, 4, 8).transpose(0, 2, 1, 4, 3, 5)
    if bits == 4:  # bytes of the columns 0 2, 4 6, 1 3 and 5 7
        apart = parts.reshape(*parts.shape[:-1], 2, 2, 2)
        parts = (apart[..., 0, :] | apart[..., 1, :] << 4).swapaxes(-1, -2)
    zero = None
    if zero_points is not None:
        zero = _by_group(
            _integers(zero_points.reshape(n, -1), bits)[:, :blocks], chunks * columns, columns, block
        )
    scale = _by_group(scales.reshape(n, blocks), chunks * columns, columns, block)
    return PackedWeight(np.ascontiguousarray(parts).reshape(n // 8, -1), scale, zero)


def _integers(packed: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Returns one integer a byte."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _by_group(values: np.ndarray[Any, Any], k: int, columns: int, block: int) -> np.ndarray[Any, Any]:
    """Arranges [n, blocks of a row] as [n / 8, those of a chunk for each of 8 rows, chunk by chunk]."""
    together = max(1, columns // block)
    padded = np.zeros((len(values), -(-k // block)), values.dtype)
    padded[:, : values.shape[1]] = values
    groups = padded.reshape(len(values) // 8, 8, -1, together).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(groups).reshape(len(values) // 8, -1)
