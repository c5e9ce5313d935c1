"""Keeps the nodes of a user's own ops: nothing inlines, folds, merges or rewrites them.

These are the ops of each domain whose library is in reach, and those that torch knows (`export`). While the
rewrites run, each node has an overload of its own, so that no two are merged, and the model has no bodies of
theirs; `attach` undoes both. A node computes in fp32 in the fp32 form of the model if its library can, and
otherwise in its own types, between casts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from twinop import deploy
from twinop.deploy.choose_library import library_paths
from twinop.errors import ExportError, LibraryError, TwinopError, option
from twinop.libraries.find import find_library_of
from twinop.libraries.library import read_library
from twinop.model.attach import OPSETS
from twinop.model.calls import graphs_of, infer_types, label_of
from twinop.model.schema import ONNX_TYPES
from twinop.record.names import BUILT_IN
from twinop.record.op_spec import DOMAIN, OpSpec

from . import graph as g

FLOATS_16 = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOAT = ir.DataType.FLOAT
_EXPORTERS = "pkg."  # domains of the functions that torch's exporters make of modules

Functions = Mapping[ir.OperatorIdentifier, ir.Function]
Types = tuple[ir.DataType | None, ...]
"""The types of a node's inputs, then of its outputs; None of what is absent or not known."""


@dataclass
class _Node:
    """A node's overload in the source, its types there, and those in the result."""

    overload: str
    before: Types
    result: Types


@dataclass
class UserOps:
    """The user's own ops in a model."""

    libraries: list[Path]  # those that the runs of the model register: those given, and those found
    records: dict[str, OpSpec]  # the ops of these libraries and of torch, by `OpSpec.key`, but twinop's
    inlined: dict[str, int] = field(default_factory=dict)  # nodes by op: no library has the domain
    _functions: dict[ir.OperatorIdentifier, ir.Function] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)  # by the overload during the rewrites

    @property
    def domains(self) -> set[str]:
        """The domains whose nodes stay."""
        return {record.domain for record in self.records.values()}

    def count_inlined(self, counts: Mapping[ir.OperatorIdentifier, int]) -> None:
        """Reads how often each function was called, and leaves out those that are no custom ops."""
        for (domain, name, _), count in counts.items():
            if domain not in self.domains and _may_have_library(domain):
                self.inlined[f"{domain}::{name}"] = count

    def detach(self, model: ir.Model, others: Mapping[str, OpSpec], functions: Functions) -> None:
        """Takes the function bodies out of a model, and reads the types of the nodes. `others`: twinop's ops
        by name; `functions`: their bodies, which the user's may call. ExportError: a body's opset has to be
        converted."""
        opset = model.graph.opset_imports.get("")
        if model.functions and opset not in OPSETS:
            name = "::".join(next(iter(model.functions))[:2])
            raise ExportError(
                f"opset {opset}: the function body of {name} cannot be converted to {OPSETS[0]}, as twinop "
                f"needs it. Export the model again with opset {OPSETS[0]} to {OPSETS[-1]}"
            )
        for function in model.functions.values():  # what was inlined into it may need more domains
            for domain in {node.domain for node in function.all_nodes()} - function.opset_imports.keys():
                function.opset_imports[domain] = model.graph.opset_imports[domain]
        nodes = [node for node in model.graph.all_nodes() if node.domain in self.domains]
        values = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
        if any(value.dtype is None or value.shape is None for value in values):
            known = (*others.values(), *self.records.values())
            infer_types(model, [record for record in known if not record.is_backward])
        self._functions = {**functions, **model.functions}
        model.functions.clear()
        for number, node in enumerate(nodes):
            key, types = f"own {number}", _types(node)
            self._nodes[key] = _Node(node.overload, types, types)
            node.overload = key

    def convert_to_fp32(self, model: ir.Model, dtype: str, converting: bool) -> None:
        """Chooses the types of each node in the result, and casts to those in the fp32 form, which the model
        is in already; `converting`: `dtype` is another one than the source's. ExportError: a library lacks
        it."""
        wanted = ONNX_TYPES[dtype]
        by_type = {each.node_type: each for each in self.records.values() if not each.is_backward}
        for node in [node for node in model.graph.all_nodes() if node.overload in self._nodes]:
            own, record = self._nodes[node.overload], by_type.get((node.domain, node.op_type))
            in_fp32 = _with_floats(record, node, own.before, _FLOAT)
            if converting and record is not None and node.graph is model.graph:
                result = _with_floats(record, node, own.before, wanted)
                own.result = result if result is not None else self._refuse(node, record, dtype)
            elif wanted is _FLOAT:
                in_fp32 = own.before
            in_fp32 = in_fp32 or own.before
            if node.graph is not model.graph:  # `precision.convert` leaves subgraphs in fp32
                own.result = in_fp32
            _cast_around(node, in_fp32)

    def types_in_result(self, node: ir.Node) -> Types | None:
        """Returns the types that a node has in the result, or None if it is not one of these ops."""
        own = self._nodes.get(node.overload)
        return None if own is None else own.result

    def attach(self, model: ir.Model) -> ir.Model:
        """Gives the nodes their function bodies again, for the types that they have now; returns the model.
        ExportError: one body cannot serve all nodes of an op."""
        calls = defaultdict[ir.OperatorIdentifier, list[tuple[Types, ir.Node]]](list)
        for node in model.graph.all_nodes():
            if (own := self._nodes.get(node.overload)) is not None:
                node.overload = own.overload
                calls[node.op_identifier()].append((own.before, node))
        waiting = [*calls]
        while waiting:
            key = waiting.pop()
            if key in model.functions or key not in self._functions:
                continue
            model.functions[key] = function = self._functions[key].clone()
            _convert_body(function, calls[key])
            for domain, version in function.opset_imports.items():
                model.graph.opset_imports.setdefault(domain, version)
            waiting += [node.op_identifier() for node in function.all_nodes()]
        return model

    def _refuse(self, node: ir.Node, record: OpSpec, dtype: str) -> Types:
        paths = [str(path) for path in self.libraries if read_library(path).domain == record.domain]
        raise ExportError(
            f"{option('dtype', dtype)}: {label_of(node)} needs {record.domain}::{record.onnx_name} in {dtype}"
            f", and {''.join(paths) or 'its record'} has it for {record.dtypes}. Add {dtype} to the dtypes "
            f"of its record and build it again (twinop build), or leave out {option('dtype')}"
        )


