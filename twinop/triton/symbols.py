"""The sizes and attributes of a traced call: symbolic to the launcher, with one call's values behind them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..aot_kernels.expression import ARCH, Expression, attribute, size
from ..record import Record
from .expressions import translate

MOST_ELEMENTS = 2**16
"""The largest power of two that a constant may be. Triton takes 2**20, but a kernel with a block of 2**20
elements, compiled for each dtype and alignment, takes minutes, and its values do not fit into registers."""

_BOUNDS = {
    "LessThan": (0, True), "StrictLessThan": (-1, True),
    "StrictGreaterThan": (0, False), "GreaterThan": (-1, False),
}  # fmt: skip
"""Comparisons of an int with a constant: what to add to the constant; the answer if it is not exceeded."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Call:
    """The sizes of the inputs, None for absent ones, the attributes, and the device's compute capability."""

    sizes: tuple[tuple[int, ...] | None, ...]
    attributes: tuple[Any, ...] = ()
    arch: int = 90

    def value(self, expression: Expression) -> int | float:
        """Computes an expression for this call."""
        return expression.evaluate(self.sizes, self.attributes, self.arch)

    def changed(self, variable: Expression, value: Any) -> "Call":
        """Returns the call with another value of a size, an attribute or the compute capability."""
        if variable == ARCH:
            return replace(self, arch=value)
        if variable.operation == "attribute":
            (index,) = variable.operands
            return replace(self, attributes=(*self.attributes[:index], value, *self.attributes[index + 1 :]))
        tensor, dimension = variable.operands
        shape = self.sizes[tensor]
        assert shape is not None
        shape = (*shape[:dimension], value, *shape[dimension + 1 :])
        return replace(self, sizes=(*self.sizes[:tensor], shape, *self.sizes[tensor + 1 :]))


@dataclass(frozen=True)
class Decision:
    """A branch that the launcher took: a condition, and whether it held."""

    condition: Expression
    held: bool

    @property
    def guard(self) -> Expression:
        """The expression that is not 0 for calls that take the branch."""
        return self.condition if self.held else Expression.of("!", self.condition)


class Varying(Exception):
    """A number that must be fixed varies with sizes or attributes."""


