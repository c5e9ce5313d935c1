"""Expressions over the sizes and attributes of a call. Traces make them, libraries compute them in C++."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

Operand = Union["Expression", int, float]


@dataclass(frozen=True)
class Expression:
    """A constant, a variable, or an operation on others.

    An operation on an int and a float is in double. Ints may have more than 64 bits within a formula, but not
    as its result. `FloorDivide`, `Modulo` and those on bits take ints only.
    Equality of two objects is equality of what they are made of; `Expression.of("==", a, b)` compares values.

    Attributes:
        operation: "constant", whose operand is a number; "size" of an input along a dimension; "attribute",
            the value of an int, float or bool by index; "text_is", whether a str attribute has a value;
            "arch", the device's compute capability, 90 for 9.0; or a key of `FUNCTIONS`.
    """

    operation: str
    operands: tuple[Any, ...] = ()

    @classmethod
    def of(cls, operation: str, *operands: Operand) -> "Expression":
        """Returns the operation on these operands; numbers are constants."""
        return cls(operation, tuple(map(as_expression, operands)))

    def parts(self) -> Iterator["Expression"]:
        yield self
        if self.operation in FUNCTIONS:
            for operand in self.operands:
                yield from operand.parts()

    def evaluate(
        self, sizes: Sequence[Sequence[int] | None] = (), attributes: Sequence[Any] = (), arch: int = 0
    ) -> int | float:
        """Computes the value for a call that is traced.

        `sizes`: the shape of each input, None for an absent one; `arch`: as in "arch". ArithmeticError: an
        int that does not fit in 64 bits, a division by zero, or the root or logarithm of a number that has
        none.
        """
        value = self._value(sizes, attributes, arch)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise OverflowError(f"{value} does not fit in 64 bits")
        return value

    def _value(
        self, sizes: Sequence[Sequence[int] | None], attributes: Sequence[Any], arch: int
    ) -> int | float:
        match self.operation, self.operands:
            case "constant", (value,):
                pass
            case "size", (tensor, dimension):
                shape = sizes[tensor]
                assert shape is not None, f"input {tensor} is absent"
                value = shape[dimension]
            case "attribute", (index,):
                value = attributes[index]
            case "text_is", (index, text):
                value = attributes[index] == text
            case "arch", _:
                value = arch
            case _:
                values = [operand._value(sizes, attributes, arch) for operand in self.operands]
                try:
                    value = FUNCTIONS[self.operation](*values)
                except ValueError as error:  # a negative number's root or logarithm, int(nan)
                    raise ArithmeticError(str(error)) from error
        return int(value) if isinstance(value, bool) else value


def constant(value: int | float) -> Expression:
    """Returns the expression of a number; raises OverflowError for an int that does not fit in 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OverflowError(f"the constant {value} does not fit in 64 bits")
    return Expression("constant", (value if isinstance(value, float) else int(value),))


def as_expression(value: Operand) -> Expression:
    """Returns an expression as it is, and a number as a constant."""
    return value if isinstance(value, Expression) else constant(value)


def size(tensor: int, dimension: int) -> Expression:
    """Returns the size of an input along a dimension, both counted from 0."""
    return Expression("size", (tensor, dimension))


def attribute(index: int) -> Expression:
    """Returns the value of an int, float or bool attribute."""
    return Expression("attribute", (index,))


def text_is(index: int, text: str) -> Expression:
    """Returns whether a str attribute has this value."""
    return Expression("text_is", (index, text))


ARCH = Expression("arch")


def _promoted(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is in double if one of its operands is."""

    def of(*values: int | float) -> Any:
        return function(*(map(float, values) if any(isinstance(v, float) for v in values) else values))

    return of


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, float) or isinstance(exponent, float):
        return math.pow(base, exponent)
    if exponent < 0:
        raise ArithmeticError("an int to a negative power")
    # A base of 2 or more overflows at the latest at 64; larger exponents would take memory.
    return base**exponent if abs(base) < 2 or exponent <= 64 else 2**64


def _power_of_2(count: int) -> int:
    if not 0 <= count < 64:
        raise ArithmeticError(f"a shift by {count}")
    return 1 << count


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": _promoted(operator.add),
    "*": _promoted(operator.mul),
    "==": _promoted(operator.eq),
    "!=": _promoted(operator.ne),
    "<": _promoted(operator.lt),
    "<=": _promoted(operator.le),
    ">": _promoted(operator.gt),
    ">=": _promoted(operator.ge),
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
    "!": operator.not_,
    "FloorDivide": operator.floordiv,
    "Divide": lambda a, b: float(a) / float(b),  # in double, whatever the types
    "Modulo": operator.mod,  # has the sign of the divisor
    "Minimum": _promoted(lambda a, b: b if b < a else a),
    "Maximum": _promoted(lambda a, b: b if b > a else a),
    "Sqrt": math.sqrt,
    "Exp": math.exp,
    "Log": math.log,
    "Power": _power,
    "ToFloat": float,
    "ToInt": int,  # towards zero
    "Floor": math.floor,  # to an int
    "Ceil": math.ceil,
    "NextPowerOf2": lambda a: 1 << (a - 1).bit_length() if a > 0 else 0,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "ShiftLeft": lambda a, count: a * _power_of_2(count),
    "ShiftRight": lambda a, count: a // _power_of_2(count),
}
"""The operations, by their names in C++ (`kernels/aot_kernels/number.h`)."""
