"""attention_packed: sizes at the edges of its tiles, masks, special values, errors.

The tests of all ops cover the rest.
"""

import math
from typing import Any

import pytest
import torch
from linear_calls import random
from samples import DEVICES, RECORDS, moved

from twinop import torch_op
from twinop.errors import TwinopError
from twinop.libraries.library import find_library
from twinop.testing.one_node import make_session, one_node_model, run_bound

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-13}
LIBRARY = find_library("custom_ops")
each_device = pytest.mark.parametrize("device", DEVICES)


def exact(
    qkv: torch.Tensor, bias: torch.Tensor | None, heads: int, scale: float = 0.0, causal: bool = False
) -> torch.Tensor:
    """Attention in fp64, on the CPU."""
    q, k, v = qkv.cpu().double().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias.cpu().double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, bound: float, case: Any = None) -> None:
    found = found.cpu().double()
    assert torch.equal(found.isnan(), wanted.isnan()), case
    difference = (found - wanted).nan_to_num(0).abs().max() if found.numel() else torch.zeros(())
    assert float(difference) <= bound * max(1.0, float(wanted.nan_to_num(0).abs().max())), case


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 24, 32, 64, 128, 136])
def test_values(size: int, dtype: torch.dtype, device: str) -> None:
    """Numbers of tokens around those of a tile and of all warps, aligned and not, in few and many batches."""
    few = [(2, 3, tokens) for tokens in (1, 15, 16, 17, 31, 33)]
    long = [(1, 2, tokens) for tokens in (127, 128, 129, 200)]
    many = [(800, 1, 7), (260, 3, 16), (100, 2, 49), (96, 2, 64)]  # more than a GPU computes at once
    for batch, heads, tokens in [*few, *long, *many] if device == "cuda" else few:
        qkv = random(batch, tokens, 3 * heads * size, dtype=dtype)
        shapes = (batch, 1, 1, tokens), (1, heads, tokens, tokens)
        biases = [None, *(random(*shape, dtype=dtype) for shape in shapes)]
        bias = biases[tokens % 3]
        causal = tokens % 2 == 0
        given = bias if bias is None else bias.to(device)
        on_device = qkv.to(device)
        y, z = (
            torch_op.attention_packed(each, given, heads, 0.25, causal)
            for each in (on_device, moved(on_device))  # in memory that no vector is aligned in
        )
        assert_close(y, exact(qkv, bias, heads, 0.25, causal), ROUNDING[dtype], (batch, tokens))
        assert device == "cpu" or torch.equal(y, z), (batch, tokens)  # torch's own products differ


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(2, 150), (200, 60)])
def test_masks_hide_tokens(batch: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """Hidden tokens do not count; a query without any token is NaN, as in torch."""
    qkv = random(batch, tokens, 3 * 64, dtype=dtype)
    bias = torch.zeros(batch, 1, tokens, tokens, dtype=dtype)
    bias[0, :, :, tokens // 4 :] = -math.inf  # the last tiles of keys are empty
    bias[1, :, :, : tokens - 20] = -math.inf  # so are the first ones
    bias[1, :, 7] = -math.inf
    wanted = exact(qkv, bias, 1)
    y = torch_op.attention_packed(qkv.to(device), bias.to(device))
    assert wanted[1, 7].isnan().all()
    assert_close(y, wanted, ROUNDING[dtype])
    lowest = torch.where(bias == 0, 0, torch.finfo(dtype).min).to(dtype)
    y = torch_op.attention_packed(qkv.to(device), lowest.to(device))
    assert_close(y, exact(qkv, lowest, 1), ROUNDING[dtype])


@each_device
@pytest.mark.parametrize(("batch", "size"), [(1, 24), (1, 64), (300, 32), (300, 64)])
def test_special_values(batch: int, size: int, device: str) -> None:
    for number in (math.nan, math.inf, -math.inf):
        for place in range(3):  # in q, k and v
            qkv = random(batch, 40, 3 * size, dtype=torch.float16)
            qkv[-1, 20, place * size + 3] = number
            wanted = exact(qkv, None, 1)
            y = torch_op.attention_packed(qkv.to(device)).cpu()
            assert torch.equal(y.isnan(), wanted.isnan()), (number, place)
            assert torch.equal(y.isinf(), wanted.isinf()), (number, place)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("batch", "tokens"), [(3, 90), (100, 49), (96, 64), (400, 16), (200, 32)])
def test_a_query_does_not_depend_on_others(batch: int, tokens: int, size: int) -> None:
    """The same bits in every batch, and with tokens behind those that a causal query sees."""
    qkv = random(batch, tokens, 3 * 2 * size, dtype=torch.float16, device="cuda")
    y = torch_op.attention_packed(qkv, heads=2, causal=True)
    assert torch.equal(y[1:2], torch_op.attention_packed(qkv[1:2], heads=2, causal=True))
    few = tokens // 2
    assert torch.equal(y[:, :few], torch_op.attention_packed(qkv[:, :few], heads=2, causal=True))


@pytest.mark.parametrize("dtype", DTYPES[:2] + DTYPES[3:], ids=str)
@pytest.mark.parametrize(("scale", "causal"), [(0.0, False), (0.25, True)])
def test_onnxruntime_on_the_cpu(scale: float, causal: bool, dtype: torch.dtype) -> None:
    """Its own operators compute it, many sequences in pieces on the threads, with the same bits."""
    types = dict.fromkeys(("qkv", "bias", "y"), str(dtype).removeprefix("torch."))
    attributes = {"heads": 2, "scale": scale, "causal": causal}
    for batch, tokens in ((2, 17), (150, 49)):
        qkv = random(batch, tokens, 3 * 2 * 32, dtype=dtype)
        for of_bias in (None, (batch, 1, 1), (1, 2, tokens)):
            bias = None if of_bias is None else random(*of_bias, tokens, dtype=dtype)
            model = one_node_model(RECORDS["attention_packed"], types, [1, bias is not None], attributes)
            feeds = {"qkv": qkv} if bias is None else {"qkv": qkv, "bias": bias}
            found = []
            for threads in (1, 3):
                y = torch.empty(batch, tokens, 2 * 32, dtype=dtype)
                run_bound(make_session(model, LIBRARY, "cpu", threads=threads), feeds, {"y": y})
                assert_close(y, exact(qkv, bias, 2, scale, causal), ROUNDING[dtype], (batch, tokens, of_bias))
                found.append(y)
            assert torch.equal(*found)


@each_device
@pytest.mark.parametrize(
    ("sizes", "of_bias", "heads", "message"),
    [
        ((2, 5, 24), (3, 1, 1, 5), 2, r"bias is for 3 sequences; expected 1, for all, or 2"),
        ((2, 5, 24), (1, 3, 1, 5), 2, r"bias is for 3 heads; expected 1, for all, or 2"),
        ((2, 5, 24), (1, 1, 2, 5), 2, r"bias is for 2 queries; expected 1, for all, or 5"),
    ],
)
def test_errors(
    sizes: tuple[int, ...], of_bias: tuple[int, ...] | None, heads: int, message: str, device: str
) -> None:
    bias = None if of_bias is None else torch.zeros(of_bias, device=device)
    with pytest.raises((RuntimeError, TwinopError), match=message):
        torch_op.attention_packed(torch.zeros(sizes, device=device), bias, heads)