class Symbols(ShapeEnv):
    """Makes symbolic numbers, and records the branches that depend on them.

    Attributes:
        decisions: in the order of the launcher.
        in_torch: whether torch's own code runs. It asks about sizes of 0 and 1 only to find out which tensors
            are contiguous, so the answer is that there are none; a plan of its own for them has no use. What
            follows holds for sizes of 1 as well. For 0, the strides of a tensor without elements differ.
        plain: is called with the expression where `int(n)` or an index asks for one value.
    """

    plain: Callable[[sympy.Expr], Any]

    def __init__(self, record: Record, call: Call) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.record, self.call = record, call
        self.decisions: list[Decision] = []
        self.in_torch = False
        self._meanings: dict[sympy.Symbol, Expression] = {}
        self._numbers: dict[Expression, Any] = {}

    def size(self, tensor: int, dimension: int) -> Any:
        """Returns the SymInt of a size."""
        return self.number(size(tensor, dimension), positive=True)

    def attribute(self, index: int) -> Any:
        """Returns the SymInt or SymFloat of an attribute."""
        return self.number(attribute(index))

    def arch(self) -> Any:
        """Returns the SymInt of the device's compute capability."""
        return self.number(ARCH, positive=True)

    def operation(self, name: str, *operands: Any) -> Any:
        """Returns the symbolic result of an operation that torch does not have.

        Raises:
            ArithmeticError: the values of this call have no result.
        """
        return self.number(Expression.of(name, *map(self.expression, operands)))

    def number(self, expression: Expression, positive: bool | None = None) -> Any:
        """Returns a SymInt or SymFloat that stands for an expression."""
        if expression not in self._numbers:
            value = self.call.value(expression)
            source = ConstantSource(f"number{len(self._numbers)}")
            symbol = self.create_symbol(
                value, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=True
            )
            make = self.create_symfloatnode if isinstance(value, float) else self.create_symintnode
            self._meanings[symbol] = expression
            self._numbers[expression] = make(symbol, hint=value, source=source)
        return self._numbers[expression]

    def expression(self, value: Any) -> Expression:
        """Returns the expression of a number, symbolic or not.

        Raises:
            NotAnExpression: it has a function that the library lacks.
        """
        value = value.node.expr if isinstance(value, SYMBOLIC) else sympy.sympify(value)
        return translate(value, self._meanings)

    def described(self, text: str) -> str:
        """Returns a message of the launcher with what symbols stand for: "x.shape[1]" instead of "s20"."""
        words = {str(symbol): self._word(meaning) for symbol, meaning in self._meanings.items()}
        return re.sub(r"\b[a-z]+\d+\b", lambda found: words.get(found[0], found[0]), text)

    def _word(self, meaning: Expression) -> str:
        if meaning.operation == "size":
            return f"{self.record.inputs[meaning.operands[0]].name}.shape[{meaning.operands[1]}]"
        if meaning.operation == "attribute":
            return self.record.attributes[meaning.operands[0]].name
        return f"a value computed by {meaning.operation}"

    def fix(self, value: sympy.Expr) -> Any:
        """Returns the one value that an expression has in this call's range of powers of two.

        Raises:
            Varying: it depends on more than powers of two and numbers that were found equal to a value.
            ValueError: a power of two is larger than any block.
        """
        for symbol in sorted(value.free_symbols, key=str):
            meaning = self._meanings[symbol]
            if Decision(Expression.of("==", meaning, self.call.value(meaning)), True) in self.decisions:
                continue
            if meaning.operation != "NextPowerOf2":
                raise Varying
            least, most = 0, MOST_ELEMENTS.bit_length()
            while least < most:  # the questions depend on earlier answers only
                middle = (least + most) // 2
                if self._at_most(meaning, 2**middle):
                    most = middle
                else:
                    least = middle + 1
            if 2**least > MOST_ELEMENTS:
                raise ValueError(
                    f"a block would have more than {MOST_ELEMENTS} elements, the most that are compiled "
                    "ahead: go over longer rows in a loop"
                )
        return self.call.value(translate(value, self._meanings))

    def evaluate_expr(
        self,
        orig_expr: Any,
        hint: Any = None,
        fx_node: Any = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        **_: Any,
    ) -> Any:
        """Answers every question about a symbolic value; torch calls this."""
        is_symbol = isinstance(orig_expr, sympy.Symbol)  # which is a Boolean, too
        if isinstance(orig_expr, sympy.logic.boolalg.Boolean) and not is_symbol:
            return sympy.true if self._answer(orig_expr, fallback_value) else sympy.false
        return orig_expr if orig_expr.is_Number else sympy.sympify(self.plain(orig_expr))

    def _answer(self, question: Any, fallback: Any) -> bool:
        if question in (sympy.true, sympy.false):
            return question is sympy.true
        if fallback is not None:  # torch goes on without an answer
            return bool(fallback)
        if isinstance(question, sympy.core.relational.Relational):
            difference = sympy.expand(question.lhs - question.rhs)
            if difference.is_Number:
                return bool(question.func(difference, 0))
            if self.in_torch and (answer := _for_sizes_above_1(question)) is not None:
                return answer
            if question.lhs.is_integer and question.rhs.is_Integer and type(question).__name__ in _BOUNDS:
                step, answer = _BOUNDS[type(question).__name__]
                return (
                    self._at_most(translate(question.lhs, self._meanings), int(question.rhs) + step) is answer
                )
        return self._decide(translate(question, self._meanings))

    def _at_most(self, value: Expression, bound: int) -> bool:
        match value:
            case Expression("FloorDivide", (dividend, Expression("constant", (int(by),)))) if by > 0:
                return self._at_most(dividend, (bound + 1) * by - 1)
        if value.operation == "NextPowerOf2" and bound > 0:  # a bound of its operand is the same
            value, bound = value.operands[0], 1 << (bound.bit_length() - 1)
        question = Expression.of("<=", value, bound)
        for decision in self.decisions:  # an earlier answer may imply this one
            if (known := _bound(decision)) is None or known[0] != (value, decision.held):
                continue
            if (bound >= known[1]) if decision.held else (bound <= known[1]):
                return decision.held
        return self._decide(question)

    def _decide(self, condition: Expression) -> bool:
        for decision in self.decisions:
            if decision.condition == condition:
                return decision.held
        held = bool(self.call.value(condition))
        self.decisions.append(Decision(condition, held))
        return held


def _for_sizes_above_1(question: Any) -> bool | None:
    """Answers whether a product of sizes is 1 or less, in whatever form; None: it is another question."""
    for modulo in question.atoms(sympy.Function):
        if type(modulo).__name__ in ("Mod", "PythonMod"):
            dividend, divisor = modulo.args
            factor = divisor / dividend
            if factor.is_integer and not factor.is_number:
                question = question.subs(modulo, dividend)
    if not isinstance(question, sympy.core.relational.Relational):
        return bool(question)
    terms = sympy.Add.make_args(sympy.expand(question.lhs - question.rhs))
    common = sympy.gcd(list(terms)) if len(terms) > 1 else terms[0]
    if not common.is_positive:
        return None
    constant, product = sympy.expand(sum(terms) / common).as_coeff_Add()
    if product.is_positive and -constant in (0, 1, 2):
        return bool(question.func(sympy.Integer(2**40), -constant))
    return bool(question.func(constant, 0)) if product == 0 else None


def tightest(decisions: Sequence[Decision]) -> tuple[Expression, ...]:
    """Returns the guards of a path, without bounds that a tighter one implies."""
    bounds: dict[Any, int] = {}
    for decision in decisions:
        if (bound := _bound(decision)) is not None:
            key, limit = bound
            bounds[key] = (min if decision.held else max)(bounds.get(key, limit), limit)
    return tuple(
        decision.guard
        for decision in decisions
        if (bound := _bound(decision)) is None or bounds[bound[0]] == bound[1]
    )


def _bound(decision: Decision) -> tuple[Any, int] | None:
    """Returns what a decision bounds, from above or below, and the limit; None: it is not a bound."""
    match decision.condition:
        case Expression("<=", (value, Expression("constant", (int(limit),)))):
            return (value, decision.held), limit
    return None
