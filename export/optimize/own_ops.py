"""Keeps the nodes of a user's own ops: nothing inlines, folds, merges or rewrites them.

These are the ops of each domain whose library is in reach, and those that torch knows (`export`). Each node
gets an overload of its own while the rewrites run, so that no two are merged, and leaves its function body.
`attach` undoes both. A node computes in fp32 in the fp32 form of the model if its library can, and otherwise
in its own types, between casts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from twinop import deploy
from twinop.deploy.choose_library import choose_libraries, library_paths
from twinop.deploy.custom_nodes import load_model
from twinop.errors import ExportError, LibraryError, TwinopError
from twinop.find import find_library_of
from twinop.library import read_library
from twinop.names import BUILT_IN
from twinop.record import DOMAIN, Record

from ..attach import OPSETS
from ..calls import graphs_of, infer_types, label_of
from ..schema import ONNX_TYPES
from .graph import add

FLOATS_16 = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATS = (ir.DataType.FLOAT, *FLOATS_16)
_EXPORTERS = "pkg."  # domains of the functions that torch's exporters make of modules

Dtypes = tuple[ir.DataType | None, ...]


@dataclass(frozen=True)
class Types:
    """The element types of a node's inputs and outputs; None of what is absent or not known."""

    inputs: Dtypes
    outputs: Dtypes

    @classmethod
    def of(cls, node: ir.Node) -> "Types":
        """The types that a node has now."""
        inputs = tuple(None if value is None else value.dtype for value in node.inputs)
        return cls(inputs, tuple(value.dtype for value in node.outputs))

    def with_floats(self, dtype: ir.DataType) -> "Types":
        """The same types with this one in place of fp32 and 16 bits."""
        changed = [
            tuple(dtype if each in _FLOATS else each for each in part) for part in (self.inputs, self.outputs)
        ]
        return Types(*changed)


@dataclass
class _Node:
    """A node's own overload, its types in the source, and those in the fp32 form and in the result."""

    overload: str
    before: Types
    in_fp32: Types
    result: Types


@dataclass
class OwnOps:
    """The user's own ops in a model.

    Attributes:
        libraries: the libraries that the runs of the model register: those given, and those found.
        records: the ops of these libraries and of torch, by `Record.key`. twinop's own are not among them.
        inlined: the number of nodes of each op that became standard operators, because no library has its
            domain, by domain and type.
    """

    libraries: list[Path] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)
    inlined: dict[tuple[str, str], int] = field(default_factory=dict)
    _functions: dict[ir.OperatorIdentifier, ir.Function] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)  # by the overload during the rewrites

    @property
    def domains(self) -> set[str]:
        """The domains whose nodes stay."""
        return {record.domain for record in self.records.values()}

    def detach(
        self,
        model: ir.Model,
        others: Mapping[str, Record],
        functions: Mapping[ir.OperatorIdentifier, ir.Function],
    ) -> None:
        """Takes the function bodies out of a model, and reads the types of the nodes.

        Args:
            others: twinop's ops by name.
            functions: their bodies, which those of the user's ops may call.

        Raises:
            ExportError: the model's opset has to be converted, which a body cannot be.
        """
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
            types = Types.of(node)
            key = f"own {number}"
            self._nodes[key] = _Node(node.overload, types, types, types)
            node.overload = key

    def convert_to_fp32(self, model: ir.Model, dtype: str, converting: bool) -> None:
        """Chooses the types of each node in the fp32 form and in the result, and casts to the former.

        Args:
            model: its values are in fp32 already.
            dtype: of the result, as the report has it.
            converting: whether that is another one than the source's.

        Raises:
            ExportError: a library lacks the dtype.
        """
        wanted = ONNX_TYPES[dtype]
        for node in [node for node in model.graph.all_nodes() if node.overload in self._nodes]:
            own = self._nodes[node.overload]
            record = self._record(node)
            wide = _fitting(record, own.before.with_floats(ir.DataType.FLOAT))
            in_main_graph = node.graph is model.graph
            if converting and record is not None and in_main_graph and wanted in _FLOATS:
                own.result = _narrowest(record, own.before, wanted) or self._refuse(node, record, dtype)
            stays_narrow = wide is None or (wanted is ir.DataType.FLOAT and own.result != wide)
            own.in_fp32 = own.before if wide is None or (stays_narrow and not converting) else wide
            if not in_main_graph:
                own.result = own.in_fp32
            _cast_around(node, own.in_fp32)

    def types_in_result(self, node: ir.Node) -> Types | None:
        """Returns the types that a node has in the result, or None if it is not one of these ops."""
        own = self._nodes.get(node.overload)
        return None if own is None else own.result

    def attach(self, model: ir.Model) -> ir.Model:
        """Gives the nodes their function bodies again, for the types that they have now; returns the model.

        Raises:
            ExportError: one body cannot serve all nodes of an op.
        """
        calls: dict[ir.OperatorIdentifier, list[tuple[Types, Types]]] = defaultdict(list)
        for node in model.graph.all_nodes():
            if (own := self._nodes.get(node.overload)) is not None:
                node.overload = own.overload
                calls[node.op_identifier()].append((own.before, Types.of(node)))
        waiting = [key for key in calls if key in self._functions]
        while waiting:
            key = waiting.pop()
            if key in model.functions:
                continue
            function = self._functions[key].clone()
            _convert_body(function, calls.get(key, []))
            model.functions[key] = function
            for domain, version in function.opset_imports.items():
                model.graph.opset_imports.setdefault(domain, version)
            called = {node.op_identifier() for node in function.all_nodes()}
            waiting += called & self._functions.keys()
        return model

    def _record(self, node: ir.Node) -> Record | None:
        types = ((record.node_type, record) for record in self.records.values() if not record.is_backward)
        return next((record for kind, record in types if kind == (node.domain, node.op_type)), None)

    def _refuse(self, node: ir.Node, record: Record, dtype: str) -> "Types":
        paths = [path for path in self.libraries if read_library(path).domain == record.domain]
        raise ExportError(
            f"--dtype {dtype}: {label_of(node)} needs {record.domain}::{record.onnx_name} in {dtype}, and "
            f"{paths[0] if paths else 'its record'} has it for {record.dtypes}. Add {dtype} to the dtypes of "
            "its record and build it again (twinop build), or leave out --dtype"
        )


