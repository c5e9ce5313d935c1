"""Compares a model's custom nodes with a library's records; ONNX Runtime passes much or is unclear."""

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from twinop.checks import check_attributes
from twinop.deploy.dtypes import dtype_name
from twinop.deploy.errors import ModelError
from twinop.deploy.inference import typed_nodes
from twinop.deploy.libraries import choose_library
from twinop.deploy.model import CustomNode, Model, ModelSource, load_model
from twinop.errors import RecordError
from twinop.library import Library
from twinop.record import DOMAIN, DOMAIN_VERSION, Attribute, Record

_A = onnx.AttributeProto
# ONNX has no bool attribute: it is an int, 0 or 1.
_ONNX_KINDS = {"int": _A.INT, "float": _A.FLOAT, "bool": _A.INT, "str": _A.STRING, "int[]": _A.INTS}


def check_model(model: ModelSource, library: str | os.PathLike[str] | None = None) -> Library | None:
    """Checks a model's custom nodes, in subgraphs and functions too, against the library that it needs.

    Args:
        model: a path, the bytes of a model, or a ModelProto.
        library: the custom-op library; found as `session` finds it if left out.

    Returns:
        The library; None if the model has no custom nodes, or if none was found and its function bodies run.

    Raises:
        ModelError: the model is damaged, or nodes do not fit the library: the message lists all of them.
        LibraryError: the library is missing, damaged, or not the one library that the model needs.
    """
    loaded = load_model(model)
    found = choose_library(loaded, Path(library) if library is not None else None)
    require_fit(loaded, found)
    return found


def require_fit(model: Model, library: Library | None) -> None:
    """Raises ModelError with every problem of the model's custom nodes."""
    problems = list(_problems(model, library)) if library is not None and model.nodes else []
    if problems:
        name = library.path.name if library is not None else ""
        raise ModelError(f"{model.name} does not fit {name}:" + "".join(f"\n  - {text}" for text in problems))


def _problems(model: Model, library: Library) -> Iterator[str]:
    for opset in model.proto.opset_import:
        if opset.domain == DOMAIN and opset.version != DOMAIN_VERSION:
            yield f"it imports {DOMAIN} version {opset.version}; the library has version {DOMAIN_VERSION}"
    records = library.by_onnx_name
    used = {node.op_type: None for node in model.nodes}
    for name in used:
        if name in records:
            yield from _schema_problem(model, library, records[name])
    for node in typed_nodes(model.proto, records):
        if record := records.get(node.op_type):
            for text in _node_problems(node, record):
                yield f"{node.label}: {text}"
        elif node.op_type not in model.bodies:
            yield f"{node.label}: the library has no such op{_suggestion(node.op_type, records)}"


def _schema_problem(model: Model, library: Library, record: Record) -> Iterator[str]:
    expected = model.metadata.get(f"twinop.schema.{record.onnx_name}", record.schema_hash)
    if expected != record.schema_hash:
        exporter = model.metadata.get("twinop.version", "another version")
        yield (
            f"{record.onnx_name} was exported by twinop {exporter} with schema {expected}; the library "
            f"(twinop {library.version}) has schema {record.schema_hash}: {record.schema}. Export the model "
            "again, or use the library of the exporting version"
        )


def _node_problems(node: CustomNode, record: Record) -> Iterator[str]:
    yield from _input_problems(node, record)
    yield from _output_problems(node, record)
    given = {attribute.name: attribute for attribute in node.proto.attribute}
    for name, attribute in given.items():
        declared = record.attribute(name)
        if declared is None:
            yield f"unknown attribute {name}{_suggestion(name, (entry.name for entry in record.attributes))}"
        else:
            yield from _attribute_problems(attribute, declared, record)
    for declared in record.attributes:
        if declared.required and declared.name not in given:
            yield f"attribute {declared.name} ({declared.kind}) is missing and has no default"


def _input_problems(node: CustomNode, record: Record) -> Iterator[str]:
    takes = ", ".join(entry.name + ("?" if entry.optional else "") for entry in record.inputs)
    names = list(node.proto.input)
    if len(names) > len(record.inputs):
        yield f"{len(names)} inputs; it takes {len(record.inputs)} ({takes})"
        return
    names += [""] * (len(record.inputs) - len(names))
    given = {}
    for name, entry in zip(names, record.inputs, strict=True):
        if not name and not entry.optional:
            yield f"input {entry.name} is absent; it takes {takes}"
        elif name and (element := node.types.get(name)):
            given[entry.name] = dtype_name(element)
    if given and record.combination_of(given) is None:
        have = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
        yield (
            f"no kernel for these dtypes: {have}. It takes: {record.dtypes} (all inputs alike but where one "
            "is named). Export in one of these, or put a Cast before the node"
        )


def _output_problems(node: CustomNode, record: Record) -> Iterator[str]:
    if len(node.proto.output) != len(record.outputs) or not all(node.proto.output):
        named = [name or "(unnamed)" for name in node.proto.output]
        yield f"outputs {', '.join(named) or 'none'}; the node must name all of: {', '.join(record.outputs)}"


def _attribute_problems(given: Any, declared: Attribute, record: Record) -> Iterator[str]:
    wanted = _ONNX_KINDS[declared.kind]
    if given.type != wanted:
        name = _A.AttributeType.Name
        yield f"attribute {given.name} is {name(given.type)}, expected {name(wanted)} ({declared.kind})"
    elif given.ref_attr_name:  # in a function: the value comes from its caller
        return
    elif declared.kind == "bool" and given.i not in (0, 1):
        yield f"attribute {given.name} is {given.i}, expected 0 or 1 (bool)"
    elif choices := record.attribute_choices.get(given.name):
        value = given.s.decode(errors="replace")
        if value not in choices:
            yield f"attribute {given.name} is '{value}', expected one of: {', '.join(choices)}"
    elif declared.kind in ("int", "float"):
        try:
            check_attributes(record, {given.name: given.i if declared.kind == "int" else given.f})
        except RecordError as error:
            yield str(error)


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; it has: {', '.join(names) or 'none'}"
