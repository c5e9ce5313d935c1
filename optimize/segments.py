"""Cuts a model and its rewritten form into segments that correspond, so that each can run alone.

Structure decides, never names: an order of the nodes, depth first, in which few values cross; positions where
only values cross that the original has, too; layers where the kinds of the original's nodes repeat.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_

import numpy as np
import onnx_ir as ir

from . import graph as g
from .inputs import draws_random
from .kinds import Kind, Kinds, is_weight
from .symbolic_shapes import infer_shapes, infer_types

MOST_BYTES = 256 << 20  # the bytes of weights that a segment has, unless one layer or node has more
_SHARED_NODES = 256  # what is computed from the inputs in so many nodes, each segment computes again
_SHARED_BYTES = 1 << 20  # with weights of so many bytes, or this share of a segment's
_SHARED_PART = 256
_SIZES = ("Shape", "Size")
_TABLES, _OF_TABLES = ("Gather", "Slice"), 16  # from tables, as of cos, of so many times these bytes, too


@dataclass(frozen=True)
class Part:
    """One model's side of a segment: the names of the values that cross its boundaries. Inputs and
    initializers of the graph are not listed: a part has those that it reads."""

    inputs: list[str]  # values that earlier segments compute
    outputs: list[str]  # values that later segments read, and outputs of the graph


@dataclass(frozen=True)
class Segment:
    """A part of a model and of its rewritten form. What `result` reads has the names of values that earlier
    original parts return, and what it returns those that this one or earlier ones return."""

    name: str  # for messages: which layer it is, or which nodes
    original: Part
    result: Part
    kind: str  # the same for segments that differ in nothing but their weights, and little in their biases


def extract(model: ir.Model, part: Part) -> ir.Model:
    """Returns a part of a model as a model of its own, which shares the tensors. Its inputs are the part's
    and those of the graph that it reads. Types that these lack are inferred."""
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    given = [values[name] for name in part.inputs]
    for infer in (infer_types, infer_shapes):
        if any(value.type is None for value in given):
            infer(model)
    needed = g.given_of(*(values[name] for name in part.outputs), until={*given})
    read = [value for value in graph.inputs if value in needed]
    bounded = [*given, *(value for value in read if value not in given)]
    found = ir.convenience.extract(graph, bounded, [values[name] for name in part.outputs])
    extracted = ir.Model(found, ir_version=model.ir_version, functions=[*model.functions.values()])
    extracted.metadata_props.update(model.metadata_props)
    extracted.graph.meta.update(graph.meta)
    return extracted


def reads(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, also those that its subgraphs take from outside."""
    found = [value for value in node.inputs if value is not None]
    for graph in g.subgraphs(node):
        own = {*graph.inputs, *graph.initializers.values()}
        own.update(value for inner in graph for value in inner.outputs)
        inner = [value for each in graph for value in reads(each)]
        found += [value for value in dict.fromkeys((*inner, *graph.outputs)) if value not in own]
    return found


def is_shared(value: ir.Value, given: set[ir.Value], tables: bool = False) -> bool:
    """Whether a value is computed from inputs of the graph, given values and shapes, but no large weight;
    `tables`: whether it may be computed from large tables."""
    waiting, seen = [value], {*given}
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        is_large = each.const_value is not None and 4 * each.const_value.size > MOST_BYTES // _SHARED_PART
        if is_large and not (tables and not any(is_weight(*use) for use in each.uses())):
            return False
        node = each.producer()
        waiting += reads(node) if node is not None and node.op_type not in _SIZES else []
    return True


def cut(original: ir.Model, result: ir.Model, most_bytes: int | None = None) -> list[Segment]:
    """Cuts a model and its rewritten form into segments that correspond, in the order in which they run: one
    where weights have no more than `most_bytes`, by default `MOST_BYTES`, or where there is no place to
    cut."""
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes
    after = _Order(result, most_bytes)
    before = _Order(original, most_bytes, after)
    places, names = [(len(before.nodes) - 1, len(after.nodes) - 1)], ["the model"]
    if max(sum(each.bytes) for each in (before, after)) > most_bytes:
        cuts = _cuts(before, after)
        ends, last = [*_Layout(before, cuts, most_bytes).segments()], (0, places[0][1])
        found = {cuts.get(end - 1, last)[1]: (end - 1, name) for end, name in ends}
        places = [(end, at) for at, (end, _) in found.items()]
        names = [name for _, name in found.values()]
    bounds = [*zip(*places, strict=True)]
    parts = [before.parts(bounds[0]), after.parts(bounds[1])]
    returned = {name for part in parts[0] for name in part.outputs}
    read = dict.fromkeys(name for part in parts[1] for name in part.outputs if name not in returned)
    for name in read:  # the original's parts return what parts of the result return, too
        at = before.position[before.named[name]] if name in before.named else -1
        parts[0][bisect_left(bounds[0], at)].outputs.append(name)
    kinds, known, start = list[str](), Kinds(), (-1, -1)
    for stop, *pair in zip(places, *parts, strict=True):
        kind = Kind()
        for form, first, last, part in zip((before, after), start, stop, pair, strict=True):
            kind.add(form.nodes[first + 1 : last + 1], part.inputs, part.outputs)
        kinds.append(kind.name(known))
        start = stop
    return [Segment(*each) for each in zip(names, *parts, kinds, strict=True)]


