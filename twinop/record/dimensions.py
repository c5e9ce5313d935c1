"""Reads names of dimensions that are expressions, such as "past + sequence" and torch's "2*s0" or "s0//4".

A name is an expression if its parts are names of dimensions or numbers. Names may hold any characters, so a
hyphen or a slash without spaces, as in "sequence-length", only is an operator between known names.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_LONGEST = 500  # characters; longer names are no expressions
_LARGEST = 2**31
_LEAST = 3  # what a difference of two dimensions is raised to, if it would be empty
_TOTAL = "total_sequence_length"  # onnxruntime-genai's name for the sum of two others


def _power(base: Any, exponent: Any) -> Any:
    """Returns a power; raises OverflowError if it is too large for a size: a name may hold 9**9**9**9."""
    if abs(base) > _LARGEST or not 0 <= exponent <= 4:
        raise OverflowError
    return base**exponent


_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: Fraction, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Pow: _power,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "max": max, "min": min, "mod": operator.mod, "floor": math.floor, "ceiling": math.ceil,
    "floordiv": operator.floordiv, "cleandiv": operator.floordiv,
}  # fmt: skip
_OPERATOR = re.compile(r"[-+*/%()]|^\d+$")
_IN_A_NAME = re.compile(r"\S[-/]|[-/]\S")


@dataclass(frozen=True)
class Expression:
    """The tree of an expression, and the dimension that each name in it stands for."""

    tree: ast.expr
    names: Mapping[str, str]

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """Returns the value, rounded down, or 0 if there is none."""

        def value(node: ast.AST) -> Any:
            match node:
                case ast.Constant():
                    return node.value
                case ast.Name():
                    return sizes[self.names.get(node.id, node.id)]
                case ast.BinOp():
                    return _OPERATORS[type(node.op)](value(node.left), value(node.right))
                case ast.UnaryOp():
                    return _OPERATORS[type(node.op)](value(node.operand))
                case ast.Call(func=ast.Name(id=name)):
                    return _FUNCTIONS[name.lower()](*map(value, node.args))
            raise AssertionError(node)

        try:
            return math.floor(value(self.tree))
        except (ArithmeticError, TypeError):  # a division by 0; floor of two numbers
            return 0


def expressions(names: Collection[str]) -> dict[str, Expression]:
    """Returns those of some names of dimensions that are expressions."""
    plain = {name for name in names if not _OPERATOR.search(name)}
    found = {name: each for name in names if name not in plain and (each := _parse(name, plain))}
    parts = {"past_sequence_length", "sequence_length"}
    if {_TOTAL, *parts} <= plain and (total := _parse(" + ".join(sorted(parts)), parts)):
        found[_TOTAL] = total
    plain = {*names} - found.keys()  # now also those such as sequence-length, which may be parts of others
    return found | {name: each for name in plain if (each := _parse(name, plain - {name}))}


def sizes_of(
    axes: Mapping[str, int], batch: int, length: int, step: int = 0, fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Returns the sizes of dimensions by name. Names that are expressions of others have their values.

    `axes` has the axis of an input of which each name is; that of a batch is 0. The others have this length,
    each `step` more than the one before it. `fixed` ones are known.
    """
    found, fixed = expressions(axes), dict(fixed or {})
    inner = {name: axes[dim] for dim, each in found.items() for name in each.names.values()}
    by_name, lengths = dict[str, int](), 0
    for name, axis in {**{dim: axis for dim, axis in axes.items() if dim not in found}, **inner}.items():
        axis = axes.get(name, axis)
        by_name[name] = length + step * lengths if axis else batch
        lengths += axis > 0
    by_name |= fixed
    for each in found.values():  # a difference needs a larger first number
        for name in each.names.values():
            size = each(by_name)
            raised = {**by_name, name: by_name[name] + _LEAST - size}
            if size < 1 and name not in fixed and each(raised) > size:
                by_name = raised
    return by_name | {dim: max(each(by_name), 1) for dim, each in found.items()} | fixed


def _parse(name: str, known: Collection[str]) -> Expression | None:
    """Returns the expression that a name is, if it is one. `known` are names of dimensions."""
    if not _OPERATOR.search(name) or len(name) > _LONGEST:
        return None
    inside = sorted((each for each in known if each and each in name), key=len, reverse=True)
    words = {f"__{index}__": each for index, each in enumerate(inside)}
    text, is_known = name, {each: word for word, each in words.items()}
    if inside:
        pattern = "|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in inside)
        text = re.sub(pattern, lambda match: is_known[match[0]], name)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        used = {node.id for node in _nodes(tree)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not used <= words.keys() and _IN_A_NAME.search(text.replace("//", " ")):
        return None
    return Expression(tree, {word: words.get(word, word) for word in used})


def _nodes(tree: ast.AST) -> Iterator[ast.Name]:
    """Yields the names of an expression of nothing but names, numbers, operators and functions."""
    match tree:
        case ast.Name():
            yield tree
        case ast.Constant(value=int()):
            pass
        case ast.BinOp(op=op) | ast.UnaryOp(op=op) if type(op) in _OPERATORS:
            for each in (tree.left, tree.right) if isinstance(tree, ast.BinOp) else (tree.operand,):
                yield from _nodes(each)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name.lower() in _FUNCTIONS:
            for each in tree.args:
                yield from _nodes(each)
        case _:
            raise ValueError(tree)
