"""Expressions over the sizes and attributes of a call, which the library evaluates before each launch."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Union

_LEAST, _MOST = -(2**63), 2**63 - 1


class Opcode(IntEnum):
    """The operations, by their number in the payload (`kernels/aot_kernels/expression.h`)."""

    CONSTANT_INT = 0  # operand: the int
    CONSTANT_FLOAT = 1  # operand: the float
    SIZE = 2  # operand: (input, dimension)
    ATTRIBUTE = 3  # operand: index; the value of an int, float or bool
    TEXT_IS = 4  # operand: (attribute, text); 1 if the str attribute is the text, or 0
    ARCH = 5  # the device's compute capability, 90 for 9.0
    ADD = 6
    SUBTRACT = 7
    MULTIPLY = 8
    FLOOR_DIVIDE = 9
    DIVIDE = 10  # in double, whatever the types
    MODULO = 11  # has the sign of the divisor, as in Python
    MINIMUM = 12
    MAXIMUM = 13
    EQUAL = 14
    NOT_EQUAL = 15
    LESS = 16
    LESS_EQUAL = 17
    GREATER = 18
    GREATER_EQUAL = 19
    AND = 20  # 0 or 1; both operands are evaluated
    OR = 21
    NOT = 22
    SQRT = 23
    EXP = 24
    LOG = 25
    POWER = 26
    TO_FLOAT = 27
    TO_INT = 28  # towards zero, as int()
    FLOOR = 29  # to an int
    CEIL = 30
    NEXT_POWER_OF_2 = 31
    BIT_AND = 32
    BIT_OR = 33
    SHIFT_LEFT = 34
    SHIFT_RIGHT = 35


Operand = Union["Expression", int, float]


@dataclass(frozen=True)
class Expression:
    """Postfix code over int64 and double values: (opcode, operand) pairs, None where there is no operand.

    An operation of an int and a float is in double; `//`, `%` and those on bits take ints only. Comparisons
    give 0 or 1. Equality of two objects is equality of their code: `Expression.of(Opcode.EQUAL, a, b)`
    compares values.
    """

    code: tuple[tuple[Opcode, Any], ...]

    @classmethod
    def of(cls, opcode: Opcode, *operands: Operand) -> "Expression":
        """Returns the operation on these operands; numbers are constants."""
        codes = [as_expression(operand).code for operand in operands]
        return cls((*(item for code in codes for item in code), (opcode, None)))

    @property
    def depth(self) -> int:
        """How many values the evaluation holds at most."""
        held = [0]
        for opcode, _ in self.code:
            held.append(held[-1] + 1 - (_FUNCTIONS[opcode][0] if opcode in _FUNCTIONS else 0))
        return max(held)

    def evaluate(
        self, sizes: Sequence[Sequence[int] | None] = (), attributes: Sequence[Any] = (), arch: int = 0
    ) -> int | float:
        """Computes the value as the library does.

        Args:
            sizes: the shape of each input in the schema's order; None for an absent one.
            attributes: the attributes in the schema's order.
            arch: the device's compute capability, 90 for 9.0.

        Raises:
            ArithmeticError: an int does not fit in 64 bits, a division by zero, or the root or logarithm of
                a number that has none.
        """
        stack: list[Any] = []
        for opcode, operand in self.code:
            if opcode in (Opcode.CONSTANT_INT, Opcode.CONSTANT_FLOAT):
                value = operand
            elif opcode is Opcode.SIZE:
                shape = sizes[operand[0]]
                assert shape is not None, f"input {operand[0]} is absent"
                value = shape[operand[1]]
            elif opcode is Opcode.ATTRIBUTE:
                value = attributes[operand]
            elif opcode is Opcode.TEXT_IS:
                value = attributes[operand[0]] == operand[1]
            elif opcode is Opcode.ARCH:
                value = arch
            else:
                count, function = _FUNCTIONS[opcode]
                arguments = stack[-count:]
                del stack[-count:]
                try:
                    value = function(*arguments)
                except ValueError as error:  # a negative number's root or logarithm, int(nan)
                    raise ArithmeticError(str(error)) from error
            value = int(value) if isinstance(value, bool) else value
            if isinstance(value, int) and not _LEAST <= value <= _MOST:
                raise OverflowError(f"{opcode.name}: {value} does not fit in 64 bits")
            stack.append(value)
        (result,) = stack
        return result

    def __add__(self, other: Operand) -> "Expression":
        return Expression.of(Opcode.ADD, self, other)

    def __sub__(self, other: Operand) -> "Expression":
        return Expression.of(Opcode.SUBTRACT, self, other)

    def __mul__(self, other: Operand) -> "Expression":
        return Expression.of(Opcode.MULTIPLY, self, other)

    def __floordiv__(self, other: Operand) -> "Expression":
        return Expression.of(Opcode.FLOOR_DIVIDE, self, other)

    def __mod__(self, other: Operand) -> "Expression":
        return Expression.of(Opcode.MODULO, self, other)


def constant(value: int | float) -> Expression:
    """Returns the expression of a number.

    Raises:
        OverflowError: an int that does not fit in 64 bits.
    """
    if isinstance(value, float):
        return Expression(((Opcode.CONSTANT_FLOAT, value),))
    if not _LEAST <= value <= _MOST:
        raise OverflowError(f"the constant {value} does not fit in 64 bits")
    return Expression(((Opcode.CONSTANT_INT, int(value)),))


def size(tensor: int, dimension: int) -> Expression:
    """Returns the size of an input along a dimension, both counted from 0."""
    return Expression(((Opcode.SIZE, (tensor, dimension)),))


def attribute(index: int) -> Expression:
    """Returns the value of an int, float or bool attribute."""
    return Expression(((Opcode.ATTRIBUTE, index),))


def text_is(index: int, text: str) -> Expression:
    """Returns whether a str attribute has this value."""
    return Expression(((Opcode.TEXT_IS, (index, text)),))


def arch() -> Expression:
    """Returns the device's compute capability, 90 for 9.0."""
    return Expression(((Opcode.ARCH, None),))


