# mypy: allow-untyped-defs
"""Defines each op a second time in standard ONNX operators: its function body.

A body is what an exported model runs where the custom-op library is missing, what ONNX's shape inference
sees, and the specification that tests compare the kernels with. It is a Python function with the op's name
that takes the inputs (positional) and the attributes (keyword-only) of the op's record:

    @body
    def silu(op, x):
        return op.Mul(x, op.Sigmoid(x))

* `op.Mul(...)` adds a node of the model's opset. Pass tensors by position and ONNX attributes by name. A
  Python number beside a tensor becomes a constant of the tensor's type; a float alone
  (`op.Expand(1.0, shape)`) becomes a constant of the compute type.
* Floating-point inputs arrive in the compute type and outputs are cast back, so a body has no casts of its
  own. The compute type is fp32 for 16-bit inputs, which few CPU kernels of ONNX Runtime accept, and fp64 for
  fp64. Where the kernel rounds an intermediate value, `op.rounded(y, x)` rounds y to the type that the
  input x has in the model.
* An optional input is None where the node omits it: write an ordinary `if weight is not None`. Nodes with
  other inputs, without defaults for these, call an overload of the function.
* An attribute is a reference to the node's own value. Pass it to an operator as an attribute (`axis=axis`) or
  in place of a tensor (`op.Mul(x, scale)`). `axis.value` is the value itself, for Python's `if` and `for`:
  where nodes have different values, the body gets an `If` with a branch for each. `axis.values` is the set
  of the values in the model.
* Several outputs are returned as a tuple, in the record's order.
"""

import math

import onnx_ir as ir

from twinop.record.body_registry import BODIES, Body, DefaultInput, body


def find_body(name: str) -> Body | None:
    """Returns the body of an op by its `OpSpec.key`, or None."""
    return BODIES.get(name)


# ----------------------------------------------------------------------------------------- twinop's ops


@body
def relu(op, x):
    # op.Relu would not do: ONNX does not specify it for NaN, and runtimes differ. x is in the second branch
    # because ONNX Runtime's Where turns a -0 in the first branch into +0.
    return op.Where(op.Less(x, 0), 0, x)


@body
def gelu(op, x, *, approximate):
    return _tanh_gelu(op, x) if approximate.values == {"tanh"} else op.Gelu(x, approximate=approximate)


def _tanh_gelu(op, x):
    # op.Gelu has fp32 constants, which give fp64 an error of 6e-9.
    inner = op.Mul(op.Mul(op.Add(op.Mul(op.Mul(x, x), 0.044715), 1.0), x), (2 / math.pi) ** 0.5)
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(inner), 1.0))


@body
def silu(op, x):
    # ONNX Runtime's Sigmoid returns 0 or 1e-8 below -18, and x multiplies that error.
    return op.Div(x, op.Add(op.Exp(op.Neg(x)), 1.0))


@body
def sigmoid(op, x):
    return op.Sigmoid(x)


@body
def tanh(op, x):
    return op.Tanh(x)


@body
def softplus(op, x):
    return op.Softplus(x)


@body
def exp(op, x):
    return op.Exp(x)


@body
def log(op, x):
    return op.Log(x)


@body
def square(op, x):
    return op.Mul(x, x)


@body
def add(op, a, b):
    return op.Add(a, b)


@body
def mul(op, a, b):
    return op.Mul(a, b)


@body
def pow(op, a, b):
    return op.Pow(a, b)


@body
def addcmul(op, x, a, b):
    return op.Add(x, op.Mul(a, b))


@body
def swiglu(op, x, gate):
    return op.Mul(silu(op, gate), x)


@body
def swiglu_packed(op, x):
    return _gated(op, x, "silu")


_ACTIVATIONS = {
    "none": lambda op, x: x,
    "relu": lambda op, x: op.Relu(x),
    "gelu": lambda op, x: op.Gelu(x),
    "gelu_tanh": _tanh_gelu,
    "silu": silu,
}
_ZERO_BIAS = DefaultInput(0, lambda attributes: int(attributes["layout"] == "kn"), along="weight")


