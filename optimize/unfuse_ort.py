"""Splits fused nodes of ONNX Runtime's optimizer into operators that the other rewrites match.

Matches: com.microsoft SkipLayerNormalization, SkipSimplifiedLayerNormalization, EmbedLayerNormalization,
BiasGelu, FastGelu, Gelu, QuickGelu that is SiLU, FusedMatMul, Attention with constant weights,
MultiHeadAttention with a bias or a mask [B, T]. When the model is read, `split_activations` splits FusedConv
and FusedGemm, of which no inference knows the types, and `split_simplified_norms`
SimplifiedLayerNormalization, which onnx.checker refuses.
Writes: standard operators; MultiHeadAttention with separate q, k and v and a mask that its fast kernels take.
Leaves alone: attention with a KV cache, and nodes with attributes that standard operators lack.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from twinop.model import weights
from twinop.model.attach import OPSETS

from . import graph as g
from .attention import padding_bias, spread
from .rewrite import Rewrite

_HIDDEN = -10000.0  # what ONNX Runtime adds to a hidden score, also where a row has no other
_TANH = {"approximate": "tanh"}  # the form of FastGelu
_NUMBERS: Mapping[str, Sequence[str]] = {
    "": (), "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",), "Relu": (), "Selu": ("alpha", "gamma"), "Sigmoid": (), "Softplus": (),
    "Softsign": (), "Tanh": (),
}  # fmt: skip
"""The numbers of each activation of FusedConv and FusedGemm."""
_Maybe = ir.Value | None


class UnfuseOrt(Rewrite[bool], key="unfuse_ort"):
    """Splits nodes by `_RULES`."""

    def candidates(self) -> list[ir.Node]:
        return self.context.nodes(*_RULES, domain=g.MICROSOFT)

    def match(self, node: ir.Node) -> bool | g.Skipped | str:
        if node.op_type == "EmbedLayerNormalization" and any(map(g.is_read, node.outputs[1:2])):
            return any(node.inputs[7:8]) or g.Skipped("its mask index is read and it has no mask")
        if node.op_type == "QuickGelu" and g.attribute(node, "alpha", 1.702) != 1.0:
            return "ONNX Runtime fuses it"
        if node.op_type == "FusedMatMul":
            if g.attribute(node, "transBatchA", 0) or g.attribute(node, "transBatchB", 0):
                return g.Skipped("its batch is transposed")
            flags = (g.attribute(node, name, 0) for name in ("transA", "transB"))
            if any(flag and not g.rank(value) for flag, value in zip(flags, node.inputs, strict=True)):
                return g.Skipped("an input of unknown rank")
        if node.op_type == "Attention":
            _check_attention(node)
        if node.op_type == "MultiHeadAttention" and not _has_other_form(node):
            return "it has the form that the other rewrites match"
        return True

    def apply(self, node: ir.Node, match: bool) -> None:
        self.replace(node.outputs[0], _RULES[node.op_type](self.context, node), f"{node.op_type} decomposed")


def _skip_norm(context: g.RewriteContext, node: ir.Node) -> ir.Value:
    """y = norm(input + skip + bias)."""
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    x, skip, *rows = node.inputs
    bias = rows.pop() if len(rows) == (2 if simple else 3) else None
    if bias is not None:
        x = g.add(node, "Add", [x, bias], shape=g.dims(x))
    total = g.add(node, "Add", [x, skip], shape=g.dims(node.outputs[0]))
    if len(node.outputs) > 3 and g.is_read(node.outputs[3]):
        g.replace(node.outputs[3], total)
    if simple:
        normal, _ = rms_norm(node, total, [-1], g.attribute(node, "epsilon", 1e-12))
        return g.add(node, "Mul", [normal, *rows])
    return _norm(node, total, rows)


def _norm(node: ir.Node, x: ir.Value, rows: list[ir.Value | None]) -> ir.Value:
    attributes = {"axis": -1, "epsilon": g.attribute(node, "epsilon", 1e-12)}
    return g.add(node, "LayerNormalization", [x, *rows], attributes, shape=g.dims(node.outputs[0]))


def split_activations(model: ir.Model) -> None:
    """Splits FusedConv and FusedGemm, which ONNX Runtime makes again."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        name = g.attribute(node, "activation", "")
        if (
            node.op_type not in ("FusedConv", "FusedGemm")
            or node.domain != g.MICROSOFT
            or name not in _NUMBERS
        ):
            continue
        own = {key: each.value for key, each in node.attributes.items() if not key.startswith("activation")}
        result = g.add(node, node.op_type.removeprefix("Fused"), node.inputs[:3], own)
        if any(node.inputs[3:]):
            result = g.add(node, "Add", [result, node.inputs[3]])
        given = g.attribute(node, "activation_params", ())  # of FusedConv
        given = given or [g.attribute(node, f"activation_{each}", None) for each in _NUMBERS[name]]
        numbers = {key: each for key, each in zip(_NUMBERS[name], given, strict=False) if each is not None}
        if name == "Clip" and model.opset_imports.get("", 0) >= 11:
            ends = [g.initializer(model.graph, np.array(each, np.float32), name) for each in numbers.values()]
            result = g.add(node, name, [result, *ends])
        elif name:
            result = g.add(node, name, [result], numbers)
        g.replace(node.outputs[0], result)


