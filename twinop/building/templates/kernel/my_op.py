"""The op my_op: y = scale * x, and total = the sum of y."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def my_op(op, x, *, scale):
    """What it means in ONNX's standard operators."""
    y = op.Mul(x, scale)
    return y, op.ReduceSum(op.Reshape(y, [-1]), [0])
