"""Integer weights as MatMulNBits and linear_q hold them, and in fp64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Weight:
    """`dense` is [n, k] in fp64, `stored` has the inputs of MatMulNBits, and `given` those of linear_q."""

    dense: torch.Tensor
    stored: dict[str, np.ndarray[Any, Any]]
    given: dict[str, torch.Tensor]


def weight_of(n: int, k: int, bits: int, block: int, with_zero: bool, dtype: Any = torch.float16) -> Weight:
    """Makes random integers and scales. `stored` has scales in fp32, of the same values."""
    random = np.random.default_rng(n + k + bits + block)
    blocks = -(-k // block)
    codes = random.integers(0, 2**bits, (n, blocks * block), dtype=np.uint8)
    zeros = random.integers(0, 2**bits, (n, blocks), dtype=np.uint8)
    scales = torch.from_numpy(random.random((n, blocks)) / (2**bits * k**0.5)).to(dtype)

    def bytes_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if bits == 8:
            return values
        even = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
        return even[:, 0::2] | even[:, 1::2] << 4

    middle = zeros if with_zero else np.full_like(zeros, 2 ** (bits - 1))
    dense = (codes.astype(float) - middle.repeat(block, 1)) * scales.double().numpy().repeat(block, 1)
    stored = {
        "B": bytes_of(codes).reshape(n, blocks, block * bits // 8),
        "scales": scales.float().numpy().reshape(-1),
    }
    if with_zero:
        stored["zero_points"] = bytes_of(zeros).reshape(-1)
    given = {"weight": torch.from_numpy(stored["B"]), "scale": scales}
    if with_zero:
        given["zero"] = torch.from_numpy(bytes_of(zeros))
    return Weight(torch.from_numpy(dense[:, :k]), stored, given)
