"""The op quantize: x as int8, and the scale."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def quantize(op, x, *, levels):
    """Its meaning in ONNX's standard operators."""
    most = op.ReduceMax(op.Abs(x), keepdims=0)
    scale = op.Where(op.Greater(most, 0.0), op.Div(most, op.Cast(levels, to=1)), 1.0)
    return op.Cast(op.Round(op.Div(x, scale)), to=3), op.Reshape(scale, [1])
