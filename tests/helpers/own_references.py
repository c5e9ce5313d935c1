"""What twinop's own ops mean in fp64, and their calls, where records and function bodies do not say it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from twinop.libraries.library import find_library
from twinop.testing.references import ONE_ROUNDING, Reference, narrow, ulps
from twinop.torch_op.linear_rules import dequantised


def library_path() -> Path:
    return find_library("custom_ops")


def reference(op: str) -> Reference | None:
    return REFERENCES.get(op)


def samples(op: str, dtype: str, size: int) -> list[dict[str, Any]] | None:
    calls = _CALLS.get(op)
    return calls and list(calls(size))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _linears(size: int) -> Iterator[dict[str, Any]]:
    for activation in ("none", "relu", "gelu", "gelu_tanh", "silu"):
        inputs = {"x": _random(3, size), "weight": _random(9, size), "bias": _random(9)}
        yield inputs | {"activation": activation}
    for rows in ((2, 3), (), (0,)):
        inputs = {"x": _random(*rows, size), "weight": _random(size, 16), "residual": _random(*rows, 16)}
        yield inputs | {"layout": "kn", "activation": "none" if rows else "silu"}
    yield {"x": _random(5, size), "weight": _random(size, 8), "layout": "kn", "activation": "gelu"}
    inputs = {"x": _random(130, size), "weight": _random(24, size), "bias": _random(24)}
    yield inputs | {"residual": _random(130, 24)}
    yield {"x": _random(2, size), "weight": _random(0, size), "bias": _random(0)}
    yield {"x": _random(4, size), "weight": _random(8, size), "activation": "gelu", "rms_eps": 0.01}


def _linear_swiglus(size: int) -> Iterator[dict[str, Any]]:
    for call in _linears(size):
        if "residual" not in call and call.get("activation", "silu") not in ("none", "relu"):
            weight = call["weight"]
            width = 0 if call.get("layout") != "kn" else 1
            wide = torch.cat([weight, weight.flip(width) * 0.75], width)
            bias = {"bias": torch.cat([call["bias"]] * 2)} if "bias" in call else {}
            yield call | {"weight": wide} | bias


def _quantised_linears(size: int) -> Iterator[dict[str, Any]]:
    """Weights of 32 * size columns."""
    columns = 32 * size
    for bits, block, rows in ((4, 32, 3), (8, 128, 2), (4, 128, 0), (8, 32, 70)):
        random = torch.Generator().manual_seed(size + bits + block)
        blocks = -(-columns // block)
        of_weight = (32, blocks, block * bits // 8)
        yield {
            "x": torch.randn(rows, columns, generator=random),
            "weight": torch.randint(256, of_weight, dtype=torch.uint8, generator=random),
            "scale": torch.rand(32, blocks, generator=random) / (2**bits * max(columns, 1) ** 0.5),
            "zero": torch.randint(256, (32, -(-blocks * bits // 8)), dtype=torch.uint8, generator=random),
            "bias": torch.randn(32, generator=random),
            "residual": torch.randn(rows, 32, generator=random),
        } | {"bits": bits, "block": block, "activation": "silu" if rows == 3 else "gelu"}


def _quantised_swiglus(size: int) -> Iterator[dict[str, Any]]:
    return ({k: v for k, v in call.items() if k != "residual"} for call in _quantised_linears(size))


def _float8_linears(size: int) -> Iterator[dict[str, Any]]:
    """Weights of 16 * size columns: GPUs multiply 8 bits in multiples of 16."""
    rows = {"none": (3,), "gelu": (2, 3), "silu": (), "gelu_tanh": (130,), "relu": (0,)}
    for activation, shape in rows.items():
        yield {
            "x": _random(*shape, 16 * size),
            "x_scale": _random(*shape).abs() + 0.1,
            "weight": _random(32, 16 * size),
            "weight_scale": _random(32).abs() / (4 * max(size, 1) ** 0.5),
            "bias": _random(32),
            "activation": activation,
        } | ({"residual": _random(*shape, 32)} if activation != "gelu" else {})


def _w8_linears(size: int) -> Iterator[dict[str, Any]]:
    for call in _float8_linears(size):
        del call["x_scale"]
        yield call | {"rms_eps": 0.01 if call["activation"] in ("gelu", "silu") else 0.0, "few_rows": 130}


def _w8_swiglus(size: int) -> Iterator[dict[str, Any]]:
    for call in _w8_linears(size):
        if call["activation"] not in ("none", "relu"):
            yield {name: value for name, value in call.items() if name != "residual"}


def _ropes(size: int) -> Iterator[dict[str, Any]]:
    pairs = max(size, 1)  # of a head
    for layout, passing in itertools.product(("half", "interleaved"), (0, 3)):
        for batch, length, of_q, of_k in ((2, 3, 3, 1), (3, 2, 1, 2), (1, 1, 1, 0), (0, 4, 1, 1)):
            head = 2 * pairs + passing
            q, k = (_random(batch, length, heads * head) for heads in (of_q, of_k))
            angles = _random(batch if of_k == 2 else 1, length, pairs)
            tables = {"cos": angles.cos(), "sin": angles.sin()}
            attributes = {"layout": layout, "inverse": batch == 3, "head_size": head if passing else 0}
            yield {"q": q, "k": k} | attributes | tables


def _packed_attentions(size: int) -> Iterator[dict[str, Any]]:
    cases = ((2, 3, 64, (2, 1, 1)), (1, 2, 32, (1, 2, 1)), (2, 1, 128, (1, 1, size)), (1, 2, 5, None))
    random = torch.Generator().manual_seed(size)
    for causal, (batch, heads, head_size, of_bias) in itertools.product((False, True), cases):
        inputs = {"qkv": torch.randn(batch, size, 3 * heads * head_size, generator=random)}  # size: tokens
        if of_bias is not None:
            inputs["bias"] = torch.randn(*of_bias, size, generator=random)
        yield inputs | {"heads": heads, "scale": 0.3 if head_size == 32 else 0.0, "causal": causal}


def _cached_attentions(size: int) -> Iterator[dict[str, Any]]:
    """Heads of sizes whose kernel takes memory of any alignment; test_attention_cached.py has the others."""
    rows, cases = 2 * size + 3, ((1, 2, 4, 2, 40), (size, 2, 3, 1, 6), (3, 0, 1, 1, 8))
    for tokens, batch, heads, kv_heads, head in cases:
        random = torch.Generator().manual_seed(tokens + heads)
        cache = torch.randn(2, batch, kv_heads, rows, head, generator=random)
        position = torch.randint(max(tokens, 1) - 1, rows, (batch,), generator=random, dtype=torch.int32)
        angles = torch.randn(rows, head // 2 if heads == 3 else head // 4, generator=random)
        call = {
            "qkv": torch.randn(batch, tokens, (heads + 2 * kv_heads) * head, generator=random),
            **dict(zip(("k_cache", "v_cache", "position"), (*cache, position), strict=True)),
        }
        turned = {"cos_sin": torch.cat([angles.cos(), angles.sin()], -1), "interleaved": heads == 3}
        total = {"total": torch.tensor([rows], dtype=torch.int32)}
        norms = {"norms": torch.rand(2, head, generator=random) + 0.5}
        sinks = {"sinks": torch.randn(heads, generator=random)}
        yield call | turned | total | norms | sinks | {"softcap": 2.0, "scale": 0.25}
        if size < 64:
            yield call | turned | {"window": 2}
            yield call


def _masks(size: int) -> Iterator[dict[str, Any]]:
    """Padding on the right and on the left, masks of zeros, and numbers whose sums overflow int32."""
    random = torch.Generator().manual_seed(size)
    ends = torch.randint(size + 1, (64, 1), generator=random)
    right = (torch.arange(size) < ends).long()
    numbers = torch.randint(-(2**31), 2**31, (3, size), generator=random)
    for mask in (right, right[:5].flip(1), right[:0], torch.zeros(2, size), numbers, numbers.abs()):
        yield {"mask": mask}


def _ada_layer_norms(size: int) -> Iterator[dict[str, Any]]:
    for rows in ((2, 3), (3,), (1, 2, 2), (2, 0), (0, 3)):
        random = torch.Generator().manual_seed(sum(rows) + size)
        x = torch.randn(*rows, size, generator=random)
        scale, shift = torch.randn(2, rows[0], size, generator=random)
        yield {"x": x, "scale": scale, "shift": shift}


def _embed_layer_norms(size: int) -> Iterator[dict[str, Any]]:
    for (batch, length), own_rows in (((3, 2), True), ((2, 3), False), ((1, 1), False), ((0, 4), True)):
        random = torch.Generator().manual_seed(batch + length + size)
        table, weight = torch.randn(7, size, generator=random), torch.randn(size, generator=random)
        rows = torch.randn(batch if own_rows else 1, length, size, generator=random)
        ids = torch.randint(7, (batch, length), generator=random)
        yield {"table": table, "ids": ids, "rows": rows, "weight": weight} | (
            {"bias": weight.flip(0)} if own_rows else {}
        )


def _moderate(size: int) -> Iterator[dict[str, Any]]:
    """Numbers whose results are not in the tail where fp64 has 0."""
    for rows in ((3,), (2, 5), (0,)):
        yield {"x": torch.randn(*rows, 2 * size, generator=torch.Generator().manual_seed(size + len(rows)))}


_CALLS = {
    "gelu_fp8": _moderate,
    "linear": _linears,
    "linear_swiglu": _linear_swiglus,
    "linear_fp8": _float8_linears,
    "linear_w8": _w8_linears,
    "linear_w8_swiglu": _w8_swiglus,
    "linear_q": _quantised_linears,
    "linear_q_swiglu": _quantised_swiglus,
    "rope": _ropes,
    "attention_packed": _packed_attentions,
    "attention_cached": _cached_attentions,
    "last_position": _masks,
    "ada_layer_norm": _ada_layer_norms,
    "embed_layer_norm": _embed_layer_norms,
}


# ---------------------------------------------------------------------------- references


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        # As a sigmoid: 1 + tanh(u) would cancel where u is negative.
        return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    argument = x * -(0.5**0.5)
    # The far tail of erfc multiplies the argument's rounding by x^2: taken off again.
    with np.errstate(invalid="ignore"):  # infinities
        exact = -x.detach().numpy().astype(np.longdouble) / np.sqrt(np.longdouble(2))
        lost = exact - argument.detach().numpy()
    slope = -2 / torch.pi**0.5 * torch.exp(-(argument**2))
    rest = torch.from_numpy(np.asarray(lost, dtype=np.float64)).to(x.dtype).nan_to_num(0, 0, 0)
    return x * 0.5 * (torch.erfc(argument) + (slope * rest).detach())


# Below it a factor such as sigmoid(x) has lost digits, or is 0, where the kernel computes in fp32.
TINY = torch.finfo(torch.float32).tiny


def _gelu_magnitude(x: Tensor, approximate: str = "none") -> Tensor:
    return _gelu(x, approximate).abs() + TINY * x.abs()


def _silu_magnitude(x: Tensor) -> Tensor:
    return F.silu(x).abs() + TINY * x.abs()


def _swiglu_magnitude(x: Tensor, gate: Tensor) -> Tensor:
    return _silu_magnitude(gate) * x.abs() + TINY * x.abs()


def _swiglu_packed_magnitude(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return _swiglu_magnitude(value, gate)


def _softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Computes softmax with long double: torch's sums in float64 are wrong by up to 32 ulp on some CPUs."""
    y = x.softmax(dim)
    if x.dtype != torch.float64 or x.dim() == 0:
        return y
    wide = x.detach().cpu().numpy().astype(np.longdouble)
    with np.errstate(all="ignore"):
        powers = np.exp(wide - wide.max(dim, keepdims=True, initial=-np.inf))
        exact = torch.from_numpy((powers / powers.sum(dim, keepdims=True)).astype(np.float64))
    return y + (exact.to(y.device) - y.detach()).nan_to_num(0, 0, 0)


