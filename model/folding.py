"""Folds constants and removes operators that do nothing, without changing a value.

onnxscript's optimizer, which torch's dynamo exporter calls too, takes constants up to 1e-8 for 0, and those
within 1e-5 of 1 for 1: log(x + 1e-10) becomes log(x), which is -inf at 0. Here only 0 and 1 do nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import RewritePass, pattern
from onnxscript.rewriter.rules import common as rules

_TIMES = 2  # a rewrite makes more constants


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
    rules.fuse_batchnorm_into_conv_rule,
    rules.fuse_batchnorm_into_conv_transpose_rule,
    rules.fuse_batchnorm_into_gemm_rule,
    rules.remove_optional_bias_from_conv_rule,
    rules.remove_optional_bias_from_conv_transpose_rule,
    rules.remove_optional_bias_from_gemm_rule,
    rules.remove_optional_bias_from_qlinear_conv_rule,
)


def _of_its_type(rule: pattern.RewriteRule) -> pattern.RewriteRule:
    """Returns a rule that only looks at nodes of its pattern's type: some rules walk all nodes for each."""
    limited, wanted = copy(rule), rule._target_pattern.output_nodes[0].op_identifier()

    def try_rewrite(model: ir.Model, graph: ir.Graph, node: ir.Node, **options: Any) -> Any:
        same = node.op_identifier() == wanted
        return rule.try_rewrite(model, graph, node, **options) if same else None

    vars(limited)["try_rewrite"] = try_rewrite
    return limited


def fold_constants(
    model: ir.Model, should_fold: Callable[[ir.Node], bool | None] = lambda node: None
) -> None:
    """Folds constants, removes operators that do nothing and joins equal ones, in place.

    Initializers that are inputs, too, are no constants: callers may replace them.

    Args:
        should_fold: whether a node of constants is folded; None leaves it to onnxscript.
    """
    names, defaults = [value.name for value in model.graph.inputs], take_defaults(model.graph)
    rules_of_types = [*map(_of_its_type, _RULES)]
    for _ in range(_TIMES):
        fold_constants_ir(model, onnx_shape_inference=True, should_fold=should_fold)
        changed = RewritePass(rules_of_types)(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not changed:
            break
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)
    _restore_names(model.graph, names)
    _register_constants(model)
    restore_defaults(model.graph, defaults)


def take_defaults(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Removes the values of inputs that are initializers, too, and returns them by name.

    onnx's inference and onnxscript's rules take them for constants.
    """
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


def _restore_names(graph: ir.Graph, names: Sequence[str | None]) -> None:
    """Makes inputs outputs again that onnxscript has renamed, to return them through an Identity."""
    for value, name in zip(graph.inputs, names, strict=True):
        if value.name != name:
            for output in [each for each in graph.outputs if each.name == name]:
                node = output.producer()
                assert node is not None
                ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
                graph.remove(node, safe=True)
            value.name = name


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
