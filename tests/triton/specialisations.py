"""How Triton's own launcher specialises a kernel for the values of its arguments."""

from collections.abc import Sequence
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from twinop.aot_kernels.plan import Variant
from twinop.triton.compile import Source
from twinop.triton.recorder import TracedLaunch
from twinop.triton.variants import Address

DIVISIBLE = "DivisibleBy16"

Specialisation = dict[str, tuple[str, bool]]
"""By the name of each argument its type, "constexpr" for a 1, and if it is marked as a multiple of 16."""


def chosen_variant(found: Sequence[Variant[Source]], values: Sequence[Any]) -> Variant[Source]:
    """Chooses as the library does."""

    def holds(argument: int, assumed: str) -> bool:
        value = values[argument]
        number = value.data_ptr() if isinstance(value, Address) else value
        return number % 16 == 0 if assumed == DIVISIBLE else -(2**31) <= number < 2**31

    return next(
        variant for variant in found if all(holds(*requirement) for requirement in variant.requirements)
    )


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
    return {
        argument.name: (variant.kernel.signature[argument.name], argument.name in marked)
        for argument in launch.arguments
    }


def is_sound(assumed: Specialisation, true: Specialisation) -> bool:
    """Returns whether a kernel compiled for what is assumed serves arguments of which more is true."""
    wider = {"i32": ("i32", "i64"), "constexpr": ("constexpr", "i32", "i64")}
    return all(
        kind in wider.get(true[name][0], (true[name][0],)) and (not marked or true[name][1])
        for name, (kind, marked) in assumed.items()
    )
