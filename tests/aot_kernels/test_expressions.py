"""Expressions have the same value in C++, before a launch, as in Python."""

import math
import random
import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from device_calls import At, Request, run
from payloads import ONE, InProcess, Packed, cubins, record

from twinop.aot_kernels.plan import (
    DeviceOp,
    Expression,
    Kernel,
    Launch,
    Opcode,
    Plan,
    Scalar,
    Variant,
    arch,
    attribute,
    constant,
    size,
    text_is,
)
from twinop.record import Attribute

ATTRIBUTES = (
    Attribute("case", "int"),
    Attribute("a", "float"),
    Attribute("s", "str"),
    Attribute("b", "bool"),
)
UNARY = (
    Opcode.NOT, Opcode.SQRT, Opcode.EXP, Opcode.LOG, Opcode.TO_FLOAT, Opcode.TO_INT,
    Opcode.FLOOR, Opcode.CEIL, Opcode.NEXT_POWER_OF_2,
)  # fmt: skip
BINARY = tuple(opcode for opcode in Opcode if opcode >= Opcode.ADD and opcode not in UNARY)
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


def check(expressions: Sequence[Expression], packed: Packed, in_process: InProcess) -> None:
    """Compares the values: the op's first attribute chooses the expression that is the kernel's argument."""
    plans, wanted = [], []
    for case, expression in enumerate(expressions):
        value = expected(expression, case)
        type_ = "i64" if isinstance(value, int) else "fp64"
        launch = Launch((ONE, ONE, ONE), (Scalar(expression, type_),), (Variant((), ((0, type_),), 0),))
        plans.append(Plan(0, (2, 1), (launch,), (Expression.of(Opcode.EQUAL, attribute(0), case),)))
        wanted.append(value)
    library: Path = packed(DeviceOp(record(2, ATTRIBUTES), tuple(plans)), KERNEL)
    inputs = [At(SHAPES[0]), At(SHAPES[1])]
    requests = [Request(inputs, attributes=values_of(case)) for case in range(len(plans))]
    for expression, value, outcome in zip(
        expressions, wanted, in_process(run, library, requests), strict=True
    ):
        if value is None:
            assert "the launch needs a number that cannot be computed: " in outcome.error, expression
            continue
        assert outcome.error == "", expression
        found = bytes.fromhex(outcome.launches[0]["parameters"][0])
        if isinstance(value, float) and math.isnan(struct.unpack("<d", found)[0]):
            found = b"nan"
        assert found == bits(value), expression


def test_what_expressions_refer_to(packed: Packed, in_process: InProcess) -> None:
    elements = size(0, 0) * size(0, 1)
    check(
        [
            size(0, 1),
            size(1, 0) * size(0, 0) + attribute(0),
            attribute(1),
            attribute(3),
            text_is(2, "tanh"),
            text_is(2, "none"),
            arch(),
            (elements + 1023) // 1024,
            size(0, 0) - size(0, 1) % 4,
        ],
        packed,
        in_process,
    )


def test_every_operation_on_edge_values(packed: Packed, in_process: InProcess) -> None:
    cases = [Expression.of(opcode, value) for opcode in UNARY for value in NUMBERS]
    pairs = list(product(NUMBERS, NUMBERS))
    cases += [
        Expression.of(opcode, *pair) for opcode in BINARY for pair in random.Random(1).sample(pairs, 120)
    ]
    check(cases, packed, in_process)


def test_compositions(packed: Packed, in_process: InProcess) -> None:
    chance = random.Random(2)
    leaves = [
        size(0, 0),
        size(0, 1),
        size(1, 0),
        attribute(0),
        attribute(1),
        constant(3),
        constant(0.5),
        arch(),
    ]

    def grown(depth: int) -> Expression:
        if depth == 0 or chance.random() < 0.1:
            return chance.choice(leaves)
        if chance.random() < 0.3:
            return Expression.of(chance.choice(UNARY), grown(depth - 1))
        return Expression.of(chance.choice(BINARY), grown(depth - 1), grown(depth - 1))

    check([grown(4) for _ in range(400)], packed, in_process)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (constant(2**62) * 2, "an int does not fit in 64 bits"),
        (size(0, 0) // 0, "a division by zero"),
        (size(0, 0) + constant(0.5) // 2, "an operation on ints got a float"),
        (Expression.of(Opcode.LOG, -1.0), "a root, logarithm or power that does not exist"),
        (Expression.of(Opcode.EXP, 1e4), "a float is too large, or a logarithm of zero"),
        (Expression.of(Opcode.TO_INT, 1e30), "a float that fits in no int"),
        (Expression.of(Opcode.SHIFT_LEFT, 1, 64), "a shift by less than 0 or more than 63"),
    ],
)
def test_messages(expression: Expression, message: str, packed: Packed, in_process: InProcess) -> None:
    with pytest.raises(ArithmeticError):
        expression.evaluate(SHAPES)
    launch = Launch((expression, ONE, ONE), (), (Variant((), (), 0),))
    library = packed(DeviceOp(record(2), (Plan(0, (2, 1), (launch,)),)), KERNEL)
    (outcome,) = in_process(run, library, [Request([At(SHAPES[0]), At(SHAPES[1])])])
    assert outcome.error == f"the launch needs a number that cannot be computed: {message}"


def test_a_constant_that_does_not_fit() -> None:
    with pytest.raises(OverflowError, match="the constant 9223372036854775808 does not fit in 64 bits"):
        constant(2**63)