@body(defaults={"bias": _ZERO_BIAS})
def linear(op, x, weight, bias, residual, *, activation, layout, invariant, rms_eps, few_rows):
    x = _normed(op, x, rms_eps)
    return _activated(op, _product(op, x, weight, bias, layout), residual, activation)


@body(defaults={"bias": _ZERO_BIAS})
def linear_swiglu(op, x, weight, bias, *, activation, layout, invariant, rms_eps, few_rows):
    x = _normed(op, x, rms_eps)
    packed = _product(op, x, weight, bias, layout)
    return _by_value(op, activation, lambda op, value: _gated(op, packed, value))


@body
def linear_q(op, x, weight, scale, zero, bias, residual, *, bits, block, activation, invariant):
    y = _quantised_product(op, x, weight, scale, zero, bias, bits, block)
    return _activated(op, y, residual, activation)


@body
def linear_q_swiglu(op, x, weight, scale, zero, bias, *, bits, block, activation, invariant):
    packed = _quantised_product(op, x, weight, scale, zero, bias, bits, block)
    return _by_value(op, activation, lambda op, value: _gated(op, packed, value))


def _normed(op, x, rms_eps):
    return _by_value(op, rms_eps, lambda op, eps: _divide_by_rms(op, x, [-1], eps) if eps > 0 else x)


def _activated(op, y, residual, activation):
    total = y if residual is None else op.Add(y, residual)
    return _by_value(op, activation, lambda op, value: _ACTIVATIONS[value](op, total))


