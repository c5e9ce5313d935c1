"""Finds the branches of a launcher: calls that take each of them.

A launcher runs with the numbers of one call. Each branch that depends on them is a question with an answer
(`symbols.Decision`), and the answers of all runs form a tree. Where an answer was never given, other numbers
are tried for what the question depends on: powers of two, the constants of questions, the sizes of the call,
and the numbers beside these. A branch that none of them takes stays without a plan; its calls are refused.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..aot_kernels.expression import Expression
from .symbols import Call, Decision

Result = TypeVar("Result")

_VARIABLES = ("size", "attribute", "arch")
_ARCHS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
_LARGEST = 2**40
_PAIRED = 12  # the numbers of each of two variables that are tried together


class TooManyBranches(Exception):
    """There are more than the limit."""


@dataclass
class _Node(Generic[Result]):
    """A question with the answers met so far, or the end of a path."""

    call: Call
    condition: Expression | None = None
    answers: "dict[bool, _Node[Result]]" = field(default_factory=dict)


def explore(
    run: Callable[[Call], tuple[Sequence[Decision], Result]], first: Call, most: int
) -> list[tuple[Sequence[Decision], Result]]:
    """Runs a launcher until no branch is found that was not taken.

    Args:
        run: runs it for one call and returns the decisions, in their order, and a result.
        first: the call to begin with.
        most: the number of paths from which on it gives up.

    Returns:
        For each path its decisions and its result.

    Raises:
        TooManyBranches: there are more paths than `most`.
    """
    paths: list[tuple[Sequence[Decision], Result]] = []
    root: _Node[Result] = _Node(first)
    open_nodes: list[_Node[Result]] = []
    constants: set[int | float] = set()

    def take(call: Call) -> None:
        decisions, result = run(call)
        if len(paths) == most:
            raise TooManyBranches
        paths.append((decisions, result))
        node = root
        for decision in decisions:
            if node.condition is None:
                node.condition, node.call = decision.condition, call
                open_nodes.append(node)
                constants.update(_constants(decision.condition))
            node = node.answers.setdefault(decision.held, _Node(call))

    take(first)
    while open_nodes:
        node = open_nodes.pop(0)
        if len(node.answers) == 2:
            continue
        assert node.condition is not None
        for call in _others(node.call, node.condition, constants):
            if _is_new(root, call, node):
                take(call)
                break
    return paths


def _is_new(root: _Node[Result], call: Call, wanted: _Node[Result]) -> bool:
    """Whether a call comes to a node and takes the branch there that no call took."""
    node: _Node[Result] | None = root
    while node is not None and node.condition is not None:
        try:
            answer = bool(call.value(node.condition))
        except ArithmeticError:
            return False
        if node is wanted:
            return answer not in node.answers
        node = node.answers.get(answer)
    return False


def _others(call: Call, condition: Expression, constants: set[int | float]) -> Iterator[Call]:
    """Yields calls with other numbers for one or two of the variables of a condition."""
    variables = sorted({each for each in condition.parts() if each.operation in _VARIABLES}, key=repr)
    changes = {variable: _values(call, variable, constants) for variable in variables}
    for variable in variables:
        for value in changes[variable]:
            yield call.changed(variable, value)
            yield _changed_alike(call, variable, value)
    for one, two in itertools.combinations(variables, 2):
        for values in itertools.product(changes[one][:_PAIRED], changes[two][:_PAIRED]):
            yield call.changed(one, values[0]).changed(two, values[1])


def _changed_alike(call: Call, variable: Expression, value: int | float) -> Call:
    """Changes a size and all that are equal to it, as launchers compare them."""
    old = call.value(variable)
    for tensor, shape in enumerate(call.sizes):
        for dimension, size in enumerate(shape or ()):
            if variable.operation == "size" and size == old:
                call = call.changed(Expression("size", (tensor, dimension)), value)
    return call


def _values(call: Call, variable: Expression, constants: set[int | float]) -> list[int | float]:
    """Returns numbers to try for a size or an attribute, those first that are likely to change an answer."""
    if variable.operation == "arch":
        return list(_ARCHS)
    sizes = {size for shape in call.sizes if shape is not None for size in shape}
    if isinstance(call.value(variable), float):
        return [*(float(c) + d for c in sorted(constants) for d in (0, -1, 1)), 0.0, -1.0, 1.0]
    near = {
        *constants,
        *sizes,
        *(a * b for a in sizes for b in sizes),
        *(a // b for a in sizes for b in sizes),
    }
    powers = [2**exponent for exponent in range(41)]
    values = [int(value) + step for value in (*sorted(near), *powers) for step in (0, -1, 1)]
    least = 1 if variable.operation == "size" else -_LARGEST
    return [value for value in dict.fromkeys(values) if least <= value <= _LARGEST]


def _constants(condition: Expression) -> Iterator[int | float]:
    constants = (each.operands[0] for each in condition.parts() if each.operation == "constant")
    return (value for value in constants if abs(value) < _LARGEST)
