"""last_position: masks of all forms, rows of a wider tensor. The tests of all ops cover the rest."""

import pytest
import torch
from samples import DEVICES, moved

from twinop import torch_op
from twinop.errors import RecordError

LENGTHS = (0, 1, 3, 4, 255, 257, 1025, 4095, 4097, 9001)  # a block of CUDA has passes of 4096
each_device = pytest.mark.parametrize("device", DEVICES)


def check(mask: torch.Tensor) -> None:
    expected = (mask.long().sum(1) - 1).int()
    found = torch_op.last_position(mask)
    assert found.dtype == torch.int32 and torch.equal(found, expected), mask.shape


@each_device
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_values(length: int, dtype: torch.dtype, device: str) -> None:
    """Of one sequence, a batch, and more than the blocks that wait for the kernel before."""
    random = torch.Generator().manual_seed(length)
    for batch in (0, 1, 3, 64, *([1500] if device == "cuda" else [])):
        ends = torch.randint(length + 1, (batch, 1), generator=random)
        mask = (torch.arange(length) < ends).to(device, dtype)
        check(mask)
        check(mask.flip(1))
        check(torch.zeros_like(mask))
        check(torch.cat([mask, mask + 5], 1)[:, :length])
        check(moved(mask))
        check(mask[:1].expand(batch, length))
        check(mask.T.contiguous().T)


@each_device
def test_what_does_not_fit(device: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.int64, device=device)
    for wrong in (mask[0], mask[None]):
        with pytest.raises((RuntimeError, RecordError), match="mask"):
            torch_op.last_position(wrong)


def test_vmap_is_one_call() -> None:
    mask = (torch.rand(4, 12, 7, generator=torch.Generator().manual_seed(0)) < 0.5).long()
    with torch.profiler.profile() as seen:
        found = torch.func.vmap(torch_op.last_position, 1)(mask)
    assert torch.equal(found, (mask.sum(2) - 1).int().T)
    assert len([event for event in seen.events() if event.name == "custom_domain::last_position"]) <= 3


@pytest.mark.cuda
def test_masks_beyond_2_to_the_31_elements() -> None:
    length = 1 << 20
    mask = torch.zeros((1 << 11) + 2, length, dtype=torch.int32, device="cuda")
    mask[-1, -7:] = 1
    mask[-2, :3] = 1
    assert torch_op.last_position(mask)[[0, -3, -2, -1]].tolist() == [-1, -1, 2, 6]