def _quantised_product(op, x, weight, scale, zero, bias, bits, block):
    width = op.Shape(x, start=-1)

    def until_k(op, values):
        return op.Slice(op.Flatten(values, axis=1), [0], width, [1])

    def integers(values):
        bytes = op.Cast(values, to=6)

        def of_bits(op, value):
            apart = op.Unsqueeze(bytes, [-1])
            halves = apart if value == 8 else op.Concat(op.Mod(apart, 16), op.Div(apart, 16), axis=-1)
            return op.CastLike(op.Flatten(halves, axis=1), scale)

        return _by_value(op, bits, of_bits)

    def of_columns(values):
        apart = op.Unsqueeze(values, [-1])
        return _by_value(op, block, lambda op, size: until_k(op, op.Expand(apart, [1, 1, size])))

    middle = _by_value(op, bits, lambda op, value: op.CastLike(2 ** (value - 1), scale))
    zeros = middle if zero is None else of_columns(integers(zero))
    wide = op.Mul(op.Sub(until_k(op, integers(weight)), zeros), of_columns(scale))
    y = op.MatMul(x, op.Transpose(wide, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _gated(op, packed, activation):
    # ONNX Runtime's Split refuses a dimension of size 0.
    middle = op.Div(op.Shape(packed, start=-1), 2)
    gate = op.Slice(packed, [0], middle, [-1])
    up = op.Slice(packed, middle, op.Shape(packed, start=-1), [-1])
    return op.Mul(_ACTIVATIONS[activation](op, gate), up)


def _product(op, x, weight, bias, layout):
    def oriented(op, value):  # not layout.value: in the branch of another layout, the sizes do not fit
        return weight if value == "kn" else op.Transpose(weight, perm=[1, 0])

    y = op.MatMul(x, _by_value(op, layout, oriented))
    return y if bias is None else op.Add(y, bias)


def _by_value(op, attribute, compute):
    """Computes `compute(op, value)` for the attribute's value, with a branch for each value in the model."""
    values = sorted(attribute.values)
    if len(values) == 1:
        return compute(op, values[0])
    branches = [([(attribute, value)], lambda op, value=value: (compute(op, value),)) for value in values]
    return op.choose(branches, 1)[0]


@body
def rope(op, q, k, cos, sin, *, layout, inverse, head_size):
    c = op.Unsqueeze(cos, [2])
    s = _by_value(op, inverse, lambda op, back: op.Unsqueeze(op.Neg(sin) if back else sin, [2]))
    turning = op.Mul(op.Shape(cos, start=2), 2)
    size = turning
    if head_size.values != {0}:
        given = op.CastLike(head_size, turning)
        size = op.Where(op.Equal(given, 0), turning, given)

    def turned(x):
        shape = op.Concat(op.Shape(x, end=2), op.Div(op.Shape(x, start=2), size), size, axis=0)
        heads = op.Reshape(x, shape)
        first = heads if size is turning else op.Slice(heads, [0], turning, [-1])
        new = _by_value(op, layout, lambda op, value: _turned(op, first, c, s, turning, value))
        if size is not turning:
            new = op.Concat(new, op.Slice(heads, turning, size, [-1]), axis=-1)
        return op.Reshape(new, op.Shape(x))

    return turned(q), turned(k)


@body(defaults={"bias": DefaultInput(0, 1, along="qkv", ones=3)})
def attention_packed(op, qkv, bias, *, heads, scale, causal):
    count = op.Reshape(op.CastLike(heads, op.Shape(qkv)), [1])
    size = op.Div(op.Shape(qkv, start=2), op.Mul(count, 3))
    apart = op.Concat(op.Shape(qkv, end=2), [3], count, size, axis=0)
    by_head = op.Transpose(op.Reshape(qkv, apart), perm=[2, 0, 3, 1, 4])  # [3, B, H, S, D]
    q, k, v = (op.Squeeze(op.Slice(by_head, [i], [i + 1], [0]), [0]) for i in range(3))
    usual = op.Reciprocal(op.Sqrt(op.CastLike(size, qkv)))
    factor = _by_value(op, scale, lambda op, value: usual if value == 0 else op.CastLike(value, qkv))
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), factor)
    if bias is not None:
        scores = op.Add(scores, bias)
    if causal.value:
        length = op.Shape(qkv, start=1, end=2)
        hidden = op.Trilu(op.Expand(-math.inf, op.Concat(length, length, axis=0)), 1, upper=1)
        scores = op.Add(scores, hidden)
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    together = op.Concat(op.Shape(qkv, end=2), op.Mul(count, size), axis=0)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), together)


