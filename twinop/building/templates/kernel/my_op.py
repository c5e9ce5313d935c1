"""The op my_op: y = scale * x."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def my_op(op, x, *, scale):
    """What it means in ONNX's standard operators."""
    return op.Mul(x, scale)
