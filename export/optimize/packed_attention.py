"""Replaces attention over short sequences by twinop's own, which reads q, k and v where one product put them.

Matches: MultiHeadAttention whose q, k and v are the thirds of one tensor, in 16 bits, with few tokens of
known number. A mask is an additive one, or the lengths that `attention.py` made of a mask: the mask itself is
then added, which needs no promise of padding on the right.
Writes: CustomAttentionPacked. It saves the copies of q, k and v, and the memory that ONNX Runtime's attention
sets in each run. More tokens are left to cuDNN.
"""

import onnx_ir as ir

from .attention import padding_bias
from .graph import DOMAIN, MICROSOFT, Work, add, attribute, dims, part_of, producer, replace
from .scores import LOWEST

_HEAD_SIZES = (32, 64, 128)
_MAX_PRODUCTS = 24_576 * 16 * 128
"""Multiplications of q and k in whole tiles of 16 queries and 128 keys. With more, cuDNN is faster
(docs/tuning.md)."""


def rewrite(work: Work) -> None:
    biases: dict[ir.Value, ir.Value] = {}  # by the lengths that they stand for
    for node in work.nodes("MultiHeadAttention", domain=MICROSOFT):
        packed = _packed(node)
        if packed is None:
            continue
        qkv, batch, tokens, width = packed
        given = {index: value for index, value in enumerate(node.inputs) if value is not None}
        bias = given.pop(5, None)
        lengths = given.pop(4, None)
        if given.keys() != {0, 1, 2} or (bias is not None and lengths is not None):
            continue
        heads = attribute(node, "num_heads", 0)
        if lengths is not None:
            shown = work.lengths.get(lengths)
            if shown is None:
                continue
            if lengths not in biases:
                biases[lengths] = padding_bias(shown, LOWEST, qkv, node)
            bias = biases[lengths]
        elif bias is not None:
            bias = _smallest(bias, [batch, heads, tokens])
            if bias is None:
                continue
        attributes = {
            "heads": heads,
            "scale": attribute(node, "scale", 0.0),
            "causal": attribute(node, "unidirectional", 0),
        }
        name = work.records["attention_packed"].onnx_name
        inputs = [qkv] if bias is None else [qkv, bias]
        result = add(node, name, inputs, attributes, domain=DOMAIN, shape=[batch, tokens, width // 3])
        replace(node.outputs[0], result)
        work.made["attention of packed q, k and v"] += 1


def _packed(node: ir.Node) -> tuple[ir.Value, int, int, int] | None:
    """Returns [B, S, 3 * H * D] with q, k and v of an attention that is small enough, and these sizes."""
    parts, heads = [part_of(each, -1) for each in node.inputs[:3]], attribute(node, "num_heads", 0)
    if parts[0] is None or len(node.outputs) > 1:
        return None
    qkv, shape = parts[0][0], dims(parts[0][0]) or []
    if len(shape) != 3:
        return None
    batch, tokens, width = shape
    if not (isinstance(batch, int) and isinstance(tokens, int) and isinstance(width, int)):
        return None
    third = width // 3
    in_order = parts == [(qkv, start, start + third) for start in (0, third, 2 * third)]
    tiles = -(-tokens // 16) * -(-tokens // 128)
    is_small = batch * tiles * 16 * 128 * third <= _MAX_PRODUCTS
    fits = width == 3 * third and any(third == heads * size for size in _HEAD_SIZES)
    return (qkv, batch, tokens, width) if in_order and fits and is_small else None


def _smallest(bias: ir.Value, whole: list[int]) -> ir.Value | None:
    """Returns an additive mask as it was before it was expanded, if it has the form that the op takes."""
    expand = producer(bias, "Expand")
    for each in ([expand.inputs[0]] if expand is not None else []) + [bias]:
        shape = dims(each) or []
        fits = len(shape) == 4 and shape[3] == whole[2]
        if fits and all(size in (1, full) for size, full in zip(shape[:3], whole, strict=True)):
            return each
    return None