def as_expression(value: Operand) -> Expression:
    """Returns an expression as it is, and a number as a constant."""
    return value if isinstance(value, Expression) else constant(value)


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is in double if one of its operands is."""

    def promoted(*values: int | float) -> Any:
        return function(*(map(float, values) if any(isinstance(v, float) for v in values) else values))

    return promoted


def _integral(function: Callable[..., int]) -> Callable[..., int]:
    def checked(*values: int) -> int:
        if not all(isinstance(value, int) for value in values):
            raise ArithmeticError("an operation on ints got a float")
        return function(*values)

    return checked


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        # A base of 2 or more overflows at the latest at 64; larger exponents would take memory.
        return base**exponent if abs(base) < 2 or exponent <= 64 else 2**64
    return math.pow(base, exponent)


def _shift_left(value: int, count: int) -> int:
    if not 0 <= count < 64:
        raise ArithmeticError(f"a shift by {count}")
    return value << count


def _shift_right(value: int, count: int) -> int:
    if not 0 <= count < 64:
        raise ArithmeticError(f"a shift by {count}")
    return value >> count


_FUNCTIONS: dict[Opcode, tuple[int, Callable[..., Any]]] = {
    Opcode.ADD: (2, _arithmetic(operator.add)),
    Opcode.SUBTRACT: (2, _arithmetic(operator.sub)),
    Opcode.MULTIPLY: (2, _arithmetic(operator.mul)),
    Opcode.FLOOR_DIVIDE: (2, _integral(operator.floordiv)),
    Opcode.DIVIDE: (2, lambda a, b: float(a) / float(b)),
    Opcode.MODULO: (2, _integral(operator.mod)),
    Opcode.MINIMUM: (2, _arithmetic(lambda a, b: b if b < a else a)),
    Opcode.MAXIMUM: (2, _arithmetic(lambda a, b: b if b > a else a)),
    Opcode.EQUAL: (2, _arithmetic(operator.eq)),
    Opcode.NOT_EQUAL: (2, _arithmetic(operator.ne)),
    Opcode.LESS: (2, _arithmetic(operator.lt)),
    Opcode.LESS_EQUAL: (2, _arithmetic(operator.le)),
    Opcode.GREATER: (2, _arithmetic(operator.gt)),
    Opcode.GREATER_EQUAL: (2, _arithmetic(operator.ge)),
    Opcode.AND: (2, lambda a, b: bool(a) and bool(b)),
    Opcode.OR: (2, lambda a, b: bool(a) or bool(b)),
    Opcode.NOT: (1, operator.not_),
    Opcode.SQRT: (1, math.sqrt),
    Opcode.EXP: (1, math.exp),
    Opcode.LOG: (1, math.log),
    Opcode.POWER: (2, _power),
    Opcode.TO_FLOAT: (1, float),
    Opcode.TO_INT: (1, int),
    Opcode.FLOOR: (1, math.floor),
    Opcode.CEIL: (1, math.ceil),
    Opcode.NEXT_POWER_OF_2: (1, _integral(lambda a: 1 << (a - 1).bit_length() if a > 0 else 0)),
    Opcode.BIT_AND: (2, _integral(operator.and_)),
    Opcode.BIT_OR: (2, _integral(operator.or_)),
    Opcode.SHIFT_LEFT: (2, _integral(_shift_left)),
    Opcode.SHIFT_RIGHT: (2, _integral(_shift_right)),
}
