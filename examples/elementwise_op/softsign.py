"""The op softsign: x / (1 + |x|)."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def softsign(op, x):
    """Its meaning in ONNX's standard operators."""
    return op.Div(x, op.Add(op.Abs(x), 1.0))
