"""Replaces attention over short sequences by twinop's own, which reads q, k and v where one matmul put them.

Matches: MultiHeadAttention in 16 bits, with few tokens of known number. q, k and v are the thirds of one
tensor, or matmuls of one tensor, which are merged. A mask is an additive one, or the lengths that
`attention.py` made of a mask: the mask itself is then added, which needs no promise of padding on the right.
Writes: CustomAttentionPacked. It saves the copies of q, k and v, and the memory that ONNX Runtime's attention
sets in each run. More tokens are left to cuDNN.
"""

import onnx_ir as ir

from . import graph as g
from .attention import padding_bias
from .merge_linear import matmuls_of_one, merge
from .rewrite import Rewrite
from .scores import LOWEST

_HEAD_SIZES = (32, 64, 128)
_SMALL_HEAD = 64 * 32
"""Numbers in the q of a head. With at most so many, as in the windows of Swin, cuDNN is slower for any number
of sequences (docs/tuning.md)."""
_MAX_MULTIPLICATIONS = 24_576 * 16 * 128
"""Multiplications of q and k of larger heads, in whole tiles of 16 queries and 128 keys. With more, cuDNN is
faster."""
_Match = tuple[ir.Value | None, list[ir.Node], ir.Value | None]


class PackedAttention(
    Rewrite[_Match], key="packed_attention", microsoft=("MultiHeadAttention",), sixteen_bits_only=True
):
    """Finds the tensor with q, k and v, or their matmuls; and the mask to add, or that of tokens [B, T]."""

    def match(self, node: ir.Node) -> _Match | str:
        sizes, parts = _sizes(node), node.inputs[:3]
        if sizes is None:
            return "its heads or its number of tokens are not those of the kernel, or not known"
        qkv, matmuls = g.whole_of(parts, -1), matmuls_of_one(parts)
        if (qkv is None and not matmuls) or {g.last_dim(each) for each in parts} != {sizes[2]}:
            return "q, k and v are not the thirds of one tensor, nor matmuls of one tensor"
        given = {index: value for index, value in enumerate(node.inputs) if value is not None}
        bias, lengths = given.pop(5, None), given.pop(4, None)
        if given.keys() != {0, 1, 2} or (bias is not None and lengths is not None):
            return "it has a cache, a bias, or two masks"
        if lengths is not None:
            bias = self.context.lengths.get(lengths)
        elif bias is not None:
            bias = _smallest(bias, [*sizes[:1], g.attribute(node, "num_heads", 0), sizes[1]])
        if bias is None and any(node.inputs[4:]):
            return "its mask is not of a form that the op takes"
        return qkv, matmuls, bias

    def apply(self, node: ir.Node, match: _Match) -> None:
        (qkv, matmuls, bias), result = match, node.outputs[0]
        if bias is not None and any(node.inputs[4:5]):
            bias = padding_bias(bias, LOWEST, result, node)
        attributes = {
            "heads": g.attribute(node, "num_heads", 0),
            "scale": g.attribute(node, "scale", 0.0),
            "causal": g.attribute(node, "unidirectional", 0),
        }
        inputs = [qkv if qkv is not None else merge(self.context, matmuls), bias]
        new = self.context.add_op(node, "attention_packed", inputs, g.dims(node.inputs[0]), **attributes)
        self.replace(result, new, "attention of packed q, k and v")


def _sizes(node: ir.Node) -> tuple[g.Dim, int, int] | None:
    """Returns the sizes of q [B, S, H * D], if the attention is small enough."""
    shape, heads = g.dims(node.inputs[0]) or [], g.attribute(node, "num_heads", 0)
    if len(shape) != 3 or len(node.outputs) > 1:
        return None
    batch, tokens, width = shape
    size = next((each for each in _HEAD_SIZES if width == heads * each), None)
    if size is None or not isinstance(tokens, int) or not isinstance(width, int):
        return None
    if tokens * size > _SMALL_HEAD:
        tiles = -(-tokens // 16) * -(-tokens // 128)
        if not isinstance(batch, int) or batch * tiles * 16 * 128 * width > _MAX_MULTIPLICATIONS:
            return None
    return batch, tokens, width


def _smallest(bias: ir.Value, whole: list[g.Dim]) -> ir.Value | None:
    """Returns an additive mask as it was before it was expanded, if it has the form that the op takes."""
    expand = g.producer(bias, "Expand")
    for each in ([expand.inputs[0]] if expand is not None else []) + [bias]:
        shape = g.dims(each) or []
        fits = len(shape) == 4 and shape[3] == whole[2]
        if fits and all(size in (1, full) for size, full in zip(shape[:3], whole, strict=True)):
            return each
    return None