def split_simplified_norms(model: ir.Model) -> None:
    """Splits SimplifiedLayerNormalization: no standard opset has it, but ONNX Runtime has it as standard."""
    opset = model.opset_imports.get("", 0)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type != "SimplifiedLayerNormalization" or node.domain:
            continue
        x, weight = node.inputs
        assert x is not None and weight is not None and node.graph is not None
        axis, kind = g.attribute(node, "axis", -1), weight.dtype or x.dtype or ir.DataType.FLOAT
        # The weight has the axes that are normalised.
        rank = -axis if axis < 0 else len(g.dims(weight) or [0])
        wide = kind if kind is ir.DataType.DOUBLE else ir.DataType.FLOAT
        shape = g.dims(x) or g.dims(node.outputs[0])
        if kind is not wide:
            x = g.add(node, "Cast", [x], {"to": wide}, shape=shape)
        axes, epsilon = list(range(-rank, 0)), g.attribute(node, "epsilon", 1e-5)
        normal, root = rms_norm(node, x, axes, epsilon, dtype=wide, opset=opset)
        if len(node.outputs) > 1 and g.is_read(node.outputs[1]):
            inverse = g.add(node, "Reciprocal", [root])
            if wide is not ir.DataType.FLOAT:
                inverse = g.add(node, "Cast", [inverse], {"to": ir.DataType.FLOAT})
            g.replace(node.outputs[1], inverse)
        if kind is not wide:
            normal = g.add(node, "Cast", [normal], {"to": kind})
        g.replace(node.outputs[0], g.add(node, "Mul", [normal, weight], dtype=kind, shape=shape))


def rms_norm(
    node: ir.Node,
    x: ir.Value,
    axes: list[int],
    epsilon: float,
    *,
    dtype: ir.DataType = ir.DataType.FLOAT,
    opset: int = OPSETS[0],
) -> tuple[ir.Value, ir.Value]:
    """Computes x / root with root = sqrt(mean(x * x) + epsilon); returns both."""
    shape = g.dims(x)
    reduced = None if shape is None else [*shape[: len(shape) - len(axes)], *[1] * len(axes)]
    square = g.add(node, "Mul", [x, x], dtype=dtype)
    given = [g.int_constant(node, axes)] if opset >= 18 else []
    mean = g.add(node, "ReduceMean", [square, *given], {} if given else {"axes": axes}, shape=reduced)
    small = g.scalar_constant(node, epsilon, square)
    root = g.add(node, "Sqrt", [g.add(node, "Add", [mean, small])])
    return g.add(node, "Div", [x, root]), root


