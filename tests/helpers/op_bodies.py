"""The two test ops as a user's module would have them: their library loaded, their bodies written."""

from twinop import torch_op
from twinop.export import DefaultInput, body
from twinop.library import find_library

torch_op.load(find_library("test_ops"))


@body(defaults={"weight": DefaultInput(1), "bias": DefaultInput(0)})
def pad_affine(op, x, weight, bias, *, scale, sign, pads):
    y = op.Mul(x, scale)
    if weight is not None:
        y = op.Mul(y, weight)
    shift = bias if bias is not None else 0.0
    # Not Where(..., y - shift, y + shift): ONNX Runtime's Where makes -0 in its first branch +0.
    y = op.Add(y, op.Mul(op.Where(op.Equal(sign, "minus"), -1.0, 1.0), shift))
    return op.Pad(y, pads, None, [-1])


@body
def double_and_sum(op, x):
    # Not ReduceSum: ONNX Runtime's reductions leave an empty tensor as it is (shape (3, 0) stays (3, 0)).
    ones = op.Expand(1.0, op.Concat(op.Shape(x, start=-1), [1], axis=0))
    return op.Add(x, x), op.Squeeze(op.MatMul(x, ones), [-1])
