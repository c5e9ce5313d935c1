"""The comparison of two tensors bit for bit."""

import torch

from twinop.testing.one_node import bits


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    if not torch.equal(bits(actual), bits(expected)):
        torch.testing.assert_close(bits(actual), bits(expected), rtol=0, atol=0, msg=lambda s: f"{what}: {s}")