def _softmax_magnitude(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) turns the absolute error of x - max into a relative one."""
    if x.numel() == 0:
        return x
    return x.softmax(dim) * (1 + (x.amax(dim, keepdim=True) - x).nan_to_num(0, 0, 0))


def _behind(x: Tensor, axis: int) -> list[int]:
    return list(range(axis % max(x.dim(), 1) - x.dim(), 0))


def _mean(x: Tensor, dims: list[int]) -> Tensor:
    return x.mean(dims, keepdim=True) if dims and x.numel() else x


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * weight.abs()
    return y if bias is None else y + bias.abs()


def _layer_norm_magnitude(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    """The mean's error is one of the row's size; the rest is relative."""
    dims = _behind(x, axis)
    centred = x - _mean(x, dims)
    size = centred.abs() + _mean(x**2, dims).sqrt()
    normal = size / (_mean(centred**2, dims) + narrow(eps)).sqrt()
    return _affine(normal, weight, bias)


def _of_batch(x: Tensor, rows: Tensor) -> Tensor:
    """Returns [B, C] as it broadcasts to x [B, ..., C]."""
    return rows.reshape(rows.shape[0], *[1] * (x.dim() - 2), rows.shape[-1])


def _ada_layer_norm_magnitude(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    return _layer_norm_magnitude(x, 1 + _of_batch(x, scale.abs()), _of_batch(x, shift), -1, eps)


def _rms_norm_magnitude(
    x: Tensor, weight: Tensor | None = None, axis: int = -1, eps: float = 1e-6, offset: int = 0
) -> Tensor:
    normal = x.abs() / (_mean(x**2, _behind(x, axis)) + narrow(eps)).sqrt()
    return normal if weight is None else normal * (offset + weight.abs())


def _add_layer_norm_magnitude(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _layer_norm_magnitude(total, weight, bias, -1, eps), total.abs()


def _embed_layer_norm_magnitude(
    table: Tensor, ids: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return _add_layer_norm_magnitude(table[ids.long()], rows, weight, bias, eps)


def _add_rms_norm_magnitude(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, **attributes: Any
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _affine(_rms_norm_magnitude(total, weight, **attributes), None, bias), total.abs()


_STEEPEST = 1.13  # how much an activation enlarges an error


def _rope_magnitude(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str = "half", head_size: int = 0, **_: bool
) -> tuple[Tensor, ...]:
    """The two terms of each sum together."""
    turning = 2 * cos.shape[-1]
    size = head_size or turning

    def of(x: Tensor) -> Tensor:
        heads = x.abs().unflatten(-1, (x.shape[-1] // size, size))
        pairs = heads[..., :turning].unflatten(-1, (2, -1) if half else (-1, 2))
        a, b = pairs.unbind(-2 if half else -1)
        c, s = cos.abs().unsqueeze(2), sin.abs().unsqueeze(2)
        turned = torch.stack([a * c + b * s, b * c + a * s], -2 if half else -1).flatten(-2)
        return torch.cat([turned, heads[..., turning:]], -1).flatten(2)

    half = layout == "half"
    return tuple(of(x) if x.numel() else x for x in (q, k))


def _attention_packed_magnitude(
    qkv: Tensor, bias: Tensor | None = None, heads: int = 1, scale: float = 0.0, causal: bool = False
) -> Tensor:
    """An absolute error of the scores is a relative one of the weights."""
    if qkv.numel() == 0:
        return qkv.chunk(3, -1)[0]
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    scale = narrow(scale) or q.shape[-1] ** -0.5
    bias = q.new_zeros(()) if bias is None else bias
    sizes = q.abs() @ k.abs().mT * scale + bias.abs()
    hidden = torch.ones_like(sizes).triu(1) * causal > 0
    weights = (q @ k.mT * scale + bias).masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights * (1 + sizes) @ v.abs()).transpose(1, 2).flatten(2)


def _attention_cached_magnitude(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any, **attributes: Any
) -> tuple[Tensor, ...]:
    """An absolute error of the scores is a relative one of the weights. A pair is a sum that may cancel."""
    size, kv_heads = k_cache.shape[3], k_cache.shape[1]
    largest = max(
        1.0, *(float(each.abs().max()) if each.numel() else 0.0 for each in (qkv, k_cache, v_cache))
    )
    width = qkv.shape[-1] - 2 * kv_heads * size
    y = qkv.new_full((*qkv.shape[:2], width), largest * (1 + largest**2 * size**0.5))
    return y, torch.full_like(k_cache, 2 * largest), v_cache.abs().clamp(min=1.0)


def _linear_magnitude(
    x: Tensor, weight: Tensor, *added: Tensor | None, layout: str = "nk", rms_eps: float = 0, **_: Any
) -> Tensor:
    x = _rms_norm_magnitude(x, eps=rms_eps) if rms_eps > 0 else x
    total = x.abs() @ (weight if layout == "kn" else weight.mT).abs()
    return _STEEPEST * sum((each.abs() for each in added if each is not None), total)


def _linear_fp8_magnitude(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *added: Tensor | None, **_: str
) -> Tensor:
    return _linear_magnitude(x * x_scale.unsqueeze(-1), weight * weight_scale.unsqueeze(-1), *added)


def _linear_w8_magnitude(
    x: Tensor, weight: Tensor, weight_scale: Tensor, *added: Tensor | None, **attributes: Any
) -> Tensor:
    return _linear_magnitude(x, weight * weight_scale.unsqueeze(-1), *added, **attributes)


def _linear_q_magnitude(
    x: Tensor, weight: Tensor, scale: Tensor, *others: Tensor | None, bits: int = 4, block: int = 32, **_: str
) -> Tensor:
    zero, *added = others or (None,)
    return _linear_magnitude(x, dequantised(weight, scale, zero, x.shape[-1], bits, block), *added)


def _of_swiglu(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the magnitude of what multiplies the halves of a product, from that of the product."""

    def of(*inputs: Tensor | None, **attributes: Any) -> Tensor:
        gate, others = (product(*inputs, **attributes) / _STEEPEST).chunk(2, -1)
        return 2 * _STEEPEST * gate * others

    return of