def find_user_ops(
    model: ir.Model,
    source: Path,
    library: deploy.Libraries,
    kept: Iterable[OpSpec] = (),
    allow_model_libraries: bool = False,
) -> UserOps:
    """Finds the libraries of the user's own ops in a model, as a session does; for the options see
    `source.Options`. ExportError: an op has neither library nor body, or its library cannot be used."""
    records = {record.key: record for record in kept if record.domain != DOMAIN}
    user_ops = UserOps(library_paths(library), records)
    domains = {node.domain for graph in graphs_of(model) for node in graph.all_nodes()} - {DOMAIN}
    domains = set(filter(_may_have_library, domains))
    if not domains:
        return user_ops
    try:
        given, allowed = user_ops.libraries, allow_model_libraries
        chosen = deploy.check_model(source, given, allow_model_libraries=allowed)
        found = [read_library(each.path) for each in chosen]
    except TwinopError as error:
        raise ExportError(str(error)) from error
    for domain in domains.difference(library.domain for library in found):
        try:  # a library that lacks the model's ops, which then run on their function bodies
            found.append(read_library(find_library_of(domain)))
        except LibraryError:
            continue
    for other in found:
        if other.domain != DOMAIN and other.exports_ort:
            user_ops.libraries += [] if other.path in user_ops.libraries else [other.path]
            user_ops.records.update({record.key: record for record in other.records.values()})
    return user_ops


def _may_have_library(domain: str) -> bool:
    return bool(domain) and not BUILT_IN.fullmatch(domain) and not domain.startswith(_EXPORTERS)


def _types(node: ir.Node) -> Types:
    return tuple(None if value is None else value.dtype for value in (*node.inputs, *node.outputs))


def _with_floats(record: OpSpec | None, node: ir.Node, before: Types, dtype: ir.DataType) -> Types | None:
    """Returns a node's types with as many floats in this dtype as its library allows, the others in fp32."""
    if record is None:
        return None
    names = [entry.name for entry in record.inputs]
    names = [*names[: len(node.inputs)], *record.outputs]
    values = (*node.inputs, *node.outputs)
    floats, found = (_FLOAT, *FLOATS_16), []
    for combination in record.combinations:
        wanted = [(value, ONNX_TYPES[combination[name]]) for value, name in zip(values, names, strict=False)]
        types = tuple(None if value is None else kind for value, kind in wanted)
        pairs = [(old, new) for old, new in zip(before, types, strict=True) if old is not None]
        fits = all(new in (dtype, _FLOAT) if old in floats else new is old for old, new in pairs)
        if fits and (dtype in types or not any(old in floats for old in before)):
            found.append(types)
    return max(found, key=lambda types: types.count(dtype), default=None)


