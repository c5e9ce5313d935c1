"""Brings a model into the form that the rewrites match: fp32, constants folded, shapes known."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    InlinePass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
)
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from twinop.errors import ExportError
from twinop.model.attach import OPSETS
from twinop.model.folding import fold_constants, hidden
from twinop.model.schema import registered_schemas
from twinop.record.op_spec import OpSpec
from twinop.system.quiet import quiet

from . import graph as g
from .symbolic_shapes import infer_shapes, infer_types
from .user_ops import FLOATS_16, UserOps

_SCALES = {("QuantizeLinear", 1), ("DequantizeLinear", 1)}
_POSSIBLE_NO_OPS = ("Concat", "Expand", "Identity", "Reshape", "Split")


def prepare(model: ir.Model, records: Mapping[str, OpSpec]) -> None:
    """Brings a model into the form that the rewrites match, in place; ExportError: its opset cannot be
    converted."""
    _convert_opset(model)
    own = {record.domain for record in records.values()}

    def fold() -> None:
        """Folds constants."""
        given = g.given_of_all(model.graph)
        with (
            hidden(model, lambda node: _misleads(node, given)),
            g.keeping_marks(model),
        ):
            fold_constants(model, lambda node: False if node.domain in own else None)

    with quiet(), registered_schemas([each for each in records.values() if not each.is_backward]):
        infer_types(model)
        fold()
        infer_shapes(model)
        _fold_sizes(model)
        fold()  # the sizes that inference finds make more constants
        _remove_no_ops(model)
        CommonSubexpressionEliminationPass()(model)
        clean(model)


def inline_functions(model: ir.Model, records: Mapping[str, OpSpec], user_ops: UserOps) -> list[str]:
    """Removes the bodies of twinop's and the user's own ops, which are attached again, and of those that ONNX
    Runtime has itself, which it ignores; inlines all others, which `user_ops` counts. Returns a note on each
    that has another opset than the model. ExportError: they call each other in a circle."""
    ours = {record.node_type for record in records.values()}
    bodies = {key: model.functions.pop(key) for key in [*model.functions] if key[:2] in ours}
    registered = {(each.domain, each.name) for each in get_all_operator_schema()} if model.functions else ()
    for key in [each for each in model.functions if each[:2] in registered]:
        del model.functions[key]
    RemoveUnusedFunctionsPass()(model)
    notes = list[str]()
    for function in model.functions.values():
        for domain, version in function.opset_imports.items():
            function.opset_imports[domain] = wanted = model.graph.opset_imports.setdefault(domain, version)
            text = f"{function.domain}::{function.name}: read as opset {wanted}, not {version}"
            notes += [f"{text}, as in ONNX Runtime"] if wanted != version else []
    try:
        done = InlinePass(lambda function: function.domain not in user_ops.domains)(model)
    except Exception as error:
        reason = error.__cause__ or error
        raise ExportError(
            f"the model's functions cannot be inlined: {reason}. Export the model again"
        ) from error
    user_ops.count_inlined(done.id_count)  # type: ignore[attr-defined]
    user_ops.detach(model, records, bodies)
    return notes


def _convert_opset(model: ir.Model) -> None:
    opset = model.graph.opset_imports.get("", 0)
    if opset in OPSETS:
        return
    target, before = OPSETS[0] if opset < OPSETS[0] else OPSETS[-1], model.graph
    from onnxscript import version_converter

    try:
        with quiet():
            if opset < 13:  # onnx's converter writes Flatten around a Softmax of unknown rank
                infer_types(model)
                infer_shapes(model)
            # ONNX Runtime's optimizer writes LayerNormalization at any opset.
            with hidden(model, lambda node: not onnx.defs.has(node.op_type, opset)):
                version_converter.convert_version(model, target, fallback=True)
    except Exception as error:
        raise ExportError(f"opset {opset} cannot be converted to {target}: {error}") from error
    if model.graph is not before:
        _copy_meta(before, model.graph)
    for node in model.graph.all_nodes() if opset < 11 else ():  # the converter leaves them the new defaults
        if node.op_type == "Resize" and not node.domain:
            node.attributes["coordinate_transformation_mode"] = ir.AttrString(
                "coordinate_transformation_mode", "asymmetric"
            )
            node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")
    for node in model.graph.all_nodes() if opset < 13 else ():  # it reshapes what a Softmax got flattened
        is_after = node.op_type == "Reshape" and g.producer(
            node.inputs[0], "Hardmax", "LogSoftmax", "Softmax"
        )
        if is_after and g.producer(node.inputs[1], "Shape"):
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
    if model.graph.opset_imports.get("") != target:
        raise ExportError(
            f"opset {opset} cannot be converted to {target}, which function bodies need. Export the model "
            f"again with opset {OPSETS[0]} to {OPSETS[-1]}"
        )


def _copy_meta(before: ir.Graph, after: ir.Graph) -> None:
    """Copies the `meta` of a graph and its nodes to the graph that onnx's converter made of it, whose values
    have the same names, also of other nodes. A node of another type in the place of the old one, as Resize in
    that of Upsample, gives its result another name; readers show it. ExportError: the value is gone."""
    after.meta.update(before.meta)
    makers = {value.name: node for node in after.all_nodes() for value in node.outputs}
    for node in before.all_nodes():
        read = [value for value in node.outputs if g.is_read(value)]
        if node.meta and read:
            maker = makers.get(read[0].name)
            for use in read[0].uses() if maker is None else ():
                reader = makers.get(use.node.outputs[0].name)
                given = reader.inputs[use.idx] if reader and len(reader.inputs) > use.idx else None
                maker = (given.producer() if given else None) or maker
            if maker is None:
                raise ExportError(
                    f"opset {before.opset_imports.get('')}: onnx's converter renames {read[0].name}, the "
                    f"result of {node.op_type}. Export the model again with opset {OPSETS[0]} to {OPSETS[-1]}"
                )
            maker.meta.update(node.meta)


def clean(model: ir.Model) -> None:
    """Removes nodes that nothing reads, and sorts the rest."""
    RemoveUnusedNodesPass()(model)
    model.graph.sort()


def _fold_sizes(model: ir.Model) -> None:
    """Replaces sizes that nodes take from a Shape with constants, where inference has found them."""
    for node in list(model.graph):
        shape = g.producer(node.inputs[0], "Shape") if node.inputs and not node.domain else None
        found = g.dims(shape.inputs[0]) if shape is not None else None
        if shape is None or found is None:
            continue
        sizes = np.array(found, object)[g.attribute(shape, "start", 0) : g.attribute(shape, "end", None)]
        given = [each for value in node.inputs[1:3] if (each := g.constant(value)) is not None]
        if node.op_type == "Gather" and given:
            picked = sizes[given[0]]
        elif node.op_type == "Slice" and len(node.inputs) < 5 and len(given) == 2:
            picked = sizes[int(given[0].item()) : int(given[1].item())]
        else:
            continue
        if all(isinstance(each, int) for each in np.array(picked, object).flat):
            array = np.array(picked, np.int64)
            g.replace(node.outputs[0], g.initializer(model.graph, array, f"{node.outputs[0].name}_size"))


def _remove_no_ops(model: ir.Model) -> None:
    """Removes nodes whose shapes and dtypes show that they return their input; not in subgraphs: a branch of
    an If needs an Identity to return a captured value."""
    inputs = g.given_of_all(model.graph)
    for node in list(model.graph):
        if node.domain or node.op_type not in _POSSIBLE_NO_OPS or not node.inputs:
            continue
        if len(node.inputs if node.op_type == "Concat" else node.outputs) > 1:
            continue
        source, result = node.inputs[0], node.outputs[0]
        given = source is not None and (source.is_graph_input() or g.is_constant(source))
        if source is None or (given and result.is_graph_output()):
            continue
        inner = g.producer(source, "Reshape") if node.op_type == "Reshape" else None
        is_swapped = any(use.op_type == "Transpose" for use, _ in result.uses())  # `heads.py` matches that
        if inner is not None and not is_swapped and g.same_dims(g.dims(inner.inputs[0]), g.dims(result)):
            source = inner.inputs[0] or source  # two that undo each other
        keeps_shape = not g.is_constant(source) and g.same_dims(g.dims(source), g.dims(result))
        if keeps_shape and node.op_type == "Expand":
            keeps_shape = _keeps_sources(node, inputs)
        if keeps_shape or node.op_type == "Identity":
            g.replace(result, source)


def _misleads(node: ir.Node, given: Mapping[ir.Value | None, int]) -> bool:
    """Whether folding goes too far: onnxscript removes an Expand to the sizes of another input of the same
    names, and onnx takes a width of Attention that is not known for 0."""
    return node.op_type == "Attention" or (node.op_type == "Expand" and not _keeps_sources(node, given))


def _keeps_sources(expand: ir.Node, given: Mapping[ir.Value | None, int]) -> bool:
    """Whether the sizes of an Expand come from what it expands: equal names are equal sizes then."""
    source, shape = (given.get(value, 0) for value in expand.inputs[:2])
    return not shape & ~source


def main_dtype(model: ir.Model) -> ir.DataType:
    """Returns the float dtype of more than half of the elements of all weights, else FLOAT; without weights
    that of inputs and outputs. float16 and bfloat16 count together; 8 bits and their scales do not count."""
    elements, given = Counter[ir.DataType](), Counter[ir.DataType]()
    for graph in model.graphs():
        values = [*graph.initializers.values()]
        values += [value for node in graph if node.op_type == "Constant" for value in node.outputs]
        weights = [v for v in values if not _SCALES & {(use.node.op_type, use.idx) for use in v.uses()}]
        for tensor in map(ir.convenience.get_const_tensor, weights):
            if tensor is not None and tensor.dtype.is_floating_point() and tensor.dtype.bitwidth > 8:
                elements[tensor.dtype] += tensor.size
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype is not None and value.dtype.is_floating_point():
            given[value.dtype] += 1
    counts = elements or given
    for kinds in (FLOATS_16, (ir.DataType.DOUBLE,)):
        if 2 * sum(counts[kind] for kind in kinds) > counts.total():
            return max(kinds, key=lambda kind: counts[kind])
    return ir.DataType.FLOAT
