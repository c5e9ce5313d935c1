"""What all rewrites share: a pass of onnx_ir that matches nodes, and writes others in their place.

A rewrite says what it starts from, and has `match` and `apply`. `Rewrite.call` is the one loop over nodes.
What reports count stands in the `meta` of nodes: what was fused, and why a pattern was skipped. So what a
later rewrite absorbs is not counted.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import onnx_ir as ir

from twinop.record.op_spec import DOMAIN

from . import graph as g
from .prepare import clean

LABELS = "what it computes, as reports name it"
"""In the `meta` of nodes that a rewrite has written: a tuple of names."""
SKIPPED = "why rewrites leave it"  # in the `meta` of nodes: reasons by rewrite

Match = TypeVar("Match")


class Rewrite(ir.passes.InPlacePass, Generic[Match]):
    """Matches nodes one after the other, and writes others in their place. The attributes are given as
    arguments of the class: `class Addcmul(Rewrite[...], key="addcmul")`. Python 3.10 takes no `name`."""

    name: ClassVar[str]  # what `--without` calls it
    op_types: ClassVar[Sequence[str]] = ()  # the nodes that it starts from: standard ones
    microsoft: ClassVar[Sequence[str]] = ()  # ONNX Runtime's
    ops: ClassVar[Sequence[str]] = ()  # and those of twinop's ops
    pattern: ClassVar[str] = ""  # what reports call a pattern that was skipped; by default the node's type
    reports: ClassVar[bool] = True  # whether they count it; not if another rewrite says the same
    device: ClassVar[str] = ""  # the only one that it is for, or "" for all
    sixteen_bits_only: ClassVar[bool] = False  # whether it is only for models in 16 bits, on CUDA
    backwards: ClassVar[bool] = False  # it starts from the last nodes
    at_once: ClassVar[bool] = False  # all nodes are matched before a match is applied; `matches` has them

    def __init_subclass__(cls, key: str | None = None, **attributes: object) -> None:
        for name, value in (attributes if key is None else {"name": key, **attributes}).items():
            setattr(cls, name, value)

    def __init__(self, context: g.RewriteContext) -> None:
        self.context = context
        self.matches = list[tuple[ir.Node, Match]]()
        self.watch: Callable[[ir.Node, Match | g.Skipped | str], None] = lambda node, outcome: None

    @cached_property
    def order(self) -> dict[ir.Node, int]:
        """The indices of the nodes that the graph has before the first match is applied."""
        return {node: index for index, node in enumerate(self.context.graph)}

    @abstractmethod
    def match(self, node: ir.Node) -> Match | g.Skipped | str:
        """Returns what `apply` takes, else which condition failed; Skipped if reports count that."""

    @abstractmethod
    def apply(self, node: ir.Node, match: Match) -> None:
        """Writes other nodes in the place of those that were matched; raises Skipped for what only shows
        meanwhile."""

    def candidates(self) -> list[ir.Node]:
        """Returns the nodes to start from, in order."""
        records = self.context.records  # a library may have been built of few ops
        own = [records[op].onnx_name for op in self.ops if op in records]
        starts = {"": self.op_types, g.MICROSOFT: self.microsoft, DOMAIN: own}
        found = [node for node in self.context.graph if node.op_type in starts.get(node.domain, ())]
        return found[::-1] if self.backwards else found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model of the context."""
        assert model is self.context.model
        found, is_changed, before = self._found(), False, len(model.graph)
        for node, match in list(found) if self.at_once else found:
            if node.graph is not None:
                try:
                    self.apply(node, match)
                    is_changed = True
                except g.Skipped as reason:
                    self._note(node, reason)
        if is_changed or len(model.graph) != before:  # helpers of a match may have written nodes
            clean(model)
        return ir.passes.PassResult(model, is_changed)

    def _found(self) -> Iterator[tuple[ir.Node, Match]]:
        for node in self.candidates():
            if node.graph is None:  # an earlier match has had it
                continue
            try:
                outcome = self.match(node)
            except g.Skipped as reason:
                outcome = reason
            self._note(node, outcome)
            if not isinstance(outcome, g.Skipped | str):
                self.matches.append((node, outcome))
                yield node, outcome

    def _note(self, node: ir.Node, outcome: Match | g.Skipped | str) -> None:
        self.watch(node, outcome)
        if isinstance(outcome, g.Skipped) and self.reports:
            skip(node, self.name, f"{outcome.pattern or self.pattern or node.op_type}: {outcome}")

    def replace(self, old: ir.Value, new: ir.Value, *labels: str) -> None:
        """Puts a value in the place of another one; labels say what its node computes. Reasons of other
        rewrites go with it: a sum may be fused, and the rotation that it ends is not."""
        if (node := new.producer()) is not None:
            node.meta[LABELS] = (*node.meta.get(LABELS, ()), *labels)
            node.meta[SKIPPED] = {**g.maker(old).meta.get(SKIPPED, {}), **node.meta.get(SKIPPED, {})}
        g.replace(old, new)


def label(node: ir.Node, *labels: str) -> None:
    """Adds what reports say of a node."""
    node.meta[LABELS] = (*node.meta.get(LABELS, ()), *labels)


def skip(node: ir.Node, name: str, reason: str) -> None:
    """Notes why a rewrite does not fuse a node."""
    node.meta[SKIPPED] = {**node.meta.get(SKIPPED, {}), name: reason}


def fused(model: ir.Model) -> dict[str, int]:
    """Returns how many nodes of a model rewrites have written, by what they compute."""
    found = Counter(each for node in model.graph.all_nodes() for each in node.meta.get(LABELS, ()))
    return dict(found.most_common())


def skipped(model: ir.Model) -> dict[str, int]:
    """Returns how many patterns of a model rewrites have skipped, by pattern and reason."""
    found = Counter(each for node in model.graph.all_nodes() for each in node.meta.get(SKIPPED, {}).values())
    return dict(found.most_common())
