"""The sizes and attributes of a traced call: symbolic to the launcher, with one call's values behind them."""

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..aot_kernels.expression import FUNCTIONS, Expression, as_expression
from ..errors import BuildError
from ..record.op_spec import OpSpec

MOST_ELEMENTS = 2**16
"""The largest power of two that a constant may be. Triton takes 2**20, but a kernel with a block of 2**20
elements, compiled for each dtype and alignment, takes minutes, and its values do not fit into registers."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_FUNCTIONS = {  # of torch.utils._sympy.functions, whose names are the same in all of torch's releases
    "FloorDiv": "FloorDivide", "CleanDiv": "FloorDivide", "Mod": "Modulo", "PythonMod": "Modulo",
    "IntTrueDiv": "Divide", "FloatTrueDiv": "Divide", "ToFloat": "ToFloat", "TruncToInt": "ToInt",
    "FloatPow": "Power", "PowByNatural": "Power", "Pow": "Power", "FloorToInt": "Floor", "CeilToInt": "Ceil",
    "LShift": "ShiftLeft", "RShift": "ShiftRight", "BitwiseFn_bitwise_and": "BitAnd",
    "BitwiseFn_bitwise_or": "BitOr", "OpaqueUnaryFn_sqrt": "Sqrt", "OpaqueUnaryFn_exp": "Exp",
    "OpaqueUnaryFn_log": "Log", "Add": "+", "Mul": "*", "Min": "Minimum", "Max": "Maximum",
    "Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">",
    "GreaterThan": ">=", "And": "&&", "Or": "||", "Not": "!",
}  # fmt: skip
_ANY_NUMBER_OF_OPERANDS = {"Add", "Mul", "Min", "Max", "And", "Or"}


class NotAnExpression(Exception):
    """The library's expressions lack a function; the argument is its name."""


def translate(value: sympy.Basic, meanings: Mapping[sympy.Symbol, Expression]) -> Expression:
    """Translates an expression of sympy; raises NotAnExpression for a function that the library lacks."""
    if isinstance(value, sympy.Symbol):
        return meanings[value]
    if value in (sympy.true, sympy.false):
        return as_expression(int(value is sympy.true))
    if isinstance(value, sympy.Integer):
        return as_expression(int(value))
    if isinstance(value, sympy.Number):
        return as_expression(float(value))
    name = type(value).__name__
    if name not in _FUNCTIONS:
        raise NotAnExpression(name.rpartition("_")[2])
    operation, operands = _FUNCTIONS[name], [translate(operand, meanings) for operand in value.args]
    if name in _ANY_NUMBER_OF_OPERANDS:
        # sympy's order depends on the names of symbols; this one is the same in each run, constants last.
        operands.sort(key=lambda each: (each.operation == "constant", repr(each)))
        return reduce(partial(Expression.of, operation), operands)
    return Expression.of(operation, *operands)


@dataclass(frozen=True)
class Call:
    """The sizes of the inputs, None for absent ones, the attributes, and the device's compute capability."""

    sizes: tuple[tuple[int, ...] | None, ...]
    attributes: tuple[Any, ...] = ()
    arch: int = 90

    def value(self, expression: Expression) -> int | float:
        """Computes an expression for this call."""
        return expression.evaluate(self.sizes, self.attributes, self.arch)


@dataclass(frozen=True)
class Decision:
    """A branch that the launcher took, since its condition held or not."""

    condition: Expression
    held: bool
    is_value: bool = False  # the launcher needs one value of a number: there is no other branch to take
    text: str = field(default="", compare=False)  # in the launcher's words: "mish.py:14: x.shape[0] <= 64"

    @property
    def guard(self) -> Expression:
        """The expression that is not 0 for calls that take the branch."""
        return self.condition if self.held else Expression.of("!", self.condition)

    @property
    def opposite(self) -> "Decision":
        """The branch that was not taken."""
        return replace(self, held=not self.held)


class OtherBranch(BaseException):
    """A launcher that was sent down a branch which its sizes would not take came to the next one."""


class Varying(Exception):
    """A number that must be fixed varies with sizes or attributes."""


