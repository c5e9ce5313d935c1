"""Cuts a model and its rewritten form into segments that correspond, so that each can run alone."""

from dataclasses import dataclass

import onnx_ir as ir

from . import graph as g
from .symbolic_shapes import infer_shapes, infer_types

MOST_BYTES = 256 << 20
"""The bytes of weights that a segment has, unless one layer or node has more."""


@dataclass(frozen=True)
class Part:
    """One model's side of a segment: the names of the values that cross its boundaries.

    Inputs and initializers of the graph are not listed: a part has those that it reads.

    Attributes:
        inputs: values that earlier segments compute.
        outputs: values that later segments read, and outputs of the graph.
    """

    inputs: list[str]
    outputs: list[str]


@dataclass(frozen=True)
class Segment:
    """A part of a model and of its rewritten form.

    Attributes:
        name: for messages: which layer it is, or which nodes.
        original, result: the parts. What `result` reads has the names of values of the original that
            this or an earlier original part returns.
        kind: the same for segments that differ in nothing but their weights.
    """

    name: str
    original: Part
    result: Part
    kind: str


def extract(model: ir.Model, part: Part) -> ir.Model:
    """Returns a part of a model as a model of its own, which shares the tensors.

    Its inputs are the part's and those of the graph that it reads. Types that these lack are inferred.
    """
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    given = [values[name] for name in part.inputs]
    for infer in (infer_types, infer_shapes):
        if any(value.type is None for value in given):
            infer(model)
    needed = _needed([values[name] for name in part.outputs], set(given))
    read = [value for value in graph.inputs if value in needed]
    bounded = [*given, *(value for value in read if value not in given)]
    found = ir.convenience.extract(graph, bounded, [values[name] for name in part.outputs])
    extracted = ir.Model(found, ir_version=model.ir_version, functions=[*model.functions.values()])
    extracted.metadata_props.update(model.metadata_props)
    return extracted


def _needed(outputs: list[ir.Value], given: set[ir.Value]) -> set[ir.Value]:
    """Returns the values that outputs are computed from, up to the given ones, also in subgraphs."""
    waiting, seen = [*outputs], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value not in seen and value not in given and node is not None:
            waiting += reads(node)
        seen.add(value)
    return seen


def reads(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, also those that its subgraphs take from outside."""
    inner = [each for graph in g.subgraphs(node) for each in graph.all_nodes()]
    found = [value for each in (node, *inner) for value in each.inputs if value is not None]
    found += [value for graph in g.subgraphs(node) for value in graph.outputs]
    return [value for value in found if value.graph is node.graph] if inner else found


def cut(original: ir.Model, result: ir.Model, most_bytes: int = MOST_BYTES) -> list[Segment]:
    """Cuts a model and its rewritten form into segments that correspond, in the order in which they run.

    A model whose weights have no more than `most_bytes` is one segment.
    """
    whole = [Part([], [str(value.name) for value in model.graph.outputs]) for model in (original, result)]
    return [Segment("the model", whole[0], whole[1], "")]