class _Order:
    """The nodes of a model in an order, depth first, in which few values are alive.

    These are all that outputs need, but those that each segment computes again: constants, and what few nodes
    without large weights (`small` bytes) compute from the inputs and from sizes. `reads` has what each reads,
    and the values that have the sizes which it needs; `position` where each value is computed, `last` where
    it is read last. A value that the rewritten form (`like`) computes, too, is computed as soon as there.
    """

    def __init__(self, model: ir.Model, most_bytes: int, like: "_Order | None" = None) -> None:
        self.graph = model.graph
        self.reads = {node: reads(node) for node in self.graph}
        self.weights = dict[ir.Node, int]()
        self.sources = {
            node: [maker for value in dict.fromkeys(read) if (maker := value.producer()) is not None]
            for node, read in self.reads.items()
        }
        outputs = dict.fromkeys(value for value in self.graph.outputs if value.producer() is not None)
        order = self._depth_first(outputs)
        depth = dict[ir.Node, int]()
        for node in order:  # what takes most comes first: an encoder before the queries that read it
            depth[node] = max((depth[maker] for maker in self.sources[node]), default=0) + 1
            self.sources[node].sort(key=lambda maker: -depth[maker])
        self.small = min(_SHARED_BYTES, most_bytes // _SHARED_PART)
        shared = self._shared(order, self.small)
        if like is None:
            placed = self._placed(sorted(outputs, key=lambda value: -depth[g.maker(value)]))
        else:
            values = {str(value.name): value for node in order for value in node.outputs}
            first = [str(value.name) for node in like.nodes for value in node.outputs]
            placed = self._depth_first([*(values[name] for name in first if name in values), *outputs])
        self.nodes: list[ir.Node] = [node for node in placed if node not in shared]
        self.position = {value: at for at, node in enumerate(self.nodes) for value in node.outputs}
        self.last = dict[ir.Value, int]()
        for at, node in enumerate(self.nodes):
            self.last.update((value, at) for value in self.reads[node] if value in self.position)
        self.bytes = [self.weights[node] for node in self.nodes]
        self.named = {str(value.name): value for value in self.position}

    def _depth_first(self, outputs: Iterable[ir.Value], seen: set[ir.Node] | None = None) -> list[ir.Node]:
        """Returns the nodes that compute values, each after what it reads, and adds them to `seen`."""
        order, seen = list[ir.Node](), set() if seen is None else seen
        for output in outputs:
            waiting = [(output.producer(), False)]
            while waiting:
                node, is_done = waiting.pop()
                if node is None or (node in seen and not is_done):
                    continue
                if is_done:
                    order.append(node)
                    continue
                seen.add(node)
                waiting.append((node, True))
                waiting += [(maker, False) for maker in reversed(self.sources[node])]
        return order

    def _placed(self, outputs: Iterable[ir.Value]) -> list[ir.Node]:
        """Returns the nodes in an order: those of the first output, and those of others among them. What only
        another output needs, such as a cache, follows what it is computed from at once."""
        place, seen = dict[ir.Node, tuple[int, int]](), set[ir.Node]()
        for index, output in enumerate(outputs):
            group = self._depth_first([output], seen)
            makers = [maker for node in group for maker in self.sources[node]]
            after = max((place[node][0] for node in makers if node in place), default=-1)
            for node in group:
                place[node] = (len(place), 0) if index == 0 else (after, len(place))
        return sorted(place, key=lambda node: place[node])

    def _shared(self, order: list[ir.Node], most: int) -> set[ir.Node]:
        """Returns the nodes of constants, and what few nodes without large weights make of inputs and sizes.
        A value with such sizes crosses, never a table or mask made of them. Weights count as in fp32."""
        found, constants = dict[ir.Node, int](), set[ir.Node]()  # a bit for each of the nodes that it takes
        wide = dict[ir.Node, int]()
        for node in order:
            read, makers = dict.fromkeys(self.reads[node]), self.sources[node]
            tensors = [each for value in read if (each := g.tensor(value)) is not None]
            constant = [maker for maker in makers if maker in constants]
            self.weights[node] = sum(tensor.nbytes for tensor in tensors)
            self.weights[node] += sum(self.weights[maker] for maker in constant)
            wide[node] = sum(4 * tensor.size for tensor in tensors) + sum(wide[maker] for maker in constant)
            bits = reduce(or_, (found.get(maker, 0) for maker in makers), 1 << len(found))
            sized = dict.fromkeys(each for maker in makers if maker in found for each in self.reads[maker])
            self.reads[node] = [*(read | sized)]
            is_known = all(maker in found or maker in constants for maker in makers)
            limit = most * _OF_TABLES if node.op_type in _TABLES else most
            if draws_random(node):
                continue
            if not any(value.is_graph_input() for value in read) and constants.issuperset(makers):
                constants.add(node)
            elif not is_known and node.op_type in _SIZES:
                found[node] = bits
            elif is_known and wide[node] <= limit and bits.bit_count() <= _SHARED_NODES:
                found[node], self.reads[node] = bits, [*sized]
        return {*found, *constants}

    def alive(self) -> Iterator[list[ir.Value]]:
        """Yields for each position the values that are computed up to there and read behind it."""
        ends = defaultdict[int, list[ir.Value]](list)
        for value, at in self.last.items():
            ends[at].append(value)
        alive = dict[ir.Value, None]()
        for at, node in enumerate(self.nodes):
            for value in ends[at]:
                alive.pop(value, None)
            alive.update((value, None) for value in node.outputs if self.last.get(value, -1) > at)
            yield [*alive]

    def parts(self, ends: Iterable[int]) -> list[Part]:
        """Returns the parts, given the last position of each."""
        found = list[Part]()
        for start, stop in pairwise([-1, *ends]):
            nodes = self.nodes[start + 1 : stop + 1]
            read = dict.fromkeys(value for node in nodes for value in self.reads[node])
            inputs = [value for value in read if self.position.get(value, stop) <= start]
            made = [value for node in nodes for value in node.outputs]
            outputs = [each for each in made if each.is_graph_output() or self.last.get(each, -1) > stop]
            found.append(Part([str(each.name) for each in inputs], [str(each.name) for each in outputs]))
        known = {name for part in found for name in part.outputs}
        found[0].outputs.extend(str(each.name) for each in self.graph.outputs if each.name not in known)
        return found


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _cuts(original: _Order, result: _Order) -> dict[int, tuple[int, int]]:
    """Returns where both can be cut, by the original's position: how many values cross, all of which the
    original has computed up to there, and the result's position. Outputs are returned there that it has
    returned."""
    shared = {str(value.name) for node in original.graph for value in node.outputs}
    found, least = list[tuple[int, int, int]](), 0
    crossing = [[*alive] for alive in original.alive()]
    for at, (node, alive) in enumerate(zip(result.nodes, result.alive(), strict=True)):
        given = [str(value.name) for value in node.outputs if value.is_graph_output()]
        places = [original.position.get(original.named[name], -1) for name in given if name in original.named]
        least = max([least, *places])
        if all(str(value.name) in shared and _is_tensor(value) for value in alive):
            names = [str(value.name) for value in alive]
            places = [original.position[original.named[name]] for name in names if name in original.named]
            place = max([least, *places])
            if all(map(_is_tensor, crossing[place])):
                found.append((place, len(alive), at))
    cuts, bound = dict[int, tuple[int, int]](), len(original.nodes) - 2
    for place, count, at in reversed(found):
        if 0 <= place <= bound and at < len(result.nodes) - 1:
            bound = place  # the order of the original may differ from that of the result
            cuts[place] = min(cuts.get(place, (count, at)), (count, at))
    for place in sorted(cuts):  # the original may compute more before: a norm that the next product computes
        later = place + 1
        while (
            later < len(original.nodes) - 1
            and later not in cuts
            and original.bytes[later] <= original.small
            and all(map(_is_tensor, crossing[later]))
        ):
            cuts[later] = cuts[place]
            later += 1
    return {place: (count + len(crossing[place]), at) for place, (count, at) in cuts.items()}


class _Layout:
    """Chooses where a model is cut, in the order of the original's nodes: at layers, else by bytes. A border
    is the number of nodes before it."""

    def __init__(self, original: _Order, cuts: dict[int, tuple[int, int]], most_bytes: int) -> None:
        self.original, self.end, self.most_bytes = original, len(original.nodes), most_bytes
        self.crossing = {0: 0, self.end: 0} | {place + 1: count for place, (count, _) in cuts.items()}
        self.borders = sorted(self.crossing)
        self.sizes = np.concatenate([[0], np.cumsum(original.bytes)])
        kinds = dict[tuple[str, str], int]()
        self.kinds = np.array([kinds.setdefault((n.domain, n.op_type), len(kinds)) for n in original.nodes])

    def segments(self) -> Iterator[tuple[int, str]]:
        """Yields where each segment ends, and its name."""
        for start, stop, name in self._layers(0, self.end):
            borders = [start, *self._by_bytes(start, stop)]
            for index, (before, after) in enumerate(pairwise(borders), 1):
                part = f"{name}, part {index} of {len(borders) - 1}" if len(borders) > 2 else name
                largest = max(range(before, after), key=lambda at: self.original.bytes[at])
                label = self.original.nodes[largest].name or self.original.nodes[largest].outputs[0].name
                yield after, f"{part if name else f'nodes {before + 1} to {after}'} ({label})"

    def _layers(self, start: int, stop: int) -> list[tuple[int, int, str]]:
        """Returns ranges of nodes: layers where kinds of nodes repeat, and without a name what is between."""
        borders = self._period(start, stop) if start < stop else {}
        if len(borders) < 2:
            return [(start, stop, "")] if start < stop else []
        first, last, least, count = min(borders), max(borders), min(borders.values()), max(borders.values())
        layers = list[tuple[int, int, str]]()
        for (before, a), (after, b) in pairwise(sorted(borders.items())):
            name = f"layer {b - least}" if b == a + 1 else f"layers {a - least + 1} to {b - least}"
            layers.append((before, after, f"{name} of {count - least}"))
        return [*self._layers(start, first), *layers, *self._layers(last, stop)]

    def _period(self, start: int, stop: int) -> dict[int, int]:
        """Returns the borders of layers that repeat within nodes, and how many layers are before each."""
        kinds, best, length = self.kinds[start:stop], (0, 0, 0, 0), stop - start
        for period in range(1, length // 2 + 1):
            differ = np.flatnonzero(kinds[:-period] != kinds[period:])
            edges = np.concatenate([[-1], differ, [length - period]])
            longest = int(np.diff(edges).argmax())
            first, nodes = int(edges[longest]) + 1, int(edges[longest + 1] - edges[longest]) - 1 + period
            whole = nodes - nodes % period
            if whole >= 2 * period:
                weight = int(self.sizes[start + first + whole] - self.sizes[start + first])
                best = max(best, (weight, -period, start + first, nodes))
        weight, period, first, nodes = best[0], -best[1], *best[2:]
        if 2 * max(weight / max(self.sizes[stop] - self.sizes[start], 1), nodes / length) < 1 or not weight:
            return {}
        tried = []
        for offset in range(period):
            places = range(first + offset, first + nodes + 1, period)
            found = {place: index for index, place in enumerate(places) if place in self.crossing}
            inner = [self.crossing[place] for place in found if 0 < place < self.end]
            tried.append((len(found), -sum(inner) / max(len(inner), 1), -offset, found))
        return max(tried, key=lambda each: each[:3])[-1]

    def _by_bytes(self, start: int, stop: int) -> Iterator[int]:
        """Yields borders so that nodes between them have at most the wanted bytes, where that is possible."""
        inner = self.borders[bisect_right(self.borders, start) : bisect_left(self.borders, stop)]
        while self.sizes[stop] - self.sizes[start] > self.most_bytes and inner:
            sizes = {border: int(self.sizes[border] - self.sizes[start]) for border in inner}
            fitting = [border for border in inner if 0 < sizes[border] <= self.most_bytes]
            large = [border for border in fitting if 2 * sizes[border] >= self.most_bytes] or fitting[-1:]
            large = large or [border for border in inner if sizes[border]][:1] or inner[-1:]
            start = min(reversed(large), key=lambda border: self.crossing[border])
            inner = [border for border in inner if border > start]
            if self.sizes[stop] - self.sizes[start] > self.most_bytes // _SHARED_PART:
                yield start
        yield stop