class Symbols(ShapeEnv):
    """Makes symbolic numbers, and records the `decisions` about them in the order of the launcher.

    The decision at the index `flipped` is answered the other way; at the next one, the run ends. `in_torch`
    is set while torch's own code runs. It asks about sizes of 0 and 1 only to find out which tensors are
    contiguous, so the answer is that there are none. What follows holds for sizes of 1 as well, but that of
    a squeeze (`in_squeeze`). For 0, the strides of a tensor without elements differ.
    """

    def __init__(
        self, record: OpSpec, launcher: Callable[..., Any], call: Call, flipped: int | None = None
    ) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.record, self.launcher, self.call, self.flipped = record, launcher, call, flipped
        self.decisions: list[Decision] = []
        self.in_torch = self.in_squeeze = False
        self._meanings: dict[sympy.Symbol, Expression] = {}
        self._numbers: dict[Expression, Any] = {}

    def line(self, error: BaseException | None = None) -> str:
        """Returns the line of the launcher that runs, or that raised an error: "mish.py:14"."""
        code = inspect.unwrap(self.launcher).__code__
        frames = traceback.walk_stack(sys._getframe(1))
        if error is not None:
            frames = reversed([*traceback.walk_tb(error.__traceback__)])
        lines = (number for frame, number in frames if frame.f_code.co_filename == code.co_filename)
        return f"{Path(code.co_filename).name}:{next(lines, code.co_firstlineno)}"

    def error(self, text: str) -> BuildError:
        """Returns the error of something that cannot be traced, with the line of the launcher that runs."""
        return BuildError(f"{self.line()}: {text}")

    def operation(self, name: str, *operands: Any) -> Any:
        """Returns the symbolic result of an operation that torch lacks; ArithmeticError: it has none."""
        return self.number(Expression.of(name, *map(self.expression, operands)))

    def number(self, expression: Expression) -> Any:
        """Returns a SymInt or SymFloat that stands for an expression."""
        if expression not in self._numbers:
            value = self.call.value(expression)
            source = ConstantSource(f"number{len(self._numbers)}")
            positive = True if expression.operation in ("size", "arch", "NextPowerOf2") else None
            symbol = self.create_symbol(
                value, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=True
            )
            make = self.create_symfloatnode if isinstance(value, float) else self.create_symintnode
            self._meanings[symbol] = expression
            self._numbers[expression] = make(symbol, hint=value, source=source)
        return self._numbers[expression]

    def expression(self, value: Any) -> Expression:
        """Returns the expression of a number; NotAnExpression: the library lacks one of its functions."""
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
        operands = (each for each in meaning.operands if isinstance(each, Expression))
        return f"{meaning.operation}({', '.join(map(self._word, operands))})"

    def fix(self, value: sympy.Expr) -> Any:
        """Returns the value that an expression of powers of two has in this call, and decides that it has it.

        Varying: it depends on other numbers that have no one value. ValueError: a power of two is larger than
        any block.
        """
        for symbol in sorted(value.free_symbols, key=str):
            meaning = self._meanings[symbol]
            if meaning in _known(self.decisions[: self.flipped]):
                continue
            if meaning.operation != "NextPowerOf2":
                raise Varying
            if not self._decide(Expression.of("<=", meaning, MOST_ELEMENTS), is_value=True):
                raise ValueError(
                    f"a block would have more than {MOST_ELEMENTS} elements, the most that are compiled "
                    "ahead: go over longer rows in a loop"
                )
            self._decide(Expression.of("==", meaning, self.call.value(meaning)), is_value=True)
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
        if orig_expr.is_Number:
            return orig_expr
        try:
            return sympy.sympify(self.fix(orig_expr))
        except Varying:
            raise self.error(
                "this takes one value of a size or an attribute, with int(), float(), an index or a function "
                "that needs a plain number, but a plan is for many. Compute with the size itself, or compare"
            ) from None

    def _answer(self, question: Any, fallback: Any) -> bool:
        if question in (sympy.true, sympy.false):
            return question is sympy.true
        if fallback is not None and not self.in_squeeze:  # torch goes on without an answer
            return bool(fallback)
        if isinstance(question, sympy.core.relational.Relational):
            difference = sympy.expand(question.lhs - question.rhs)
            if difference.is_Number:
                return bool(question.func(difference, 0))
            if self.in_torch and (answer := _for_sizes_above_1(question)) is not None:
                return answer
        return self._decide(translate(question, self._meanings), str(question))

    def _decide(self, condition: Expression, text: str = "", is_value: bool = False) -> bool:
        for decision in self.decisions:
            if decision.condition == condition:
                return decision.held
        if _follows(condition, _known(self.decisions[: self.flipped])):
            return bool(self.call.value(condition))
        if self.flipped is not None and self.flipped < len(self.decisions):
            raise OtherBranch
        held = bool(self.call.value(condition)) is not (self.flipped == len(self.decisions))
        text = f"{self.line()}: {self.described(text)}"
        self.decisions.append(Decision(condition, held, is_value, text))
        return held


@lru_cache(4096)
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


def guards(decisions: Sequence[Decision]) -> tuple[Expression, ...]:
    """Returns what holds for the calls of a path, without what follows from numbers that have one value."""
    known = _known(decisions)
    return tuple(
        each.guard
        for each in decisions
        if (each.held and each.condition.operands[0] in known and each.condition.operation == "==")
        or not _follows(each.condition, known)
    )


def _known(decisions: Sequence[Decision]) -> set[Expression]:
    """Returns the numbers that have one value."""
    return {
        each.condition.operands[0]
        for each in decisions
        if each.held
        and each.condition.operation == "=="
        and each.condition.operands[1].operation == "constant"
    }


def _follows(value: Expression, known: Collection[Expression]) -> bool:
    if value in known or value.operation == "constant":
        return True
    return value.operation in FUNCTIONS and all(_follows(each, known) for each in value.operands)
