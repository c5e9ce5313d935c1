"""Turns what torch computed with symbolic sizes, in sympy, into expressions that a library evaluates."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from ..aot_kernels.plan import Expression, Opcode, as_expression

_FUNCTIONS = {  # of torch.utils._sympy.functions, whose names are the same in all of torch's releases
    "FloorDiv": Opcode.FLOOR_DIVIDE,
    "CleanDiv": Opcode.FLOOR_DIVIDE,
    "Mod": Opcode.MODULO,
    "PythonMod": Opcode.MODULO,
    "IntTrueDiv": Opcode.DIVIDE,
    "FloatTrueDiv": Opcode.DIVIDE,
    "FloatPow": Opcode.POWER,
    "PowByNatural": Opcode.POWER,
    "Pow": Opcode.POWER,
    "ToFloat": Opcode.TO_FLOAT,
    "TruncToInt": Opcode.TO_INT,
    "FloorToInt": Opcode.FLOOR,
    "CeilToInt": Opcode.CEIL,
    "LShift": Opcode.SHIFT_LEFT,
    "RShift": Opcode.SHIFT_RIGHT,
    "BitwiseFn_bitwise_and": Opcode.BIT_AND,
    "BitwiseFn_bitwise_or": Opcode.BIT_OR,
    "OpaqueUnaryFn_sqrt": Opcode.SQRT,
    "OpaqueUnaryFn_exp": Opcode.EXP,
    "OpaqueUnaryFn_log": Opcode.LOG,
    "Add": Opcode.ADD,
    "Mul": Opcode.MULTIPLY,
    "Min": Opcode.MINIMUM,
    "Max": Opcode.MAXIMUM,
    "Equality": Opcode.EQUAL,
    "Unequality": Opcode.NOT_EQUAL,
    "StrictLessThan": Opcode.LESS,
    "LessThan": Opcode.LESS_EQUAL,
    "StrictGreaterThan": Opcode.GREATER,
    "GreaterThan": Opcode.GREATER_EQUAL,
    "And": Opcode.AND,
    "Or": Opcode.OR,
    "Not": Opcode.NOT,
}
_ANY_NUMBER_OF_OPERANDS = {"Add", "Mul", "Min", "Max", "And", "Or"}


class NotAnExpression(Exception):
    """The library's expressions lack a function; the argument is its name."""


def translate(value: sympy.Basic, meanings: Mapping[sympy.Symbol, Expression]) -> Expression:
    """Translates an expression of sympy.

    Args:
        meanings: the expression that each symbol stands for.

    Raises:
        NotAnExpression: it has a function that the library lacks.
    """
    if isinstance(value, sympy.Symbol):
        return meanings[value]
    if value in (sympy.true, sympy.false):
        return as_expression(int(value is sympy.true))
    if isinstance(value, sympy.Integer):
        return as_expression(int(value))
    if isinstance(value, sympy.Number):
        return as_expression(float(value))
    return _operation(value, lambda operand: translate(operand, meanings))


def _operation(value: sympy.Basic, of: Callable[[Any], Expression]) -> Expression:
    name = type(value).__name__
    if name not in _FUNCTIONS:
        raise NotAnExpression(name.rpartition("_")[2])
    opcode, operands = _FUNCTIONS[name], value.args
    if name in _ANY_NUMBER_OF_OPERANDS:
        # sympy's order depends on the names of symbols; this one is the same in each run, constants last.
        translated = sorted(map(of, operands), key=lambda operand: (-operand.code[0][0], repr(operand)))
        return functools.reduce(functools.partial(Expression.of, opcode), translated)
    return Expression.of(opcode, *map(of, operands))
