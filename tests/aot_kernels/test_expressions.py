"""Expressions have the same value in C++, before a launch, as in Python."""

import math
import random
import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from aot_ops import ONE, InProcess, LibraryOf, cubins, record, several
from device_calls import At, Request, run

from twinop.aot_kernels.expression import ARCH, FUNCTIONS, Expression, attribute, constant, size, text_is
from twinop.aot_kernels.plan import DeviceOp, Kernel, Launch, Plan, Scalar, Variant
from twinop.record.op_spec import Attribute

ATTRIBUTES = tuple(map(Attribute, ("case", "a", "s", "b"), ("int", "float", "str", "bool")))
UNARY = ("!", "Sqrt", "Exp", "Log", "ToFloat", "ToInt", "Floor", "Ceil", "NextPowerOf2")
BINARY = tuple(name for name in FUNCTIONS if name not in UNARY)
OF_INTS = ("NextPowerOf2", "FloorDivide", "Modulo", "BitAnd", "BitOr", "ShiftLeft", "ShiftRight")
NUMBERS = (
    0, 1, -1, 2, 3, -7, 16, 62, 63, 64, 1023, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1,
    -(2**63), 0.0, -0.0, 0.5, -2.5, 3.0, 1e-5, 709.0, 710.0, 9.2e18, 1e19, 1e308,
    math.inf, -math.inf, math.nan,
)  # fmt: skip
SHAPES = [(6, 35), (7,)]
KERNEL = Kernel("k|8", "k_kernel, k.py:7", cubins({"90": b"cubin"}))


def values_of(case: int) -> list[object]:
    return [case, 0.25, "tanh", True]


def expected(expression: Expression, case: int) -> int | float | None:
    """The value in Python; None where there is none."""
    try:
        return expression.evaluate(SHAPES, values_of(case), arch=90)
    except ArithmeticError:
        return None


def bits(value: int | float | None) -> bytes | None:
    if value is None:
        return None
    if value != value:
        return b"nan"
    return struct.pack("<q" if isinstance(value, int) else "<d", value)


def check(expressions: Sequence[Expression], library_of: LibraryOf, in_process: InProcess) -> None:
    """Compares the values: the op's first attribute chooses the expression that is the kernel's argument."""
    plans, wanted = [], []
    for case, expression in enumerate(expressions):
        value = expected(expression, case)
        type_ = "i64" if isinstance(value, int) else "fp64"
        launch = Launch((ONE, ONE, ONE), (Scalar(expression, type_),), (Variant((), ((0, type_),), 0),))
        plans.append(Plan(0, (2, 1), (launch,), (Expression.of("==", attribute(0), case),)))
        wanted.append(value)
    library: Path = library_of(DeviceOp(record(2, ATTRIBUTES), tuple(plans)), KERNEL)
    inputs = [At(SHAPES[0]), At(SHAPES[1])]
    requests = [Request(inputs, attributes=values_of(case)) for case in range(len(plans))]
    outcomes = in_process(run, library, requests)
    for expression, value, outcome in zip(expressions, wanted, outcomes, strict=True):
        if value is None:
            assert "the launch needs a number that cannot be computed: " in outcome.error, expression
            continue
        assert outcome.error == "", expression
        found = bytes.fromhex(outcome.launches[0]["parameters"][0])
        if isinstance(value, float) and math.isnan(struct.unpack("<d", found)[0]):
            found = b"nan"
        assert found == bits(value), expression


def test_what_expressions_refer_to(library_of: LibraryOf, in_process: InProcess) -> None:
    of = Expression.of
    elements = of("*", size(0, 0), size(0, 1))
    check(
        [
            size(0, 1),
            of("+", of("*", size(1, 0), size(0, 0)), attribute(0)),
            attribute(1),
            attribute(3),
            text_is(2, "tanh"),
            text_is(2, "none"),
            ARCH,
            of("FloorDivide", of("+", elements, 1023), 1024),
            of("*", size(0, 0), of("*", of("ToFloat", size(0, 0)), size(0, 1))),
            of("!", of("<", of("+", size(0, 0), of("+", size(0, 1), 1)), of("Modulo", size(0, 1), 4))),
        ],
        library_of,
        in_process,
    )


def numbers_of(name: str) -> list[int | float]:
    return [n for n in NUMBERS if name not in OF_INTS or isinstance(n, int)]


def test_every_operation_on_edge_values(library_of: LibraryOf, in_process: InProcess) -> None:
    chance = random.Random(1)
    cases = [Expression.of(name, value) for name in UNARY for value in numbers_of(name)]
    for name in BINARY:
        pairs = list(product(numbers_of(name), repeat=2))
        cases += [Expression.of(name, *pair) for pair in chance.sample(pairs, 60)]
    check(cases, library_of, in_process)


def test_messages(library_of: LibraryOf, in_process: InProcess) -> None:
    of = Expression.of
    cases = {
        of("*", 2**62, 2): "an int does not fit in 64 bits",
        of("FloorDivide", size(0, 0), 0): "a division by zero",
        of("Power", size(0, 0), -1): "an int to a negative power",
        of("Floor", of("Log", -1.0)): "a root, logarithm or power that does not exist",
        of("Floor", of("Exp", 1e4)): "a float is too large, or a logarithm of zero",
        of("ToInt", 1e30): "a float that fits in no int",
        of("ShiftLeft", 1, 64): "a shift by less than 0 or more than 63",
    }
    launches = (Launch((expression, ONE, ONE), (), (Variant((), (), 0),)) for expression in cases)
    ops = (DeviceOp(record(2), (Plan(0, (2, 1), (launch,)),)) for launch in launches)
    library, inputs = library_of(several(ops, KERNEL)), [At(SHAPES[0]), At(SHAPES[1])]
    for i, (expression, message) in enumerate(cases.items()):
        with pytest.raises(ArithmeticError):
            expression.evaluate(SHAPES)
        (outcome,) = in_process(run, library, [Request(inputs)], op=i)
        assert outcome.error == f"the launch needs a number that cannot be computed: {message}"


def test_a_constant_that_does_not_fit() -> None:
    with pytest.raises(OverflowError, match="the constant 9223372036854775808 does not fit in 64 bits"):
        constant(2**63)
