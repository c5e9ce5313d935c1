"""Variants of launches, and the numbers of traced ones, against Triton's own launcher.

A trace answers torch's questions about sizes of 0 and 1 in one way for all: the plan is right all the same.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from ahead_kernels import (
    add_kernel,
    copy_rows_kernel,
    gelu_launch,
    launch_of,
    number,
    pointer,
    strided_kernel,
    typed_kernel,
)
from launchers import chosen, direct, evaluated, record
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from twinop.aot_kernels.expression import attribute, size
from twinop.aot_kernels.plan import POINTER, Pointer, Variant
from twinop.errors import BuildError
from twinop.triton.compile import Source
from twinop.triton.recorder import TracedLaunch
from twinop.triton.trace import TracedOp, trace
from twinop.triton.variants import Address, variants

DIVISIBLE = "DivisibleBy16"

Specialisation = dict[str, tuple[str, bool]]
"""By the name of each argument its type, "constexpr" for a 1, and if it is marked as a multiple of 16."""


def chosen_variant(found: Sequence[Variant[Source]], values: Sequence[Any]) -> Variant[Source]:
    """Chooses as the library does."""

    def holds(argument: int, assumed: str) -> bool:
        value = values[argument]
        number = value.data_ptr() if isinstance(value, Address) else value
        return number % 16 == 0 if assumed == DIVISIBLE else -(2**31) <= number < 2**31

    return next(variant for variant in found if all(holds(*each) for each in variant.requirements))


def of_triton(launch: TracedLaunch, values: Sequence[Any]) -> Specialisation:
    """Returns what Triton's launcher specialises the kernel for."""
    parameters = {parameter.name: parameter for parameter in launch.kernel.params}
    found = {}
    for argument, value in zip(launch.arguments, values, strict=True):
        parameter = parameters[argument.name]
        kind, mark = native_specialize_impl(
            CUDABackend,
            value,
            parameter.is_const,
            not parameter.do_not_specialize,
            not parameter.do_not_specialize_on_alignment,
        )
        found[argument.name] = kind, mark == "D"
    return found


def assumed_by(launch: TracedLaunch, variant: Variant[Source]) -> Specialisation:
    """Returns what the kernel of a variant was compiled for."""
    names = list(variant.kernel.signature)
    marked = {names[place] for (place,) in variant.kernel.attributes}
    kinds, names = variant.kernel.signature, [argument.name for argument in launch.arguments]
    return {name: (kinds[name], name in marked) for name in names}


def is_sound(assumed: Specialisation, true: Specialisation) -> bool:
    """Returns whether a kernel compiled for what is assumed serves arguments of which more is true."""
    wider = {"i32": ("i32", "i64"), "constexpr": ("constexpr", "i32", "i64")}
    return all(
        kind in wider.get(true[name][0], (true[name][0],)) and (not marked or true[name][1])
        for name, (kind, marked) in assumed.items()
    )


INTS = (
    2, 3, 15, 16, 17, 31, 32, 48, 1000, 1024, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**62,
)  # fmt: skip


def test_two_ints_in_all_their_kinds() -> None:
    launch = launch_of(
        copy_rows_kernel, pointer("x_ptr", "input"), pointer("y_ptr", "output"), number("rows", size(0, 0)),
        number("stride", size(0, 1)), number("columns", size(0, 1)), BLOCK=1024,
    )  # fmt: skip
    found = variants(launch)
    addresses: list[Any] = [Address(256, "float32")] * 2
    for rows, columns in itertools.product((1, *INTS), repeat=2):
        values = [*addresses, rows, columns, columns]
        variant = chosen_variant(found, values)
        true = of_triton(launch, values)
        assert is_sound(assumed_by(launch, variant), true), (rows, columns)
        if 1 < rows < 2**31 and 1 < columns < 2**31 and not (rows % 16 == 0 and columns % 16):
            assert assumed_by(launch, variant) == true, (rows, columns)


def test_annotations_and_do_not_specialize() -> None:
    launch = launch_of(
        typed_kernel,
        pointer("y_ptr", "output"),
        number("a", size(0, 0)),
        number("b", size(0, 0)),
        number("c", size(0, 0)),
        number("d", 0.5, "fp32"),
        number("e", 0.5, "fp32"),
        number("flag", attribute(0), "i1"),
        nothing=None,
    )
    special, *_ = variants(launch)
    kinds = ("*fp32", "i32", "i32", "i64", "fp64", "fp32", "u1", "constexpr")
    assert tuple(special.kernel.signature.values()) == kinds
    assert set(special.kernel.attributes) == {(0,), (3,)}  # of the ints, c alone is specialised on alignment
    # The requirement is on the first argument of the same value.
    assert special.requirements == ((0, DIVISIBLE), (1, DIVISIBLE), (1, "FitsI32"))
    assert special.parameters == (
        (0, POINTER), (1, "i32"), (2, "i32"), (3, "i64"), (4, "fp64"), (5, "fp32"), (6, "i1"),
    )  # fmt: skip


