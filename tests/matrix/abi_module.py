"""Samples of the ops in tests/ops/abi_ops.h, for which their records do not say enough."""

from typing import Any

import torch


def samples(op: str, dtype: str, size: int) -> list[dict[str, Any]] | None:
    x = torch.randn(size)
    if op == "packed":
        return [{"x": x, "weight": torch.randn(max(size, 1)), "n": n} for n in (1, 2)]
    if op == "scale_by":
        return [{"x": x, "factors": torch.tensor([2, 3])}]
    if op == "take":
        index = torch.randint(0, max(size, 1), (size,))
        return [{"x": torch.randint(0, 2, (max(size, 1),)), "index": index, "keep": index % 2 == 0}]
    return None
