"""Compares a model's custom nodes with the records of libraries, more strictly than ONNX Runtime does."""

import atexit
import difflib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx

from twinop.errors import RecordError
from twinop.libraries.library import Library
from twinop.record.call_checks import check_attributes
from twinop.record.dtypes import dtype_name
from twinop.record.op_schema import ATTRIBUTE_TYPES, make_schema
from twinop.record.op_spec import Attribute, OpSpec

from .choose_library import Libraries, choose_libraries
from .custom_nodes import CustomNode, Model, ModelSource, custom_nodes, is_custom, load_model
from .errors import ModelError

# A domain of this module alone, so that its schemas replace none of the libraries' domains.
_DOMAIN = "twinop.check"
_lock = threading.Lock()


def check_model(
    model: ModelSource, library: Libraries = None, *, allow_model_libraries: bool = False
) -> list[Library]:
    """Checks a model's custom nodes, in subgraphs and functions too, against the libraries that it needs.

    Args:
        model: a path, the bytes of a model, or a ModelProto.
        library: one or several custom-op libraries. Libraries of other domains are found as `session` finds
            them.
        allow_model_libraries: whether to take libraries from the model's own folder.

    Returns:
        One library for each domain, without the domains whose function bodies run.

    Raises:
        ModelError: the model is damaged, or nodes do not fit a library. The message lists all of them.
        LibraryError: a library is missing, damaged, or not the one that the model needs.
    """
    loaded = load_model(model)
    found: list[Library] = [*choose_libraries(loaded, library, allow_model_libraries=allow_model_libraries)]
    require_fit(loaded, found)
    return found


def libraries_for(
    model: ModelSource, library: Libraries = None, *, allow_model_libraries: bool = False
) -> list[str]:
    """Returns the absolute paths of the libraries that a model needs, for plain ONNX Runtime:

        for path in twinop.libraries_for("model.onnx"):
            options.register_custom_ops_library(path)

    The arguments and the errors are those of `check_model`.
    """
    found = check_model(model, library, allow_model_libraries=allow_model_libraries)
    return [str(each.path.absolute()) for each in found]


def require_fit(model: Model, libraries: Sequence[Library], bodies: bool = True) -> None:
    """Raises ModelError, which lists every problem, if a model's custom nodes do not fit libraries.

    `bodies`: whether a function body may replace an op that the library of its domain lacks.
    """
    if problems := list(_misfits(model, libraries, bodies)):
        names = ", ".join(library.path.name for library in libraries)
        raise ModelError(
            f"{model.name} does not fit {names}:" + "".join(f"\n  - {text}" for text in problems)
        )


def _misfits(model: Model, libraries: Sequence[Library], bodies: bool) -> Iterator[str]:
    if not model.nodes:
        return
    by_domain = {library.domain: library for library in libraries}
    for opset in model.proto.opset_import:
        library = by_domain.get(opset.domain)
        if library is not None and opset.version != library.domain_version:
            yield (
                f"it imports {opset.domain} version {opset.version}; the library has version "
                f"{library.domain_version}"
            )
    records = {record.node_type: record for library in libraries for record in library.by_onnx_name.values()}
    for node_type in dict.fromkeys(node.node_type for node in model.nodes):
        if record := records.get(node_type):
            yield from _schema_problem(model, by_domain[record.domain], record)
    for node in _typed_nodes(model.proto, records):
        if record := records.get(node.node_type):
            texts = node_problems(node.proto, node.types, record)
            for text in (*texts, *_output_problems(node.proto, record)):
                yield f"{node.label}: {text}"
        elif node.proto.domain in by_domain and not (bodies and node.node_type in model.bodies):
            known = by_domain[node.proto.domain].by_onnx_name
            yield f"{node.label}: the library has no such op{_suggestion(node.proto.op_type, known)}"


def _schema_problem(model: Model, library: Library, record: OpSpec) -> Iterator[str]:
    expected = model.metadata.get(record.metadata_key, record.schema_hash)
    if expected not in {record.schema_hash, *record.former_hashes}:
        exporter = model.metadata.get("twinop.version", "another version")
        yield (
            f"{record.onnx_name} was exported by twinop {exporter} with schema {expected}; the library "
            f"(twinop {library.version}) has schema {record.schema_hash}: {record.schema}. Export the model "
            "again, or use the library of the exporting version"
        )


