"""The op my_op: x * x, element by element."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def my_op(op, x):
    """What it means in ONNX's standard operators."""
    return op.Mul(x, x)