def _embed_norm(context: g.RewriteContext, node: ir.Node) -> ir.Value:
    """y = norm(word[ids] + segment[types] + position)."""
    ids, types, word, position, segment, *rest = node.inputs
    rows, rest = rest[:2], rest[2:]
    shape = g.dims(node.outputs[0])
    total = g.add(node, "Gather", [word, ids], shape=shape)
    if segment is not None:
        total = g.add(node, "Add", [total, g.add(node, "Gather", [segment, types], shape=shape)], shape=shape)
    if len(rest) > 1 and rest[1] is not None:
        places = g.add(node, "Gather", [position, rest[1]], shape=shape)
    else:
        inputs = [position, g.int_constant(node, [0]), g.length(node, ids), g.int_constant(node, [0])]
        places = g.add(node, "Slice", inputs, shape=(shape or [None] * 3)[1:])
    total = g.add(node, "Add", [total, places], shape=shape)
    if len(node.outputs) > 1 and g.is_read(node.outputs[1]):
        inputs = [rest[0], g.int_constant(node, [1])]
        lengths = g.add(node, "ReduceSum", inputs, {"keepdims": 0}, shape=(shape or [None])[:1])
        g.replace(node.outputs[1], g.add(node, "Cast", [lengths], {"to": ir.DataType.INT32}))
    return _norm(node, total, rows)


def _gelu(context: g.RewriteContext, node: ir.Node) -> ir.Value:
    x, shape = node.inputs[0], g.dims(node.outputs[0])
    if node.op_type == "QuickGelu":  # SiLU
        return g.add(node, "Mul", [x, g.add(node, "Sigmoid", [x])])
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        x = g.add(node, "Add", node.inputs, shape=shape)
    form = _TANH if node.op_type == "FastGelu" else {}
    return g.add(node, "Gelu", [x], form, shape=shape)


def _matmul(context: g.RewriteContext, node: ir.Node) -> ir.Value:
    sides = []
    for value, flag in zip(node.inputs, ("transA", "transB"), strict=True):
        if value is not None and g.attribute(node, flag, 0):
            *outer, rows, columns = range(g.rank(value))
            value = g.transpose(node, value, [*outer, columns, rows])
        sides.append(value)
    shape = g.dims(node.outputs[0])
    result = g.add(node, "MatMul", sides, shape=shape)
    if (alpha := g.attribute(node, "alpha", 1.0)) != 1.0:
        number = g.initializer(context.graph, np.array(alpha, np.float32), "alpha")
        result = g.add(node, "Mul", [result, number])
    return result


def _check_attention(node: ir.Node) -> None:
    """Raises Skipped for what `_attention` does not take."""
    x, weight, bias, mask, past, added = [*node.inputs, *[None] * 6][:6]
    known = {"num_heads", "unidirectional", "scale", "mask_filter_value", "qkv_hidden_sizes"}
    if past is not None or not set(node.attributes) <= known:
        raise g.Skipped("it has a KV cache or unknown attributes")
    if x is None or not g.is_constant(weight):
        raise g.Skipped("its weight is not constant")
    if not g.has_only(weight, node.graph, node.op_type):
        raise g.Skipped("other nodes read its weight, too")
    _check_heads(x, bias, mask, added)


