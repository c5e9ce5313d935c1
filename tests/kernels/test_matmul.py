"""The example matmul: shapes, broadcasting, variants and errors.

The tests of all ops cover parity, gradients and export.
"""

import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DEVICES

from twinop import torch_op
from twinop.errors import RecordError

TILES = (0, 8, 16, 32, 64, 128)


def operands(
    a: tuple[int, ...], b: tuple[int, ...], device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(a) + 7 * sum(b))
    return torch.randn(a, generator=generator).to(device), torch.randn(b, generator=generator).to(device)


def check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Checks that the error of a sum of K products is at most K roundings of the sum of their magnitudes."""
    expected = a.double() @ b.double()
    assert found.shape == expected.shape and found.dtype == torch.float32
    bound = max(a.shape[-1], 1) * 2.0**-24 * (a.double().abs() @ b.double().abs()) + 1e-45
    assert bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [0, 1, 31, 33, 129])
@pytest.mark.parametrize(("m", "n"), list(product((1, 3, 4, 127, 130), (1, 31, 32, 33, 129))))
def test_any_size(m: int, n: int, k: int, device: str) -> None:
    a, b = operands((m, k), (k, n), device)
    tiled = torch_op.matmul(a, b)
    check(tiled, a, b)
    assert torch.equal(tiled, torch_op.matmul(a, b, variant="naive"))  # both variants add in the order of k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [
        ((3,), (3,)),
        ((3,), ()),
        ((), (3,)),
        ((2, 1), (5,)),
        ((1, 4), (2, 1)),
        ((2, 3, 4), (3, 1)),
        ((0,), (1,)),
    ],
)
@pytest.mark.parametrize("variant", ["naive", "tiled"])
def test_batch_dimensions_broadcast(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], variant: str, device: str
) -> None:
    a, b = operands((*batch_a, 9, 17), (*batch_b, 17, 5), device)
    a.requires_grad_()
    b.requires_grad_()
    y = torch_op.matmul(a, b, variant=variant)
    check(y.detach(), a.detach(), b.detach())
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    found = torch.autograd.grad(y, (a, b), weight)
    expected = torch.autograd.grad(a @ b, (a, b), weight)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-4)


SIZES = st.integers(0, 40)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=3), SIZES, SIZES, SIZES)
def test_any_batch(batch: list[tuple[int, bool, bool]], m: int, n: int, k: int) -> None:
    a, b = operands(
        (*(1 if one else size for size, one, _ in batch), m, k),
        (*(1 if one else size for size, _, one in batch), k, n),
    )
    check(torch_op.matmul(a, b), a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_transposed_and_sliced_inputs(device: str) -> None:
    a, b = operands((40, 70), (90, 70), device)
    check(torch_op.matmul(a[3:, 5:], b.mT[5:, ::2]), a[3:, 5:], b.mT[5:, ::2])


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_and_nan_stay_in_their_row_and_column(device: str) -> None:
    a, b = operands((33, 17), (17, 33), device)
    a[3, 5], b[7, 9] = float("inf"), float("nan")
    for y in (torch_op.matmul(a, b), torch_op.matmul(a, b, "naive")):
        finite = torch.isfinite(y)
        assert not finite[3].any() and not finite[:, 9].any()
        finite[3], finite[:, 9] = True, True
        assert bool(finite.all())


@pytest.mark.cuda
def test_every_tile_gives_the_same_bits() -> None:
    for m, n, k in ((1, 1, 1), (7, 9, 33), (130, 129, 257)):
        a, b = operands((2, m, k), (k, n), "cuda")
        expected = torch_op.matmul(a, b, variant="naive")
        for tile in TILES:
            assert torch.equal(torch_op.matmul(a, b, tile=tile), expected), tile


@pytest.mark.cuda
def test_a_tile_that_does_not_fit() -> None:
    a, b = operands((4, 5), (5, 6), "cuda")
    with pytest.raises(RuntimeError, match="attribute tile is 256: .* take 524288 bytes") as caught:
        torch_op.matmul(a, b, tile=256)
    found = re.search(r"at most (\d+); the largest tile that fits is (\d+)", str(caught.value))
    assert found is not None
    limit, largest = map(int, found.groups())
    assert 48 << 10 <= limit < 524288
    assert largest == max(tile for tile in TILES if 8 * tile * tile <= limit)
    check(torch_op.matmul(a, b, tile=largest), a, b)  # the error does not affect later calls


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 4), (5, 6), r"b has shape \[5, 6\], expected b\[:-2\] \+ \[a\[-1\], b\[-1\]\] = \[4, 6\]"),
        ((3, 4), (4,), r"b: float32\[4\]\): b has 1 dimension, expected at least 2 \(unsqueeze adds one\)$"),
        (
            (4,),
            (4, 6),
            r"\(a: float32\[4\].*: a has 1 dimension, expected at least 2 \(unsqueeze adds one\)$",
        ),
        ((4,), (4,), "a has 1 dimension, expected at least 2"),
        ((), (4, 6), "a has 0 dimensions, expected at least 2"),
        ((2, 3, 4), (3, 4, 5), "do not broadcast"),
    ],
)
def test_shapes_that_do_not_fit(a: tuple[int, ...], b: tuple[int, ...], message: str, device: str) -> None:
    with pytest.raises((RuntimeError, RecordError), match=message):
        torch_op.matmul(torch.ones(a, device=device), torch.ones(b, device=device))


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_attributes_that_are_refused(device: str) -> None:
    a, b = torch.ones(3, 4, device=device), torch.ones(4, 5, device=device)
    with pytest.raises(
        (RuntimeError, RecordError), match=r"variant is 'fast', expected one of naive \| tiled"
    ):
        torch_op.matmul(a, b, variant="fast")
    for tile in (24, -1, 512):
        with pytest.raises((RuntimeError, RecordError), match=rf"tile is {tile}, expected one of 0 \| 8"):
            torch_op.matmul(a, b, tile=tile)
    with pytest.raises((RuntimeError, RecordError), match="no kernel takes these dtypes.*float32"):
        torch_op.matmul(a.double(), b.double())
