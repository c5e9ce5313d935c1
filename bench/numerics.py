"""The accuracy of every op: its largest error in units in the last place, beside torch and ONNX Runtime."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinop import torch_op

from . import report
from .cases import ROWS, UNARY, Case, Sample, family_of, input_shapes, make_outputs
from .cells import IN_ORT, IN_TORCH
from .peers import Entry
from .providers import EAGER, Problem, Providers
from .report import reason_of

DTYPES = ("float32", "float16", "bfloat16")
ELEMENTS = 1 << 22
SHAPE = (512, 4096)
SHIFTED = ("layer_norm", "add_layer_norm")
"""Ops whose results near zero are differences of larger numbers. Their ulp is at least the ulp of 1."""


def providers(entries: Mapping[str, Entry]) -> list[str]:
    """Returns the names of the providers whose errors are compared."""
    return [IN_TORCH, IN_ORT, EAGER, *(name for entry in entries.values() for name in entry.ort)]


def measure(who: Providers, entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Returns a row for each op, dtype and provider, with the largest error over all outputs."""
    rows: list[dict[str, Any]] = []
    with report.progress("numerics", len(entries) * len(DTYPES)) as step, torch.no_grad():
        for name, entry in entries.items():
            for dtype in DTYPES:
                step(f"{name} {dtype}")
                rows += _op(who, name, entry, dtype)
            who.close()
    return rows


def _op(who: Providers, name: str, entry: Entry, dtype: str) -> list[dict[str, Any]]:
    family = family_of(torch_op.records()[entry.op], entry)
    case = Case(name, family, dtype, SHAPE if family == ROWS else (ELEMENTS,), kind="numerics")
    inputs = draw(case, entry, who.device)
    if family != ROWS:
        case = Case(name, family, dtype, tuple(next(iter(inputs.values())).shape), kind="numerics")
    sample = Sample(case, entry, inputs, make_outputs(case, entry, who.device))
    expected = sample.exact()
    least = 1.0 if entry.op in SHIFTED else 0.0
    rows = []
    for provider, subject in who.build(sample).items():
        try:
            results = subject.result()
            error = max(ulp_error(a, b, least) for a, b in zip(results, expected, strict=True))
        except Exception as failure:  # any error of a peer
            who.problems.append(Problem(case, provider, reason_of(failure)))
            continue
        rows.append(
            {
                "op": name,
                "family": family,
                "dtype": dtype,
                "device": who.device.type,
                "provider": provider,
                "values": results[0].numel(),
                "max_ulp": error if error == float("inf") else round(error, 4),
            }
        )
    return rows


def draw(case: Case, entry: Entry, device: torch.device) -> dict[str, Tensor]:
    """Draws inputs of all magnitudes.

    An op of one input gets every finite value of a 16-bit dtype. Other elementwise ops get normal and
    log-uniform values, row-wise ops normal ones.
    """
    if case.family == UNARY and case.torch_dtype.itemsize == 2:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device).to(torch.int16)
        x = every.view(case.torch_dtype)
        x = x[x.isfinite()]
        return {"x": x[x > 0] if entry.positive else x}
    inputs = {}
    for name, shape in input_shapes(case, entry).items():
        x = torch.randn(shape, device=device, dtype=torch.float64)
        if case.family != ROWS:
            wide = torch.exp2(torch.empty_like(x).uniform_(-24, 6)) * x.sign()
            x = torch.where(torch.rand_like(x) < 0.5, wide, 3 * x)
        if case.entry == "pow":
            x = torch.exp2(torch.empty_like(x).uniform_(-4, 4)) if name == "a" else x.clamp(-8, 8)
        elif name in entry.positive:
            x = x.abs().clamp_min(1e-6)
        inputs[name] = x.to(case.torch_dtype)
    return inputs


def ulp_error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Returns the largest distance between `actual` and `expected` in units in the last place (ulp).

    Expected values beyond the range of `actual`'s dtype do not count. NaN or infinity for any other value is
    an infinite error.

    Args:
        expected: the exact result in float64.
        least: an ulp is that of max(|expected|, least) in `actual`'s dtype.
    """
    info = torch.finfo(actual.dtype)
    kept = expected.abs() <= info.max
    exact, given = expected[kept], actual[kept].double()
    if exact.numel() == 0:
        return 0.0
    _, exponent = torch.frexp(exact.abs().clamp_min(max(info.tiny, least)))
    ulp = torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)
    inf = float("inf")
    return float(((given - exact).abs() / ulp).nan_to_num(inf, posinf=inf).max())