def _cast_around(node: ir.Node, types: Types) -> None:
    """Casts the fp32 inputs of a node to its types, and its outputs to fp32."""
    for index, (value, dtype) in enumerate(zip((*node.inputs, *node.outputs), types, strict=True)):
        if value is None or dtype not in FLOATS_16:
            continue
        if index < len(node.inputs):
            node.replace_input_with(index, g.add(node, "Cast", [value], {"to": dtype}))
        else:
            set_dtype(value, dtype)


def set_dtype(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    """Sets the dtype of a node's output; all that reads it reads a Cast to fp32, which has its name."""
    node, cast = g.maker(value), ir.node("Cast", [value], {"to": _FLOAT})
    [result] = cast.outputs
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    result.type, result.shape, value.type = ir.TensorType(_FLOAT), value.shape, ir.TensorType(dtype)
    result.name, value.name = value.name, f"{value.name}_before"
    assert node.graph is not None
    node.graph.insert_after(node, cast)
    return cast


def remove_casts(node: ir.Node) -> None:
    """Undoes `_cast_around`: the node has fp32 around it again."""
    for index, value in enumerate(node.inputs):
        cast = g.producer(value, "Cast")
        if cast is not None and cast.outputs[0].dtype in FLOATS_16:
            node.replace_input_with(index, cast.inputs[0])
    for value in node.outputs:
        if value.dtype not in FLOATS_16:
            continue
        value.type = ir.TensorType(_FLOAT)
        for cast in [use.node for use in value.uses()]:
            if (cast.domain, cast.op_type) == ("", "Cast") and cast.graph is not None:
                [wide] = cast.outputs
                value.name, wide.name = wide.name, f"{wide.name}_cast"
                ir.convenience.replace_all_uses_with(wide, value, replace_graph_outputs=True)
                cast.graph.remove(cast, safe=True)


def _convert_body(function: ir.Function, calls: Sequence[tuple[Types, ir.Node]]) -> None:
    """Converts a function body to the types that its nodes have now: one in 16 bits gets the new type in
    their place, one in fp32 casts around. `calls`: the nodes, each with its types in the source."""
    changes = defaultdict[ir.Value, list[tuple[ir.DataType | None, ir.DataType | None]]](list)
    for before, node in calls:
        values = [*function.inputs[: len(node.inputs)], *function.outputs[: len(node.outputs)]]
        for value, change in zip(values, zip(before, _types(node), strict=True), strict=True):
            changes[value].append(change)
    for value, pairs in list(changes.items()):
        olds, news = ({pair[i] for pair in pairs} for i in (0, 1))
        if olds == news:
            continue
        old, new, several = next(iter(olds)), next(iter(news)), len(news) > 1
        like = next((x for x in function.inputs if changes[x] == pairs), None) if several else None
        if old is None or new is None or len(olds) > 1 or (several and (old in FLOATS_16 or like is None)):
            raise ExportError(
                f"the nodes of {function.domain}::{function.name} would have several dtypes, and they share "
                f"one body. Leave out {option('dtype')}"
            )
        if old in FLOATS_16:
            _replace_dtype(function, old, new)
        elif value in function.inputs:
            wide = g.add(next(iter(function)), "Cast", [value], {"to": old})
            cast, wide.name = wide.producer(), f"{value.name}_float"
            ir.convenience.replace_all_uses_with(value, wide)
            cast.replace_input_with(0, value)  # type: ignore[union-attr]
        else:
            index, name = list(function.outputs).index(value), value.name
            cast = ir.node("CastLike", [value, like]) if several else ir.node("Cast", [value], {"to": new})
            function.append(cast)
            value.name, cast.outputs[0].name, function.outputs[index] = f"{name}_float", name, cast.outputs[0]


def _replace_dtype(function: ir.Function, old: ir.DataType, new: ir.DataType) -> None:
    """Puts a dtype in the place of another one, in casts and constants."""
    for node in function.all_nodes():
        for name, each in list(node.attributes.items()):
            if each.type is ir.AttributeType.TENSOR and not each.is_ref() and each.value.dtype is old:
                array = each.value.numpy().astype("float32").astype(new.numpy())
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(array, dtype=new))
            elif name in ("to", "dtype") and not each.is_ref() and each.value == old:
                node.attributes[name] = ir.AttrInt64(name, int(new))
