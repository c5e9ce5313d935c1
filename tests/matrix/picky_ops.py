import torch

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def keep_above(op, x, score, *, bound):
    return op.Compress(x, op.Greater(score, bound), axis=0)


@twinop.op
def row_max(op, x):
    return op.ReduceMax(x, [-1], keepdims=0), op.ArgMax(x, axis=-1, keepdims=0)


@twinop.op
def is_more(op, x, w, id, *, least):
    zero = op.Constant(value_int=0)
    return op.Greater(x, op.Cast(op.Add(least, zero), to=6) if w is None else w), op.Identity(id)


@twinop.op
def with_sign(op, x, *, sign):
    return op.Neg(x) if sign == "minus" else op.Identity(x)  # `sign.value` is meant


def samples(op, dtype, size):
    kind = getattr(torch, dtype)
    if op == "keep_above":
        scores = torch.linspace(0, 1, size + 2)
        return [{"x": torch.randn(size + 2, 3).to(kind), "score": scores, "bound": 0.3}]
    if op == "row_max":
        return [{"x": x.to(kind)} for x in (10 * torch.randn(3, size + 1), torch.ones(2, 2, size + 1))]
    if op == "is_more":
        x = torch.arange(size + 3, dtype=torch.int32)
        return [{"x": x, "w": x.flip(0), "id": (x - 1).to(torch.uint64), "least": 2}]
    return None