@body
def attention_cached(
    op, qkv, k_cache, v_cache, position, total, cos_sin, norms, sinks, *, scale, window, softcap, interleaved,
    eps,
):  # fmt: skip
    size, kv_heads = op.Shape(k_cache, start=3), op.Shape(k_cache, start=1, end=2)
    every = op.Div(op.Shape(qkv, start=2), size)
    heads = op.Sub(every, op.Mul(kv_heads, 2))
    shared = op.Div(heads, kv_heads)
    batch, tokens = op.Shape(qkv, end=1), op.Shape(qkv, start=1, end=2)
    parts = op.Reshape(qkv, op.Concat(batch, tokens, every, size, axis=0))  # [B, S, H + 2 Hkv, D]
    of_v = op.Add(heads, kv_heads)
    q, k, v = (
        op.Slice(parts, start, stop, [2]) for start, stop in (([0], heads), (heads, of_v), (of_v, every))
    )
    length = op.Shape(k_cache, start=2, end=3)
    limit = length if cos_sin is None else op.Min(length, op.Shape(cos_sin, end=1))
    last = op.Cast(position, to=7)
    first = op.Where(op.Less(last, 0), limit, op.Max(op.Sub(op.Add(last, 1), tokens), 0))
    rows = op.Add(op.Unsqueeze(first, [1]), op.Range(0, op.Squeeze(tokens, [0]), 1))  # [B, S]
    has_place = op.Less(rows, limit)

    def prepared(x, index):
        if norms is not None:
            x = op.Mul(_divide_by_rms(op, x, [-1], eps), op.Slice(norms, [index], [index + 1], [0]))
        if cos_sin is not None:
            x = _turned_by_row(op, x, size, cos_sin, has_place, rows, interleaved)
        return op.rounded(x, qkv)

    sequences = op.Expand(op.Unsqueeze(op.Range(0, op.Squeeze(batch, [0]), 1), [1]), op.Shape(rows))
    places_of_new = op.Where(has_place, rows, length)  # a row behind the others, which goes again
    index = op.Concat(op.Unsqueeze(sequences, [2]), op.Unsqueeze(places_of_new, [2]), axis=2)
    k_out = _written(op, k_cache, index, prepared(k, 1), length)
    v_out = _written(op, v_cache, index, v, length)
    places = op.Range(0, op.Squeeze(length, [0]), 1)
    newest = op.Sub(op.Add(first, tokens), 1)
    exists = op.LessOrEqual(op.Unsqueeze(places, [1]), op.Unsqueeze(newest, [1, 2, 3]))  # [B, 1, L, 1]
    keys, values = (op.Unsqueeze(op.Where(exists, each, 0), [2]) for each in (k_out, v_out))
    apart = op.Concat(batch, kv_heads, shared, tokens, size, axis=0)
    queries = op.Reshape(op.Transpose(prepared(q, 0), perm=[0, 2, 1, 3]), apart)
    scores = _masked_scores(op, queries, keys, size, places, rows, scale, window, softcap)
    if sinks is not None:
        rest = op.Concat(op.Shape(scores, end=4), [1], axis=0)
        sink = op.Expand(op.Reshape(sinks, op.Concat(kv_heads, shared, [1], [1], axis=0)), rest)
        scores = op.Concat(scores, sink, axis=-1)
    weights = op.Slice(op.Softmax(scores, axis=-1), [0], op.Shape(k_cache, start=2, end=3), [-1])
    y = op.Reshape(op.MatMul(weights, values), op.Concat(batch, heads, tokens, size, axis=0))
    together = op.Concat(batch, tokens, op.Mul(heads, size), axis=0)
    y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), together)
    return op.Where(op.Unsqueeze(has_place, [2]), y, math.nan), k_out, v_out


def _turned_by_row(op, x, size, cos_sin, has_place, rows, interleaved):
    """Turns the start of each head by the angles in its row of cos_sin."""
    turning = op.Shape(cos_sin, start=1)
    angles = op.Unsqueeze(op.Gather(cos_sin, op.Where(has_place, rows, 0)), [2])
    pairs = op.Div(turning, 2)
    c, s = op.Slice(angles, [0], pairs, [-1]), op.Slice(angles, pairs, turning, [-1])
    start = op.Slice(x, [0], turning, [-1])
    turned = _turned(op, start, c, s, turning, "interleaved" if interleaved.value else "half")
    return op.Concat(turned, op.Slice(x, turning, size, [-1]), axis=-1)


def _written(op, cache, index, new, length):
    """Writes rows into a cache; those without a place go into a row behind it."""
    by_row = op.Pad(op.Transpose(cache, perm=[0, 2, 1, 3]), [0, 0, 0, 0, 0, 1, 0, 0])
    by_row = op.Slice(op.ScatterND(by_row, index, new), [0], length, [1])
    return op.Transpose(by_row, perm=[0, 2, 1, 3])


def _masked_scores(op, queries, keys, size, places, rows, scale, window, softcap):
    usual = op.Reciprocal(op.Sqrt(op.CastLike(size, queries)))
    factor = _by_value(op, scale, lambda op, value: usual if value == 0 else op.CastLike(value, queries))
    raw = op.Mul(op.MatMul(queries, op.Transpose(keys, perm=[0, 1, 2, 4, 3])), factor)
    scores = _by_value(op, softcap, lambda op, cap: op.Mul(op.Tanh(op.Div(raw, cap)), cap) if cap else raw)
    own = op.Unsqueeze(rows, [1, 2, 4])
    seen = op.LessOrEqual(places, own)
    if window.values != {0}:
        width = op.CastLike(window, own)
        seen = op.And(seen, op.Or(op.Greater(places, op.Sub(own, width)), op.Equal(width, 0)))
    return op.Where(seen, scores, -math.inf)


