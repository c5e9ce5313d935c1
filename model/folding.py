"""Folds constants and removes operators that do nothing, without changing a value.

onnxscript's optimizer, which torch's dynamo exporter calls too, takes constants up to 1e-8 for 0, and those
within 1e-5 of 1 for 1: log(x + 1e-10) becomes log(x), which is -inf at 0. Here only 0 and 1 do nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import RewritePass, pattern
from onnxscript.rewriter.rules import common as rules

from . import weights
from .weights import is_large

_TIMES = 2  # a rewrite makes more constants
_DENSE = {"ConstantOfShape", "DequantizeLinear", "QuantizeLinear"}  # stay, as in onnxscript
_RESHAPES = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_HIDDEN = "hidden"
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"}


def _exactly(number: float) -> pattern.Constant:
    return pattern.Constant(number, rel_tol=0, abs_tol=0)


_NO_OPS: Sequence[Callable[..., object]] = (
    lambda op, x: op.Add(x, _exactly(0)),
    lambda op, x: op.Add(_exactly(0), x),
    lambda op, x: op.Sub(x, _exactly(0)),
    lambda op, x: op.Mul(x, _exactly(1)),
    lambda op, x: op.Mul(_exactly(1), x),
    lambda op, x: op.Div(x, _exactly(1)),
)
# Of onnxscript's default rules these are left out, because they change values: Clip(Clip(x)) and
# Relu(Clip(x)) where the ranges do not meet, padding moved into a ConvInteger with a zero point, a ScatterND
# that adds.
_RULES: Sequence[pattern.RewriteRule] = (
    *(pattern.RewriteRule(each, lambda op, x, **_: op.Identity(x)) for each in _NO_OPS),
    rules.dropout_zero_rule,
    rules.dropout_inference_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.min_min_rule,
    rules.max_max_rule,
    rules.min_max_rule,
    rules.max_min_rule,
    rules.successive_clip_relu_rule,
    rules.successive_relu_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,  # before reshape_reshape_rule
    rules.reshape_reshape_rule,
    rules.slice_split_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.normalize_pad_format_conv_rule,
    rules.fuse_pad_into_conv_rule,
    rules.remove_optional_bias_from_conv_rule,
    rules.remove_optional_bias_from_conv_transpose_rule,
    rules.remove_optional_bias_from_gemm_rule,
    rules.remove_optional_bias_from_qlinear_conv_rule,
)


def _of_its_type(rule: pattern.RewriteRule) -> pattern.RewriteRule:
    """Returns a rule that only looks at nodes of its pattern's type: some rules walk all nodes for each."""
    limited, wanted = copy(rule), rule._target_pattern.output_nodes[0].op_identifier()

    def try_rewrite(model: ir.Model, graph: ir.Graph, node: ir.Node, **options: Any) -> Any:
        same = node.op_identifier() == wanted and (node.op_type != "Flatten" or _has_sizes(node))
        return rule.try_rewrite(model, graph, node, **options) if same else None

    vars(limited)["try_rewrite"] = try_rewrite
    return limited


def _has_sizes(flatten: ir.Node) -> bool:
    """Whether a Reshape can write a Flatten without -1, which ONNX Runtime refuses for a batch of 0."""
    axis, shape = flatten.attributes.get_int("axis", 1), flatten.inputs[0].shape  # type: ignore[union-attr]
    return shape is not None and all(isinstance(size, int) for size in [*shape][axis:])


