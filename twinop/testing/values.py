"""The numbers in the inputs of the tests: special values, kinds of rows, integers."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Returns random numbers with special ones between: NaN, one with a payload, infinities, subnormals."""
    if not dtype.is_floating_point:
        return integers(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    tensor = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    special = _special(dtype)[: tensor.numel() // 3]
    # A permutation of all places took longer than most kernels.
    tensor.view(-1)[random.Random(seed).sample(range(tensor.numel()), len(special))] = special
    return tensor


@cache
def _special(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    numbers = [torch.inf, -torch.inf, 0.0, -0.0, info.tiny, -info.tiny, info.max, info.min, torch.nan]
    small = torch.tensor([info.tiny / 4, -info.tiny / 4, torch.nan])
    special = torch.cat([torch.tensor(numbers, dtype=torch.float64), small]).to(dtype)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    special[-1:].view(integer).add_(3)  # a payload (of 8 bits: another number)
    return special


def _some(row: torch.Tensor) -> torch.Tensor:
    return row[row.numel() // 3 : row.numel() // 3 + 1]


ROW_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda row: None,
    "all equal": lambda row: row.fill_(1.7),
    "one huge value": lambda row: _some(row).fill_(3e4),
    "mean 1e4, std 1": lambda row: row.add_(1e4),
    "all -inf": lambda row: row.fill_(-torch.inf),
    "one NaN": lambda row: _some(row).fill_(torch.nan),
    "one inf": lambda row: _some(row).fill_(torch.inf),
    "some -inf": lambda row: row[::2].fill_(-torch.inf),
    "all zero": lambda row: row.fill_(-0.0),
    "spread": lambda row: row.mul_(30),
}
"""The kinds of row; the rows of a sample take them in turn. No value overflows when it is squared."""


def row_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    tensor = plain_values(shape, torch.float64, seed)
    if tensor.dim() > 0 and tensor.shape[-1] > 0:
        for row, make in zip(tensor.view(-1, tensor.shape[-1]), itertools.cycle(ROW_KINDS.values())):
            make(row)
    return tensor.to(dtype)


def plain_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns random integers, or truth values, of all sizes that the type holds."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    info = torch.iinfo(torch.int64 if dtype == torch.uint64 else dtype)  # of which negative ones wrap
    return torch.randint(info.min, info.max, tuple(shape), generator=generator, dtype=torch.int64).to(dtype)