@body
def last_position(op, mask):
    # The low 32 bits, which alone count: ONNX Runtime adds up int64 in doubles.
    low = op.Cast(op.Cast(mask, to=6), to=7)
    return op.Cast(op.Sub(op.ReduceSum(low, [1], keepdims=0), 1), to=6)


def _turned(op, heads, cos, sin, size, layout):
    """Builds a cos - b sin and b cos + a sin for the pairs (a, b) of each head."""
    if layout == "half":
        middle = op.Div(size, 2)
        a, b = op.Slice(heads, [0], middle, [-1]), op.Slice(heads, middle, size, [-1])
    else:
        a, b = (op.Slice(heads, [at], size, [-1], [2]) for at in (0, 1))
    turned = [op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))]
    if layout == "half":
        return op.Concat(*turned, axis=-1)
    pairs = op.Concat(*(op.Unsqueeze(each, [-1]) for each in turned), axis=-1)
    return op.Reshape(pairs, op.Shape(heads))


@body
def softmax(op, x, *, dim):
    return op.Softmax(x, axis=dim)


# ONNX Runtime's LayerNormalization refuses rows without columns, and RMSNormalization is new in opset 23.


@body(defaults={"weight": DefaultInput(1, "axis"), "bias": DefaultInput(0, "axis")})
def layer_norm(op, x, weight, bias, *, axis, eps):
    return _layer_normed(op, x, _trailing_axes(op, x, axis), weight, bias, eps)


@body
def ada_layer_norm(op, x, scale, shift, *, eps):
    between = op.Range(1, op.Sub(op.Size(op.Shape(x)), 1), 1)  # the dimensions that share scale and shift
    scale, shift = op.Unsqueeze(scale, between), op.Unsqueeze(shift, between)
    return _layer_normed(op, x, [-1], op.Add(scale, 1.0), shift, eps)


@body(defaults={"weight": DefaultInput(lambda attributes: 1 - attributes["offset"], "axis")})
def rms_norm(op, x, weight, *, axis, eps, offset):
    return _rms_normed(op, x, _trailing_axes(op, x, axis), weight, None, eps, offset)


@body(defaults={"bias": DefaultInput(0)})
def add_layer_norm(op, x, residual, weight, bias, *, eps):
    total = op.rounded(op.Add(x, residual), x)
    return _layer_normed(op, total, [-1], weight, bias, eps), total


@body(defaults={"bias": DefaultInput(0)})
def embed_layer_norm(op, table, ids, rows, weight, bias, *, eps):
    entries, ids = op.Shape(table, end=1), op.Cast(ids, to=7)
    has_row = op.And(op.GreaterOrEqual(ids, op.Neg(entries)), op.Less(ids, entries))
    total = op.rounded(op.Add(op.Gather(table, op.Where(has_row, ids, 0)), rows), table)
    total = op.Where(op.Unsqueeze(has_row, [-1]), total, math.nan)
    return _layer_normed(op, total, [-1], weight, bias, eps), total


@body(defaults={"bias": DefaultInput(0)})
def add_rms_norm(op, x, residual, weight, bias, *, eps, offset):
    total = op.rounded(op.Add(x, residual), x)
    return _rms_normed(op, total, [-1], weight, bias, eps, offset), total


def _trailing_axes(op, x, axis):
    """Builds the dimensions of x from `axis` on, counted from the end."""
    return op.Range(op.Neg(op.Size(op.Shape(x, start=axis))), 0, 1)


def _layer_normed(op, x, axes, weight, bias, eps):
    centred = op.Sub(x, op.ReduceMean(x, axes))
    return _affine(op, _divide_by_rms(op, centred, axes, eps), weight, bias)


