"""attention_cached: its meaning in fp64 and in ONNX Runtime's GroupQueryAttention, and its invariance."""

import math
from typing import Any

import pytest
import torch
from samples import DEVICES, RECORDS

from twinop import torch_op
from twinop.libraries.library import find_library
from twinop.model.attach import attach_bodies
from twinop.testing.one_node import body_session, make_session, one_node_model

ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-13}
each_device = pytest.mark.parametrize("device", DEVICES)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "turned": {"pairs": 1.0},
    "partly turned": {"pairs": 0.5, "interleaved": True},
    "window": {"window": 40, "pairs": 1.0},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "sinks": {"sinks": True, "window": 300},
    "norms": {"norms": True, "pairs": 1.0, "eps": 2.0**-10},
}


def make_call(
    positions: list[int], tokens: int, heads: int, kv_heads: int, size: int, rows: int, **variant: Any
) -> dict[str, Any]:
    """Returns inputs and attributes, in fp64. What a cache holds beyond the sequence is NaN."""
    random = torch.Generator().manual_seed(sum(positions) + tokens + heads + size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    batch = len(positions)
    call: dict[str, Any] = {"qkv": normal(batch, tokens, (heads + 2 * kv_heads) * size)}
    for name in ("k_cache", "v_cache"):
        call[name] = normal(batch, kv_heads, rows, size)
        for b, position in enumerate(positions):
            call[name][b, :, max(position + 1 - tokens, 0) :] = math.nan
    call["position"] = torch.tensor(positions, dtype=torch.int32)
    if pairs := int(variant.pop("pairs", 0) * size / 2):
        angles = normal(rows + 1, pairs)
        call["cos_sin"] = torch.cat([angles.cos(), angles.sin()], -1)
    if variant.pop("norms", False):
        call["norms"] = normal(2, size).abs()
    if variant.pop("sinks", False):
        call["sinks"] = 3 * normal(heads)
    return call | variant


def to(call: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        name: each.to(device, dtype if each.is_floating_point() else None)
        if isinstance(each, torch.Tensor)
        else each
        for name, each in call.items()
    }


def exact(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and the caches, in fp64 on the CPU."""
    call = to(call, torch.float64, "cpu")
    qkv, k_cache, v_cache = call["qkv"], call["k_cache"].clone(), call["v_cache"].clone()
    batch, tokens, _ = qkv.shape
    _, kv_heads, _, size = k_cache.shape
    parts = qkv.unflatten(-1, (-1, size))
    heads = parts.shape[2] - 2 * kv_heads
    first = (call["position"].long() + 1 - tokens).clamp(min=0)
    y = torch.empty(batch, tokens, heads, size, dtype=torch.float64)
    for b in range(batch):
        rows = first[b] + torch.arange(tokens)
        q, k, v = parts[b].split((heads, kv_heads, kv_heads), 1)
        if "norms" in call:
            scaled = (x * (x.square().mean(-1, keepdim=True) + call["eps"]).rsqrt() for x in (q, k))
            q, k = (x * weight for x, weight in zip(scaled, call["norms"], strict=True))
        if "cos_sin" in call:
            q, k = (turned(x, call["cos_sin"][rows], call.get("interleaved", False)) for x in (q, k))
        k_cache[b, :, rows], v_cache[b, :, rows] = k.transpose(0, 1), v.transpose(0, 1)
        end = int(rows[-1]) + 1
        keys, values = (k[b, :, :end].repeat_interleave(heads // kv_heads, 0) for k in (k_cache, v_cache))
        scores = torch.einsum("shd,hkd->hsk", q, keys) * (call.get("scale") or size**-0.5)
        if cap := call.get("softcap", 0):
            scores = cap * (scores / cap).tanh()
        place = torch.arange(end)
        hidden = place > rows[:, None]
        if window := call.get("window", 0):
            hidden |= place <= rows[:, None] - window
        scores = scores.masked_fill(hidden, -math.inf)
        if "sinks" in call:
            scores = torch.cat([scores, call["sinks"][:, None, None].expand(-1, tokens, 1)], -1)
        weights = scores.softmax(-1)[..., :end]
        y[b] = torch.einsum("hsk,hkd->shd", weights, values)
    return y.flatten(2), k_cache, v_cache


def turned(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = cos_sin[:, None].chunk(2, -1)
    pairs = cos.shape[-1]
    x, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    new = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat([torch.stack(new, -1).flatten(-2) if interleaved else torch.cat(new, -1), rest], -1)


def run(call: dict[str, Any]) -> torch.Tensor:
    return torch_op.attention_cached(**call)


@each_device
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values(variant: str, dtype: torch.dtype, device: str) -> None:
    """Contexts around the edges of groups and pieces, prompts, padding, heads that share keys or do not."""
    cases = [
        ([0, 15, 16, 31], 1, 8, 2, 64, 40),
        ([255, 256, 300, 17], 1, 4, 1, 64, 301),
        ([40, 41], 1, 3, 3, 96, 64),
        ([99], 1, 12, 1, 128, 100),  # more heads of q for a key than a block takes
        ([33, 2], 1, 4, 2, 256, 48),
        ([9, 5], 1, 2, 1, 24, 16),
        ([36, 36], 37, 4, 2, 64, 40),
        ([17, 11], 18, 4, 1, 96, 32),  # padding on the right
        ([90, 70], 5, 2, 2, 128, 91),
        ([20], 3, 2, 1, 256, 24),
        ([6, 9], 3, 2, 1, 24, 16),
    ]
    if device == "cuda":
        cases += [([5000, 2047, 3000, 8191], 1, 8, 2, 64, 8192), ([700, 1000], 400, 4, 2, 128, 1024)]
    for positions, tokens, heads, kv_heads, size, rows in cases:
        call = to(
            make_call(positions, tokens, heads, kv_heads, size, rows, **VARIANTS[variant]), dtype, device
        )
        wanted = exact(call)
        caches = [call[name] for name in ("k_cache", "v_cache")]
        untouched = [each.clone() for each in caches]
        y = run(call)
        bound = ROUNDING[dtype] * (4 if "norms" in call or "softcap" in call else 1)
        for b, position in enumerate(positions):
            end, valid = position + 1, min(tokens, position + 1)
            case = (positions, tokens, size, b)
            assert close(y[b, :valid], wanted[0][b, :valid], bound), case
            for cache, expected, old in zip(caches, wanted[1:], untouched, strict=True):
                assert close(cache[b, :, :end], expected[b, :, :end], bound), case
                written = max(tokens - valid, 0)  # padding
                rest, before = (each[b, :, end + written :].cpu() for each in (cache, old))
                assert torch.equal(rest.isnan(), before.isnan()), case


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    difference = (found.cpu().double() - wanted).abs().max()
    return bool(difference <= bound * max(1.0, float(wanted.abs().max())))  # False for NaN


@pytest.mark.cuda
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("variant", ["turned", "window", "sinks"])
def test_the_same_bits_in_every_company(variant: str, size: int) -> None:
    """In every batch, at every place, with every length of the cache, whatever unused memory holds.

    These change the number of blocks that share a sequence.
    """
    positions = [3000, 0, 17, 255, 256, 1500, 2047, 4095, 511, 700]
    whole = to(make_call(positions, 1, 8, 2, size, 4096, **VARIANTS[variant]), torch.bfloat16, "cuda")
    names = ("qkv", "k_cache", "v_cache", "position")

    def of(indices: list[int], rows: int) -> torch.Tensor:
        call = whole | {name: whole[name][indices].clone() for name in names}
        for name in ("k_cache", "v_cache"):
            longer = torch.full((len(indices), 2, rows, size), math.inf, dtype=torch.bfloat16, device="cuda")
            longer[:, :, : min(rows, 4096)] = call[name][:, :, :rows]
            call[name] = longer
        if "cos_sin" in call:
            call["cos_sin"] = torch.cat([call["cos_sin"]] * 2)
        return run(call)

    y = of(list(range(10)), 4096)
    assert not y.isnan().any()
    for b, position in enumerate(positions):
        assert torch.equal(of([b], 4096), y[b : b + 1]), position
        assert torch.equal(of([b], position + 1), y[b : b + 1]), position
        for count in (64, 150):
            assert torch.equal(of([b] * count, 5000), y[b : b + 1].expand(count, -1, -1)), position
        assert torch.equal(of([9, b, 0, 7], 4097)[1:2], y[b : b + 1]), position
    order = [7, 2, 9, 0, 4, 5, 1, 8, 3, 6]
    assert torch.equal(of(order, 4096), y[order])


@pytest.mark.cuda
def test_a_captured_graph_serves_every_context() -> None:
    """The position is read on the device. Beyond the cache nothing is written, and the result is NaN."""
    rows = 600
    call = to(make_call([0, 0, 0], 1, 8, 2, 64, rows + 8, pairs=1.0), torch.float16, "cuda")
    backing = [call[name].nan_to_num(0) for name in ("k_cache", "v_cache")]
    call |= dict(zip(("k_cache", "v_cache"), (t[:, :, :rows].contiguous() for t in backing), strict=True))
    eager = call | {name: call[name].clone() for name in ("k_cache", "v_cache")}
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(call)
    for step in range(rows + 2):
        call["qkv"].normal_()
        call["position"].fill_(step)
        graph.replay()
        if step % 37 == 0 and step < rows:
            eager |= {"qkv": call["qkv"].clone(), "position": call["position"].clone()}
            for name in ("k_cache", "v_cache"):
                eager[name].copy_(call[name])
            assert torch.equal(run(eager), y), step
            assert torch.equal(eager["k_cache"], call["k_cache"])
        if step == rows - 1:
            full = call["k_cache"].clone()
    assert y.isnan().all() and torch.equal(full, call["k_cache"])


PLACES = [3, -1, 15, 16, 17, 40, -(2**31), 2**31 - 1, 5]  # of caches with 16 rows


def without_place(position: int, tokens: int, limit: int) -> list[bool]:
    first = limit if position < 0 else max(position + 1 - tokens, 0)
    return [first + i >= limit for i in range(tokens)]


def calls_without_places(
    tokens: int, size: int, dtype: torch.dtype, device: str, table: int
) -> dict[str, Any]:
    """Sequences with and without places for their new tokens; the caches are full."""
    call = make_call([15] * len(PLACES), tokens, 4, 2, size, 16)
    call |= {name: torch.randn_like(call[name]) for name in ("k_cache", "v_cache")}
    if table:
        call["cos_sin"] = torch.randn(table, size, dtype=torch.float64)
    return to(call | {"position": torch.tensor(PLACES, dtype=torch.int32)}, dtype, device)


def check_places(call: dict[str, Any], y: Any, k: Any, v: Any, before: dict[str, Any]) -> None:
    """A token without a place is not written, and its result is NaN; others are as in a call of their own."""
    tokens, limit = y.shape[1], min(16, len(call.get("cos_sin", range(16))))
    for b, position in enumerate(PLACES):
        missing = torch.tensor(without_place(position, tokens, limit), device=y.device)
        assert torch.equal(y[b].isnan().all(-1), missing), position
        assert torch.equal(y[b].isnan().any(-1), missing), position
        first = limit if position < 0 else max(position + 1 - tokens, 0)
        new = slice(min(first, limit), min(first + tokens, limit))
        for cache, name in ((k, "k_cache"), (v, "v_cache")):
            changed = (cache[b] != before[name][b]).any(-1).all(0)
            assert changed.nonzero().flatten().tolist() == list(range(16))[new], (position, name)
            assert torch.equal((cache[b] != before[name][b]).any(-1).any(0), changed)


@each_device
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 40])
@pytest.mark.parametrize("table", [0, 16, 12])
def test_tokens_without_a_place(table: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """Negative positions, as of a mask without ones, and those beyond the caches or the table."""
    for size in (24, 64, 128, 256) if device == "cuda" else (24, 128):
        call = calls_without_places(tokens, size, dtype, device, table)
        before = {name: call[name].clone() for name in ("k_cache", "v_cache")}
        y = run(call)
        check_places(call, y, call["k_cache"], call["v_cache"], before)
        for b in (0, 8):  # those with places
            names = ("qkv", "position")
            alone = call | {name: call[name][b : b + 1] for name in names}
            alone |= {name: each[b : b + 1].clone() for name, each in before.items()}
            assert torch.equal(run(alone).nan_to_num(9), y[b : b + 1].nan_to_num(9)), size


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("table", [0, 12])
def test_tokens_without_a_place_in_onnxruntime(table: int, tokens: int) -> None:
    """The kernel and the function body have one rule."""
    record = RECORDS["attention_cached"]
    call = calls_without_places(tokens, 24, torch.float32, "cpu", table)
    names = [*(each.name for each in record.inputs), *record.outputs]
    types = dict.fromkeys(names, "float32") | {"position": "int32", "total": "int32"}
    model = one_node_model(record, types, [each.name in call for each in record.inputs], {})
    feeds = {name: each.numpy() for name, each in call.items()}
    in_kernel = make_session(model, find_library("custom_ops"), "cpu").run(None, feeds)
    in_body = body_session(attach_bodies(model)).run(feeds)
    for y, k, v in (map(torch.from_numpy, in_kernel), map(torch.as_tensor, in_body.values())):
        check_places(call, y, k, v, call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total": torch.tensor([17], dtype=torch.int32)}, r"has 17 tokens; the caches have 16 rows.* past"),
        (
            {"qkv": torch.zeros(1, 4, 64), "total": torch.tensor([3], dtype=torch.int32)},
            r"has 3 tokens, and qkv has 4 new ones: give a mask of all tokens",
        ),
        ({"qkv": torch.zeros(1, 1, 7 * 8)}, r"rows of 56 numbers; expected heads of 8: 2 of k"),
        ({"cos_sin": torch.zeros(16, 10)}, r"cos_sin has rows of 10 numbers; expected at most 8"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    call = to(make_call([15], 1, 4, 2, 8, 16), torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=message):
        run(call | change)


@pytest.mark.cuda
def test_heads_that_are_too_large_on_cuda() -> None:
    call = to(make_call([15], 1, 1, 1, 264, 16), torch.float16, "cuda")
    with pytest.raises(RuntimeError, match=r"heads of 264; on CUDA expected at most 256"):
        run(call)
