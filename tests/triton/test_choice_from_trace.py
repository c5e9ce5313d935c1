"""Traced launches with the numbers and the choices that Triton's own launcher has for the same calls.

A trace answers torch's questions about sizes of 0 and 1 in one way for all sizes. These tests hold that the
plan is right for them all the same.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from ahead_kernels import strided_kernel
from launchers import chosen, direct, evaluated, record
from specialisations import assumed_by, chosen_variant, is_sound, of_triton

from twinop.aot_kernels.plan import Pointer
from twinop.triton.recorder import TracedLaunch
from twinop.triton.trace import TracedOp, trace
from twinop.triton.variants import Address, variants

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