def test_an_unknown_option_is_refused() -> None:
    launch = launch_of(add_kernel, *gelu_launch().arguments, options={"num_wraps": 4}, BLOCK=8)
    with pytest.raises(BuildError, match=r"add_kernel, ahead_kernels.py:\d+: Triton does not take these"):
        variants(launch)


SIZES = (0, 1, 15, 16, 48, 2**31 - 1, 2**31, 2**31 + 16)
MOST = 2**58  # elements; the bytes and their products stay below 2**63
ALIGNMENTS = (4, 12, 16)


def strides(x):
    y = torch.empty_like(x)
    batch, rows, columns = x.shape
    strided_kernel[(batch, rows)](x, y, x.stride(0), x.stride(1), x.stride(2), rows, columns, BLOCK=64)
    return y


def transposed(x):
    y = torch.empty(x.shape[1], x.shape[2], x.shape[0], dtype=x.dtype, device=x.device)
    x = x.permute(1, 2, 0)
    strided_kernel[(1,)](x, y, *x.stride(), x.shape[1], x.numel(), BLOCK=64)
    return y


def rows_of_a_view(x):
    rows = x.view(x.shape[0] * x.shape[1], x.shape[2])
    y = torch.empty(x.shape[:2], dtype=x.dtype, device=x.device)
    strided_kernel[(rows.shape[0],)](
        rows, y, rows.stride(0), rows.stride(1), y.stride(0), rows.shape[0], rows.shape[1], BLOCK=64
    )
    return y


def parts(x):
    """The second pointer is as aligned as the sizes make it."""
    both = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    strided_kernel[(1,)](both[1], y, *both.stride()[1:], x.shape[0], x.shape[1], BLOCK=64)
    strided_kernel[(1,)](x, both[1], *x.stride(), x.shape[0], x.shape[1], BLOCK=64)
    return y


@functools.cache
def traced(launcher: Any) -> TracedOp:
    return trace(record(launcher.__name__, "x"), launcher, [{"x": torch.empty(3, 5, 7)}])


def shapes() -> Iterator[tuple[int, ...]]:
    for shape in itertools.product(SIZES, repeat=3):
        if functools.reduce(lambda a, b: a * b, (max(size, 1) for size in shape)) < MOST:
            yield shape


def values_of(step: TracedLaunch, shape: Sequence[int], base: int) -> list[Any]:
    """Returns the arguments of a launch, with tensors that begin at an address."""
    return [
        Address(base + int(argument.offset.evaluate([shape])), argument.dtype)
        if isinstance(argument, Pointer)
        else argument.value.evaluate([shape])
        for argument in step.arguments
    ]


@pytest.mark.parametrize("launcher", [strides, transposed, rows_of_a_view, parts], ids=lambda f: f.__name__)
def test_numbers_are_those_of_the_launcher(launcher: Any) -> None:
    for shape in shapes():
        if 0 in (shape[:-1] if launcher is rows_of_a_view else shape):
            continue  # the output is empty: the library launches nothing
        found, expected = evaluated(chosen(traced(launcher), [shape]), [shape]), direct(launcher, [shape])
        if 0 in shape:  # the strides of a tensor without elements say nothing; torch makes them 1
            for _, _, numbers, *_ in (*found, *expected):
                del numbers["stride_0"]
        assert found == expected, shape


@pytest.mark.parametrize("launcher", [strides, transposed, rows_of_a_view, parts], ids=lambda f: f.__name__)
def test_the_chosen_kernel_assumes_what_is_true(launcher: Any) -> None:
    (plan,) = traced(launcher).plans
    for step in plan.steps:
        assert isinstance(step, TracedLaunch)
        found = variants(step, plan.guards)
        for shape in shapes():
            for alignment in ALIGNMENTS:
                values = values_of(step, shape, 256 + alignment)
                variant, true = chosen_variant(found, values), of_triton(step, values)
                assert is_sound(assumed_by(step, variant), true), (shape, alignment)
