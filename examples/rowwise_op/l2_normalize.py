"""The op l2_normalize: x divided by the norm of its row."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def l2_normalize(op, x, *, eps):
    """Its meaning in ONNX's standard operators."""
    squares = op.ReduceSum(op.Mul(x, x), [-1])
    return op.Div(x, op.Sqrt(op.Add(squares, eps)))
