"""The comparison of two tensors bit for bit."""

import torch

from twinop.testing.one_node import bits


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: {actual.dtype}{tuple(actual.shape)} instead of {expected.dtype}{tuple(expected.shape)}"
    )
    different = (bits(actual) != bits(expected)).flatten()
    if different.any():
        first = int(different.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {first}: "
            f"{actual.flatten()[first].item()} instead of {expected.flatten()[first].item()}"
        )
