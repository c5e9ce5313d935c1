"""Turns what torch computed with symbolic sizes, in sympy, into expressions that a library evaluates."""

import functools
from collections.abc import Mapping

import sympy  # type: ignore[import-untyped]

from ..aot_kernels.expression import Expression, as_expression

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
        return functools.reduce(functools.partial(Expression.of, operation), operands)
    return Expression.of(operation, *operands)
