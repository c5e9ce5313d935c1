"""The op my_op: scales every row to length one."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def my_op(op, x, *, eps):
    """What it means in ONNX's standard operators."""
    return op.Div(x, op.Sqrt(op.Add(op.ReduceSum(op.Mul(x, x), [-1]), eps)))
