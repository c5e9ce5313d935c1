"""Variants of launches against Triton's own specialisation of arguments."""

import itertools
from typing import Any

import pytest
from ahead_kernels import add_kernel, copy_rows_kernel, gelu_launch, launch_of, number, pointer, typed_kernel
from specialisations import DIVISIBLE, assumed_by, chosen_variant, is_sound, of_triton

from twinop.aot_kernels.expression import attribute, size
from twinop.aot_kernels.plan import POINTER
from twinop.errors import BuildError
from twinop.triton.variants import Address, variants

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


def test_constants_are_specialised_by_value() -> None:
    launch = launch_of(
        copy_rows_kernel, pointer("x_ptr", "input"), pointer("y_ptr", "output"), number("rows", size(0, 0)),
        number("stride", 1), number("columns", 64), BLOCK=64,
    )  # fmt: skip
    special, *_, general = variants(launch)
    assert special.kernel.constants == {(3,): 1, (5,): 64}
    assert (4,) in special.kernel.attributes
    assert special.parameters == ((0, POINTER), (1, POINTER), (2, "i32"), (4, "i32"))
    assert general.parameters == ((0, POINTER), (1, POINTER), (2, "i64"), (4, "i32"))


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
    with pytest.raises(
        BuildError, match=r"add_kernel, ahead_kernels.py:\d+: Triton does not take these arguments"
    ):
        variants(launch)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1000, 1024, 4096 + 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_launches_the_kernel_of_the_chosen_variant(n: int, dtype: str) -> None:
    import torch

    x = torch.randn(n, device="cuda").to(getattr(torch, dtype))
    y = torch.empty_like(x)
    launch = gelu_launch(dtype)
    made = launch.kernel[(8,)](x, y, n, BLOCK=1024, enable_fp_fusion=True)
    source = chosen_variant(
        variants(launch), [Address(x.data_ptr(), dtype), Address(y.data_ptr(), dtype), n]
    ).kernel
    attributes = {place: value for place, value in made.src.attrs.items() if value}
    assert (made.src.signature, made.src.constants, attributes) == (
        source.signature,
        source.constants,
        source.attributes,
    )