def _attention(context: g.RewriteContext, node: ir.Node) -> ir.Value:
    """Attention that computes q, k and v from x itself."""
    (x, weight), tensor = node.inputs[:2], g.tensor(node.inputs[1])
    assert x is not None and weight is not None and tensor is not None
    widths = g.attribute(node, "qkv_hidden_sizes", [weights.sizes(tensor)[1] // 3] * 3)
    parts = list[ir.Value]()
    for width, stop in zip(widths, accumulate(widths), strict=True):
        shape: list[g.Dim] = [*(g.dims(x) or [])[:-1], width]
        columns = weights.part(tensor, 1, stop - width, stop)
        part = g.initializer(context.graph, columns, f"{weight.name}_part")
        parts.append(g.add(node, "MatMul", [x, part], shape=shape))
    return _multi_head(context, node, parts)


def _has_other_form(node: ir.Node) -> bool:
    """Whether a node has what other rewrites do not match; raises Skipped if this one does not, either."""
    q, k, v, bias, mask, added, *past = [*node.inputs, *[None] * 6][: max(6, len(node.inputs))]
    if q is None or k is None or v is None or any(past):
        raise g.Skipped("it has a KV cache or packed inputs")
    if bias is None and g.rank(mask) != 2:
        return False
    if any(g.rank(each) != 3 for each in (q, k, v)):
        raise g.Skipped("q, k or v is not [B, T, H*D]")
    _check_heads(q, bias, mask, added)
    if bias is not None and None in map(g.last_dim, (q, k, v)):
        raise g.Skipped("an unknown number of columns")
    return True


def _check_heads(x: ir.Value, bias: _Maybe, mask: _Maybe, added: _Maybe) -> None:
    """Raises Skipped for what `_multi_head` does not take; x [B, T, C] has the queries."""
    rank = g.rank(mask) if mask is not None else 1
    if bias is not None and not g.is_constant(bias):
        raise g.Skipped("its bias is not constant")
    if rank not in (1, 2):
        raise g.Skipped(f"a mask of {rank} dimensions")
    if rank == 2 and added is not None and g.dims(added) is None:
        raise g.Skipped("a mask of unknown rank")
    if rank == 1 and mask is not None and not g.same_dims(g.dims(mask), (g.dims(x) or [])[:1]):
        raise g.Skipped("a mask that is not known to be one length for each sequence")


def _multi_head(context: g.RewriteContext, node: ir.Node, computed: Sequence[ir.Value] = ()) -> ir.Value:
    """Writes the attention of q, k and v, which may have been computed, with a bias; a mask [B, T] of 0 and 1
    becomes an additive one."""
    inputs = [*node.inputs, *[None] * 6]
    parts = [*computed] or [each for each in inputs[:3] if each is not None]
    # The inputs of Attention are x, weight, bias, mask, past and what is added.
    bias, mask, added = (inputs[2], inputs[3], inputs[5]) if computed else inputs[3:6]
    row = g.constant(bias)
    if bias is not None and row is not None:
        widths = [g.last_dim(part) or 0 for part in parts]
        for index, piece in enumerate(np.split(row, np.cumsum(widths)[:-1])):
            part = g.initializer(context.graph, piece, f"{bias.name}_part")
            parts[index] = g.add(node, "Add", [parts[index], part])
    has_rows = mask is not None and g.rank(mask) == 2
    names = ("num_heads", "unidirectional", "scale", *(() if has_rows else ("mask_filter_value",)))
    attributes = {name: node.attributes[name].value for name in names if name in node.attributes}
    if mask is not None and has_rows:
        hiding = padding_bias(mask, g.attribute(node, "mask_filter_value", _HIDDEN), parts[0], node)
        if added is not None:
            hiding = g.add(node, "Add", [hiding, added])
        added, mask = spread(hiding, parts[0], parts[1], node), None
    given = [*parts, None, mask, added]
    shape = [*(g.dims(parts[0]) or [None, None])[:2], g.last_dim(parts[2])]
    return g.add(node, "MultiHeadAttention", given, attributes, domain=g.MICROSOFT, shape=shape)


_RULES: Mapping[str, Callable[[g.RewriteContext, ir.Node], ir.Value]] = {
    "Attention": _attention,
    "BiasGelu": _gelu,
    "EmbedLayerNormalization": _embed_norm,
    "FastGelu": _gelu,
    "FusedMatMul": _matmul,
    "Gelu": _gelu,
    "MultiHeadAttention": _multi_head,
    "QuickGelu": _gelu,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
}