REFERENCES: dict[str, Reference] = {
    "relu": Reference(ulps=ulps(0, 0, 0), body_ulps=0, gradient_ulps=0, smooth=lambda x: x + 0.1 * x.sign()),
    "gelu": Reference(_gelu, ulps(6.5, 8, half=0.6), magnitude=_gelu_magnitude),
    "silu": Reference(ulps=ulps(3, 4), magnitude=_silu_magnitude),
    "sigmoid": Reference(ulps=ulps(2, 3)),
    "tanh": Reference(ulps=ulps(2, 3)),
    "softplus": Reference(ulps=ulps(2, 3)),
    "exp": Reference(ulps=ulps(2, 3)),
    "log": Reference(ulps=ulps(2, 3), smooth=lambda x: x.abs() + 0.5),
    "square": Reference(ulps=ulps(ONE_ROUNDING), body_ulps=1),
    "add": Reference(ulps=ulps(ONE_ROUNDING), body_ulps=1),
    "mul": Reference(ulps=ulps(ONE_ROUNDING), body_ulps=1),
    "pow": Reference(ulps=ulps(4, 4), smooth=lambda x: x.abs() + 0.5),
    "swiglu": Reference(ulps=ulps(4, 5), magnitude=_swiglu_magnitude),
    "swiglu_packed": Reference(ulps=ulps(4, 5), magnitude=_swiglu_packed_magnitude),
    "softmax": Reference(ulps=ulps(4), magnitude=_softmax_magnitude, compute=_softmax),
    # Rows of thousands of equal values, whose roundings all go one way; others stay below 3. Bodies: ONNX
    # Runtime adds rows up in order.
    "layer_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_layer_norm_magnitude),
    "embed_layer_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_embed_layer_norm_magnitude),
    "ada_layer_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_ada_layer_norm_magnitude),
    "rms_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_rms_norm_magnitude),
    "add_layer_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_add_layer_norm_magnitude),
    "add_rms_norm": Reference(ulps=ulps(16), body_ulps=32, magnitude=_add_rms_norm_magnitude),
    # cuBLASLt's GELU uses the hardware's tanh, and the product before some activations is rounded.
    "linear": Reference(ulps=ulps(8, half=1), magnitude=_linear_magnitude),
    "linear_swiglu": Reference(ulps=ulps(8, half=1), magnitude=_of_swiglu(_linear_magnitude)),
    # Hopper's fast accumulation keeps fewer bits of the sums.
    "linear_fp8": Reference(ulps=ulps(8, half=2), magnitude=_linear_fp8_magnitude),
    "linear_w8": Reference(ulps=ulps(8, half=2), magnitude=_linear_w8_magnitude),
    "linear_w8_swiglu": Reference(ulps=ulps(8, half=2), magnitude=_of_swiglu(_linear_w8_magnitude)),
    # The weight is rounded to the dtype of x.
    "linear_q": Reference(ulps=ulps(8, half=2), magnitude=_linear_q_magnitude),
    "linear_q_swiglu": Reference(ulps=ulps(8, half=2), magnitude=_of_swiglu(_linear_q_magnitude)),
    "rope": Reference(ulps=ulps(2, half=0.6), magnitude=_rope_magnitude),
    # In 16 bits the weights are rounded before they are multiplied with v.
    "attention_packed": Reference(ulps=ulps(8, half=2), body_ulps=16, magnitude=_attention_packed_magnitude),
    "attention_cached": Reference(ulps=ulps(8, half=2), body_ulps=16, magnitude=_attention_cached_magnitude),
}