def find_own_ops(
    model: ir.Model, source: Path, library: deploy.Libraries, kept: Iterable[Record] = ()
) -> OwnOps:
    """Finds the libraries of the user's own ops in a model, as a session does.

    Args:
        model: as it was read from `source`.
        library: libraries that the user names.
        kept: ops that stay although no library may have them.

    Raises:
        ExportError: an op has neither a library nor a function body, or its library cannot be used.
    """
    own = OwnOps(library_paths(library), {record.key: record for record in kept if record.domain != DOMAIN})
    nodes = (node for graph in graphs_of(model) for node in graph.all_nodes())
    domains = {node.domain for node in nodes if node.domain and not BUILT_IN.fullmatch(node.domain)}
    if not domains - {DOMAIN}:
        return own
    try:
        found = [library.path for library in choose_libraries(load_model(source), own.libraries)]
    except TwinopError as error:
        raise ExportError(str(error)) from error
    libraries = {library.domain: library for library in map(read_library, found)}
    for domain in domains - {DOMAIN} - libraries.keys():
        try:
            other = read_library(find_library_of(domain))
        except LibraryError:
            continue
        if other.exports_ort:  # it lacks the model's ops: these run on their function bodies
            libraries[domain] = other
    given = {path.resolve() for path in own.libraries}
    for library in libraries.values():
        if library.domain != DOMAIN:
            own.libraries += [] if library.path.resolve() in given else [library.path]
            own.records.update({record.key: record for record in library.records.values()})
    return own