def node_problems(node: onnx.NodeProto, types: Mapping[str, int], record: OpSpec) -> Iterator[str]:
    """Yields a text for each way in which a node does not fit its op's record; `types`: ONNX's, by name."""
    yield from _input_problems(node, types, record)
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, attribute in given.items():
        declared = record.attribute(name)
        if declared is None:
            yield f"unknown attribute {name}{_suggestion(name, (entry.name for entry in record.attributes))}"
        else:
            yield from _attribute_problems(attribute, declared, record)
    for declared in record.attributes:
        if declared.required and declared.name not in given:
            yield f"attribute {declared.name} ({declared.kind}) is missing and has no default"


def _input_problems(node: onnx.NodeProto, types: Mapping[str, int], record: OpSpec) -> Iterator[str]:
    takes = ", ".join(entry.name + "?" * entry.optional for entry in record.inputs)
    names = list(node.input)
    if len(names) > len(record.inputs):
        yield f"{len(names)} inputs; it takes {len(record.inputs)} ({takes})"
        return
    names += [""] * (len(record.inputs) - len(names))
    given = {}
    for name, entry in zip(names, record.inputs, strict=True):
        if not name and not entry.optional:
            yield f"input {entry.name} is absent; it takes {takes}"
        elif name and (element := types.get(name)):
            given[entry.name] = dtype_name(element)
    if given and record.combination_of(given) is None:
        have = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
        yield (
            f"no kernel for these dtypes: {have}. It takes: {record.dtypes} (one dtype for all inputs except "
            "named ones). Export in one of these, or put a Cast before the node"
        )


def _output_problems(node: onnx.NodeProto, record: OpSpec) -> Iterator[str]:
    required = [name for name in record.outputs if name not in record.optional_outputs]
    given = dict(zip(record.outputs, node.output, strict=False))
    if len(node.output) > len(record.outputs) or not all(given.get(name) for name in required):
        named = [name or "(unnamed)" for name in node.output]
        yield f"outputs {', '.join(named) or 'none'}; the node must name all of: {', '.join(required)}"


def _attribute_problems(given: Any, declared: Attribute, record: OpSpec) -> Iterator[str]:
    wanted = ATTRIBUTE_TYPES[declared.kind]
    if given.type != wanted:
        name = onnx.AttributeProto.AttributeType.Name
        yield f"attribute {given.name} is {name(given.type)}, expected {name(wanted)} ({declared.kind})"
    elif given.ref_attr_name:  # in a function: the value comes from its caller
        return
    elif declared.kind == "bool" and given.i not in (0, 1):
        yield f"attribute {given.name} is {given.i}, expected 0 or 1 (bool)"
    else:
        values = {"int": given.i, "float": given.f, "str": given.s.decode(errors="replace")}
        try:
            check_attributes(record, {given.name: values.get(declared.kind)})
        except RecordError as error:
            yield str(error)


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it has: {', '.join(names) or 'none'}"


def _typed_nodes(proto: onnx.ModelProto, records: Mapping[tuple[str, str], OpSpec]) -> list[CustomNode]:
    """Returns the custom nodes of a model without large weights, with inferred types added."""
    plain = list(custom_nodes(proto))
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in custom_nodes(copy):
        if record := records.get(node.node_type):
            node.proto.op_type = _registered(record)
            node.proto.domain = _DOMAIN
    for opsets in (copy.opset_import, *(function.opset_import for function in copy.functions)):
        opsets.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    try:
        inferred = onnx.shape_inference.infer_shapes(copy)
    except Exception:  # a broken model: ONNX Runtime says what is wrong with it
        return plain
    typed = custom_nodes(inferred, lambda node: node.domain == _DOMAIN or is_custom(node))
    return [CustomNode(node.proto, node.label, found.types) for node, found in zip(plain, typed, strict=True)]


def _registered(record: OpSpec) -> str:
    """Registers the record's schema once per process and returns its name in `_DOMAIN`."""
    name = f"{record.namespace}_{record.onnx_name}_{record.schema_hash}"
    with _lock:
        if not onnx.defs.has(name, _DOMAIN):
            onnx.defs.register_schema(make_schema(record, name, _DOMAIN, 1, strict=False))
            # Up to onnx 1.22, a process with a schema left at its end hangs or crashes.
            atexit.register(onnx.defs.deregister_schema, name, 1, _DOMAIN)
    return name
