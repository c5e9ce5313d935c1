"""The kernels that a course on CUDA begins with, as ops: what each computes, in ONNX's standard operators."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def relu_scalar(op, x):
    return op.Where(op.Less(x, 0.0), 0.0, x)


@twinop.op
def relu_float4(op, x):
    return relu_scalar.body(op, x)


@twinop.op
def square(op, x):
    return op.Mul(x, x)


@twinop.op
def gelu(op, x):
    return op.Gelu(x, approximate="tanh")


@twinop.op
def matmul(op, a, b, *, tile):
    return op.MatMul(a, b)


@twinop.op
def softmax(op, x):
    return op.Softmax(x, axis=-1)


def samples(op, dtype, size):
    """Returns calls for `twinop test`, which does not guess sizes of matrices."""
    import torch

    if op == "matmul":
        return [{"a": torch.randn(3, size), "b": torch.randn(size, 5), "tile": tile} for tile in (0, 8)]


def reference(op):
    """Returns the bounds of `twinop test`: gelu cancels for negative x, and matmul adds up in one order."""
    from twinop.testing.references import Reference, ulps

    if op == "gelu":
        return Reference(ulps=ulps(4), magnitude=lambda x: x.abs())
    if op == "matmul":
        return Reference(ulps=ulps(8), magnitude=lambda a, b, tile: a.abs() @ b.abs())