def _rms_normed(op, x, axes, weight, bias, eps, offset):
    weight = None if weight is None else op.Add(weight, op.CastLike(offset, weight))
    return _affine(op, _divide_by_rms(op, x, axes, eps), weight, bias)


def _divide_by_rms(op, x, axes, eps):
    return op.Div(x, op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), axes), eps)))


def _affine(op, x, weight=None, bias=None):
    y = x if weight is None else op.Mul(x, weight)
    return y if bias is None else op.Add(y, bias)


# ------------------------------------------------------------------------------ matmuls in 8 bits


@body
def quantize_rows(op, x):
    is_nan = op.ReduceMax(op.Cast(op.IsNaN(x), to=1), [-1])  # that of x may pass over NaN
    largest = op.Where(op.Greater(is_nan, 0), math.nan, op.ReduceMax(op.Abs(x), [-1]))
    scale = op.Div(op.Max(largest, 2.0**-60), 448.0)  # e4m3 ends at 448, and the cast of q saturates there
    # ONNX Runtime makes x / scale of x (1 / scale), which has other bits; the halves are exact.
    q = op.Mul(op.Mul(x, 0.5), op.Div(2.0, scale))
    # Not Squeeze: of 0 rows ReduceMax keeps the columns.
    return q, op.Gather(scale, op.Constant(value=ir.tensor(0)), axis=-1)


def _quantized(op, x, y, *others):
    """Rounds y to the type of x, and puts its rows in 8 bits and their scales before it."""
    y = op.rounded(y, x)
    return *quantize_rows(op, y), y, *others


@body(defaults={"weight": DefaultInput(1), "bias": DefaultInput(0)})
def layer_norm_fp8(op, x, weight, bias, *, eps):
    return _quantized(op, x, _layer_normed(op, x, [-1], weight, bias, eps))


@body(defaults={"bias": DefaultInput(0)})
def add_layer_norm_fp8(op, x, residual, weight, bias, *, eps):
    return _quantized(op, x, *add_layer_norm(op, x, residual, weight, bias, eps=eps))


@body(defaults={"weight": DefaultInput(lambda attributes: 1 - attributes["offset"])})
def rms_norm_fp8(op, x, weight, *, eps, offset):
    return _quantized(op, x, _rms_normed(op, x, [-1], weight, None, eps, offset))


@body(defaults={"bias": DefaultInput(0)})
def add_rms_norm_fp8(op, x, residual, weight, bias, *, eps, offset):
    return _quantized(op, x, *add_rms_norm(op, x, residual, weight, bias, eps=eps, offset=offset))


@body
def gelu_fp8(op, x, *, approximate):
    return _quantized(op, x, gelu(op, x, approximate=approximate))


@body
def swiglu_packed_fp8(op, x):
    return _quantized(op, x, swiglu_packed(op, x))


@body
def linear_fp8(op, x, x_scale, weight, weight_scale, bias, residual, *, activation):
    product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    y = op.Mul(op.Mul(product, op.Unsqueeze(x_scale, [-1])), weight_scale)
    return _activated(op, op.Add(y, bias), residual, activation)


@body
def linear_w8(op, x, weight, weight_scale, bias, residual, *, activation, rms_eps, few_rows):
    y = _w8_product(op, x, weight, weight_scale, bias, rms_eps)
    return _activated(op, y, residual, activation)


@body
def linear_w8_swiglu(op, x, weight, weight_scale, bias, *, activation, rms_eps, few_rows):
    packed = _w8_product(op, x, weight, weight_scale, bias, rms_eps)
    return _by_value(op, activation, lambda op, value: _gated(op, packed, value))


def _w8_product(op, x, weight, weight_scale, bias, rms_eps):
    y = op.MatMul(_normed(op, x, rms_eps), op.Transpose(weight, perm=[1, 0]))
    return op.Add(op.Mul(y, weight_scale), bias)