def fold_constants(
    model: ir.Model, should_fold: Callable[[ir.Node], bool | None] = lambda node: None
) -> None:
    """Folds constants, removes operators that do nothing and joins equal ones, in place. Initializers that
    are inputs, too, are no constants; what large constants give becomes a recipe. `should_fold`: whether a
    node of constants is folded, None leaves it to onnxscript."""
    defaults, rules_of_types = take_defaults(model.graph), [*map(_of_its_type, _RULES)]
    passes.LiftConstantsToInitializersPass(size_limit=weights.LARGE // 8)(model)
    for _ in range(_TIMES):
        with _without_large(model), hidden(model, _fails_in_onnxscript):
            fold_constants_ir(model, onnx_shape_inference=True, should_fold=should_fold)
            changed = RewritePass(rules_of_types)(model).modified
        changed |= _fold_large(model, should_fold)
        passes.RemoveUnusedNodesPass()(model)
        if not changed:
            break
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.NameFixPass()(model)
    _register_constants(model)
    restore_defaults(model.graph, defaults)


@contextmanager
def hidden(model: ir.Model, hides: Callable[[ir.Node], bool]) -> Iterator[None]:
    """Hides standard nodes meanwhile: they are in a domain that nobody knows."""
    for node in model.graph.all_nodes():
        node.domain = _HIDDEN if not node.domain and hides(node) else node.domain
    model.graph.opset_imports[_HIDDEN] = 1
    try:
        yield
    finally:
        model.graph.opset_imports.pop(_HIDDEN, None)
        for node in model.graph.all_nodes():
            node.domain = "" if node.domain == _HIDDEN else node.domain


def _fails_in_onnxscript(node: ir.Node) -> bool:
    """Whether a node splits a tensor into as many parts as a number says that is not known."""
    split = node.inputs[1] if node.op_type == "SplitToSequence" and len(node.inputs) > 1 else None
    return split is not None and ir.convenience.get_const_tensor(split) is None and split.shape == ()


@contextmanager
def _without_large(model: ir.Model) -> Iterator[None]:
    """Hides the numbers of large constants from onnxscript, which reads some to compare them with 0 and 1."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    hidden = [(value, tensor) for value in values if (tensor := value.const_value) and is_large(tensor)]
    for value, tensor in hidden:
        value.shape, value.type = ir.Shape(weights.sizes(tensor)), ir.TensorType(tensor.dtype)
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor in hidden:
            value.const_value = tensor


def _fold_large(model: ir.Model, should_fold: Callable[[ir.Node], bool | None]) -> bool:
    """Makes recipes of nodes that compute from large constants, and fuses batch norms."""
    changed = False
    for node in list(model.graph.all_nodes()):
        if node.op_type == "BatchNormalization" and not node.domain:
            changed |= _fuse_batch_norm(node)
        elif should_fold(node) is not False and (found := _recipe(model, node)) is not None:
            [old] = node.outputs
            new = _register(node, found, str(old.name))
            ir.convenience.replace_all_uses_with(old, new)
            assert node.graph is not None
            node.graph.remove(node, safe=True)
            changed = True
    return changed


def _recipe(model: ir.Model, node: ir.Node) -> ir.TensorProtocol | None:
    """Returns what a node computes from large constants that only it reads, unless that is larger."""
    tensors = [_constant(value) for value in node.inputs]
    known = [each for each in tensors if each is not None]
    is_open = len(known) < len([value for value in node.inputs if value is not None])
    if node.domain or node.op_type in _DENSE | _RANDOM or is_open or not any(map(is_large, known)):
        return None
    if len(node.outputs) != 1 or node.outputs[0].is_graph_output() or node.outputs[0].dtype is None:
        return None
    shape, dtype = node.outputs[0].shape, node.outputs[0].dtype
    if shape is None or not shape.is_static():
        return None
    if any(each.type is ir.AttributeType.GRAPH for each in node.attributes.values()):
        return None
    shared = [value for value in node.inputs if value is not None and len({*value.consumers()}) > 1]
    if any((each := _constant(value)) is not None and is_large(each) for value in shared):
        return None
    found = _computed(node, tensors, shape.numpy(), dtype, model.graph.opset_imports.get("", 1))
    return found if found.nbytes <= sum(each.nbytes for each in known) else None


def _computed(
    node: ir.Node, tensors: weights.Sources, shape: Sequence[int], dtype: ir.DataType, opset: int
) -> ir.TensorProtocol:
    first, given = tensors[0], [each for each in tensors if each is not None]
    if first is not None and node.op_type in _RESHAPES:
        return weights.reshape(first, shape)
    if first is not None and node.op_type == "Transpose":
        rank = len(weights.sizes(first))
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(rank)[::-1]
        return weights.transpose(first, order)
    if node.op_type == "Concat":
        return weights.join(given, node.attributes["axis"].as_int())
    if first is not None and node.op_type == "Cast" and dtype.is_floating_point():
        return weights.cast(first, dtype)
    return weights.node(node, tensors, opset, dtype, shape)


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    if value is None or not value.is_initializer() or value.is_graph_input() or value.is_graph_output():
        return None
    return value.const_value


def _fuse_batch_norm(node: ir.Node) -> bool:
    """Fuses a batch norm into the product that it reads, if it can: with scale = gamma / sqrt(variance +
    epsilon), the weight becomes weight * scale, and the bias (bias - mean) * scale + beta."""
    source, axes = node.inputs[0], {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
    product = source.producer() if source is not None else None
    if source is None or product is None or product.domain or product.op_type not in axes:
        return False
    if source.is_graph_output() or {*source.consumers()} != {node} or any(node.outputs[1:]):
        return False
    rows = [_constant(value) for value in node.inputs[1:]]
    given = [_constant(value) for value in product.inputs[1:] if value is not None]
    numbers = {name: each.value for name, each in (*node.attributes.items(), *product.attributes.items())}
    readers = {user for value in product.inputs[1:] if value is not None for user in value.consumers()}
    if None in rows or None in given or readers != {product} or numbers.get("training_mode", 0):
        return False
    gamma, beta, mean, variance = (each.numpy() for each in rows if each is not None)
    scale, weight = gamma / np.sqrt(variance + numbers.get("epsilon", 1e-5)), given[0]
    bias = given[1].numpy() if given[1:] and given[1] is not None else np.zeros_like(mean)
    value = product.inputs[1]
    assert weight is not None and value is not None
    shape, groups = weights.sizes(weight), numbers.get("group", 1)
    if product.op_type == "ConvTranspose":  # [inputs, outputs of a group, ...]
        if shape[0] % groups:
            return False
        split = weights.reshape(weight, [groups, shape[0] // groups, *shape[1:]])
        ones = [1] * len(shape[2:])
        scaled = _times(split, scale.reshape(groups, 1, shape[1], *ones))
        scaled = weights.reshape(scaled, shape)
    else:
        axis = 0 if numbers.get("transB", 0) else axes[product.op_type]
        scaled = _times(weight, scale.reshape([-1 if each == axis else 1 for each in range(len(shape))]))
    name, row = str(value.name), (numbers.get("beta", 1.0) * bias - mean) * scale + beta
    product.attributes.pop("beta", None)
    product.resize_inputs(3)
    product.replace_input_with(1, _register(product, scaled, f"{name}_scaled"))
    product.replace_input_with(2, _register(product, ir.tensor(row.astype(mean.dtype)), f"{name}_shifted"))
    [old] = node.outputs[:1]
    source.type, source.shape = old.type, old.shape
    ir.convenience.replace_all_uses_with(old, source, replace_graph_outputs=True)
    source.name, old.name = old.name, f"{old.name}_before"
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return True


def _times(tensor: ir.TensorProtocol, factor: np.ndarray) -> ir.TensorProtocol:
    return weights.elementwise("Mul", tensor, ir.tensor(factor.astype(tensor.dtype.numpy())))


def _register(node: ir.Node, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Adds an initializer to the main graph, with a new name that starts with another."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    names = (name if not index else f"{name}_{index}" for index in range(len(graph.initializers) + 1))
    value = ir.val(next(each for each in names if each not in graph.initializers), const_value=tensor)
    graph.register_initializer(value)
    return value


def take_defaults(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Removes the values of inputs that are initializers, too, and returns them by name: onnx's inference and
    onnxscript's rules take them for constants."""
    found = {}
    for value in graph.inputs:
        if value.is_initializer() and value.const_value is not None:
            found[str(value.name)] = value.const_value
            del graph.initializers[str(value.name)]
            value.const_value = None
    return found


def restore_defaults(graph: ir.Graph, defaults: Mapping[str, ir.TensorProtocol]) -> None:
    """Undoes `take_defaults`."""
    for value in graph.inputs:
        if str(value.name) in defaults:
            value.const_value = defaults[str(value.name)]
            graph.register_initializer(value)


def _register_constants(model: ir.Model) -> None:
    """Registers the shapes that onnxscript loses where it replaces several Flatten of one value."""
    known = {value for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values())}
    taken = {value.name for node in model.graph.all_nodes() for value in node.outputs}
    taken |= {value.name for value in known}
    for node in model.graph.all_nodes():
        for value in node.inputs:
            if value is None or value.producer() is not None or value in known or value.const_value is None:
                continue
            while value.name in taken:
                value.name = f"{value.name}_again"
            assert node.graph is not None
            node.graph.register_initializer(value)
            known.add(value)
            taken.add(value.name)