def count_inlined(counts: Mapping[ir.OperatorIdentifier, int], kept: set[str]) -> dict[tuple[str, str], int]:
    """Returns the numbers of inlined nodes, without the functions that are no custom ops."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for (domain, name, _), count in counts.items():
        if domain not in kept and not domain.startswith(_EXPORTERS) and not BUILT_IN.fullmatch(domain):
            found[domain, name] += count
    return dict(found)


def _fitting(record: Record | None, types: Types) -> Types | None:
    """Returns the types of a node with these inputs, if the op has a kernel for them."""
    found = (
        [] if record is None else [each for each in _all_types(record, types) if each.inputs == types.inputs]
    )
    return found[0] if found else None


def _narrowest(record: Record, before: Types, dtype: ir.DataType) -> Types | None:
    """Returns the types of a node with the most floats in this dtype, and the others in fp32."""

    def fits(old: ir.DataType | None, new: ir.DataType | None) -> bool:
        return new in (dtype, ir.DataType.FLOAT) if old in _FLOATS else new is old

    found = [
        each
        for each in _all_types(record, before)
        if all(map(fits, before.inputs, each.inputs)) and (dtype in each.inputs or dtype in each.outputs)
    ]
    return max(found, key=lambda each: each.inputs.count(dtype), default=None)


def _all_types(record: Record, like: Types) -> Iterator[Types]:
    """Yields the types that a node with the inputs of `like` may have."""
    names = [entry.name for entry in record.inputs]
    names += names[-1:] * (len(like.inputs) - len(names))  # the last one may be repeated
    for combination in record.combinations:
        inputs = (
            None if old is None else ONNX_TYPES[combination[name]]
            for name, old in zip(names, like.inputs, strict=False)
        )  # fmt: skip
        outputs = record.outputs[: len(like.outputs)]
        yield Types(tuple(inputs), tuple(ONNX_TYPES[combination[name]] for name in outputs))


def _cast_around(node: ir.Node, types: Types) -> None:
    """Casts the fp32 inputs of a node to its types, and its outputs to fp32."""
    for index, (value, dtype) in enumerate(zip(node.inputs, types.inputs, strict=True)):
        if value is not None and dtype in FLOATS_16:
            node.replace_input_with(index, add(node, "Cast", [value], {"to": dtype}, dtype=dtype))
            node.inputs[index].shape = value.shape  # type: ignore[union-attr]
    for value, dtype in zip(node.outputs, types.outputs, strict=True):
        if dtype not in FLOATS_16:
            continue
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        wide = cast.outputs[0]
        value.type, wide.type, wide.shape = (
            ir.TensorType(dtype),
            ir.TensorType(ir.DataType.FLOAT),
            value.shape,
        )
        ir.convenience.replace_all_uses_with(value, wide, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        wide.name, value.name = value.name, f"{value.name}_{dtype.name.lower()}"
        assert node.graph is not None
        node.graph.insert_after(node, cast)


def remove_casts(node: ir.Node) -> None:
    """Undoes `_cast_around`: the node has fp32 around it again."""
    for index, value in enumerate(node.inputs):
        cast = value.producer() if value is not None and value.dtype in FLOATS_16 else None
        if cast is not None and cast.op_type == "Cast" and not cast.domain:
            node.replace_input_with(index, cast.inputs[0])
    for value in node.outputs:
        if value.dtype not in FLOATS_16:
            continue
        value.type = ir.TensorType(ir.DataType.FLOAT)
        for cast in [use.node for use in value.uses()]:
            wide = cast.outputs[0]
            if cast.op_type != "Cast" or cast.domain or wide.dtype is not ir.DataType.FLOAT:
                continue
            if wide.is_graph_output():
                value.name, wide.name = wide.name, f"{wide.name}_cast"
            ir.convenience.replace_all_uses_with(wide, value, replace_graph_outputs=True)
            assert cast.graph is not None
            cast.graph.remove(cast, safe=True)


# ------------------------------------------------------------------------------ function bodies


def _convert_body(function: ir.Function, calls: Sequence[tuple[Types, Types]]) -> None:
    """Converts a function body to the types that its nodes have now.

    A body in 16 bits gets the new type in their place. One in fp32 computes in fp32, between casts.

    Args:
        calls: of each node, the types in the source, for which the body was made, and those that it has now.

    Raises:
        ExportError: one body cannot serve all of the nodes.
    """
    changes: dict[ir.DataType, set[ir.DataType]] = defaultdict(set)
    for before, now in calls:
        pairs = [
            *zip(before.inputs, now.inputs, strict=False),
            *zip(before.outputs, now.outputs, strict=False),
        ]
        for old, new in pairs:
            if old is not None and new is not None:
                changes[old].add(new)
    for old in [old for old, new in changes.items() if old in FLOATS_16 and new != {old}]:
        if len(changes[old]) > 1:
            raise _several_types(function)
        _replace_dtype(function, old, *changes[old])
    if changes[ir.DataType.FLOAT] <= {ir.DataType.FLOAT}:
        return
    before, _ = calls[0]
    for value, dtype in zip(function.inputs, before.inputs, strict=False):
        if dtype is ir.DataType.FLOAT:
            _insert_cast(function, value, dtype)
    for index, dtype in enumerate(before.outputs):
        wanted = {now.outputs[index] for _, now in calls}
        if dtype is not ir.DataType.FLOAT or wanted == {dtype}:
            continue
        if len(wanted) > 1:
            raise _several_types(function)
        cast = ir.node("Cast", [function.outputs[index]], {"to": wanted.pop()})
        function.append(cast)
        result, value = cast.outputs[0], function.outputs[index]
        result.name, value.name = value.name, f"{value.name}_float"
        function.outputs[index] = result


def _several_types(function: ir.Function) -> ExportError:
    return ExportError(
        f"the nodes of {function.domain}::{function.name} would have several dtypes, and a model holds one "
        "body per op. Leave out --dtype"
    )


def _insert_cast(function: ir.Function, value: ir.Value, dtype: ir.DataType) -> None:
    """Casts an input for all of its readers."""
    cast = ir.node("Cast", [value], {"to": dtype})
    cast.outputs[0].name = f"{value.name}_{dtype.name.lower()}"
    ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    first = next(iter(function), None)
    if first is None:
        function.append(cast)
    else:
        function.insert_before(first, cast)


def _replace_dtype(function: ir.Function, old: ir.DataType, new: ir.DataType) -> None:
    """Puts a dtype in the place of another one, in casts and constants."""
    for node in function.all_nodes():
        for name, each in list(node.attributes.items()):
            if each.is_ref():
                continue
            if each.type is ir.AttributeType.TENSOR and each.value.dtype is old:
                array = each.value.numpy().astype("float32").astype(new.numpy())
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(array, dtype=new))
            elif name in ("to", "dtype") and each.value == old:
                node.attributes[name] = ir.AttrInt64(name, int(new))


def in_use(model: ir.Model, libraries: Iterable[Path]) -> Iterator[Path]:
    """Yields the libraries that have an op of the model's nodes."""
    nodes = {(node.domain, node.op_type) for node in model.graph.all_nodes()}
    for path in libraries:
        library = read_library(path)
        if any((library.domain, name) in nodes for name in library.by_onnx_name):
            yield path
