"""The function bodies of tests/ops/quantise.h, as a user has them beside the library."""

import torch

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def quantise(op, x, scale):
    return op.Div(x, scale)


@twinop.op
def quantise_e5m2(op, x, scale):
    return op.Cast(op.Div(x, scale), to=19, saturate=0)


@twinop.op
def quantise_int8(op, x, scale):
    return op.Cast(op.Clip(op.Round(op.Div(x, scale)), -128.0, 127.0), to=3)


@twinop.op
def dequantise(op, q, scale):
    return op.Mul(op.Cast(q, to=1), scale)


@twinop.op
def quantise_rows(op, x):
    largest = op.ReduceMax(op.Abs(x), [-1])
    scale = op.Where(op.Greater(largest, 0.0), op.Div(largest, 448.0), op.CastLike(1.0, largest))
    return op.Div(x, scale), scale


def samples(op, dtype, size):
    if op != "quantise_rows":
        return None
    generator = torch.Generator().manual_seed(size)
    return [{"x": torch.randn(rows, size, generator=generator)} for rows in (1, 5)]
