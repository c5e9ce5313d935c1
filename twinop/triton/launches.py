"""From traced plans to plans: chooses the variants of each launch, and compiles all their kernels at once."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..aot_kernels.expression import Expression
from ..aot_kernels.plan import Kernel, Launch, Plan, Pointer, Variant
from ..errors import BuildError
from .compile import Compiled, Source, compile_kernels
from .recorder import TracedLaunch
from .ttir import kernel_uses
from .variants import narrow_variant, variants

_MOST_NARROW = 2**31 - 1  # elements that offsets of 32 bits reach

_LARGE = 64 * 1024
"""The bytes of machine code above which a kernel has two variants. Such a kernel keeps a row of 16,384
elements or more in registers, and each variant takes seconds to compile."""

_REFUSED = {
    "tt.print": "tl.device_print needs Triton's own launcher, which shows the text. Take it out",
    "tt.assert": "tl.device_assert with debug=True needs Triton's own launcher. Take debug=True out",
}


def compile_plans(
    plans: Sequence[Plan[TracedLaunch]], archs: Sequence[int], *, ptx: bool = True
) -> tuple[list[Plan[Launch]], list[Kernel]]:
    """Compiles the kernels of all plans of all ops of a library.

    `archs` and `ptx` are those of `compile_kernels`. Returns the plans in the same order, and the kernels to
    which their variants refer. BuildError, with the kernel and its line: it does not compile, needs too much
    shared memory, stores to an input, or cannot do without Triton's launcher.
    """
    launches = [
        (step, plan.guards) for plan in plans for step in plan.steps if isinstance(step, TracedLaunch)
    ]
    kernels: dict[Kernel, int] = {}  # of the library, where each is once

    def index(kernel: Kernel) -> int:
        return kernels.setdefault(kernel, len(kernels))

    compiled = _compile_variants(launches, partial(compile_kernels, archs=archs, ptx=ptx))
    made = {
        id(launch): _launch(launch, found, index)
        for (launch, _), found in zip(launches, compiled, strict=True)
    }
    finished = []
    for plan in plans:
        steps = [made[id(step)] if isinstance(step, TracedLaunch) else (step, []) for step in plan.steps]
        limits = dict.fromkeys(limit for _, of_step in steps for limit in of_step)
        done = tuple(step for step, _ in steps)
        finished.append(
            Plan(plan.combination, plan.ranks, done, plan.guards, plan.temporaries, tuple(limits))
        )
    return finished, list(kernels)


def _compile_variants(
    launches: Sequence[tuple[TracedLaunch, Sequence[Expression]]],
    compile_sources: Callable[..., list[Compiled | BuildError]],
) -> list[list[tuple[Variant[Source], Compiled]]]:
    """Compiles the variants of launches, given with the guards of their plans, each kernel once.

    The general variants come first. Some kernels do not compile with ints of 64 bits, as those that add one
    to a counter of 32: their general variant takes 32 bits. The others have PTX where the general one has. Of
    large kernels, the general variant and the one for the most multiples of 16 are made.
    """
    compiled: dict[Any, Compiled | BuildError] = {}

    def add(sources: Iterable[Source], **options: bool) -> None:
        new = {source.key: source for source in sources if source.key not in compiled}
        compiled.update(zip(new, compile_sources(list(new.values()), **options), strict=True))

    def result(variant: Variant[Source]) -> Compiled:
        made = compiled[variant.kernel.key]
        if isinstance(made, BuildError):
            raise made
        return made

    found = [variants(launch, guards) for launch, guards in launches]
    add(of_launch[-1].kernel for of_launch in found)
    for (launch, _), of_launch in zip(launches, found, strict=True):
        if isinstance(compiled[of_launch[-1].kernel.key], BuildError):
            of_launch[-1] = narrow_variant(launch)
    add(of_launch[-1].kernel for of_launch in found)
    others: dict[bool, list[Source]] = {True: [], False: []}  # by whether they have PTX
    for of_launch in found:
        images = result(of_launch[-1]).kernel.images
        if max(len(image.code) for image in images if not image.is_ptx) > _LARGE:
            del of_launch[1:-1]
        others[any(image.is_ptx for image in images)] += (variant.kernel for variant in of_launch[:-1])
    for ptx, sources in others.items():
        add(sources, ptx=ptx, check_ptx=False)
    return [[(variant, result(variant)) for variant in of_launch] for of_launch in found]


def _launch(
    launch: TracedLaunch, found: Sequence[tuple[Variant[Source], Compiled]], index: Callable[[Kernel], int]
) -> tuple[Launch, list[tuple[str, int, int]]]:
    """Returns the launch with compiled variants, and the limits of the tensors that it reads and writes."""
    limits = []
    for variant, compiled in found:
        pointers = [launch.arguments[index] for index, _ in variant.parameters]
        for ttir in compiled.ttir:
            uses = kernel_uses(ttir)
            for operation in _REFUSED.keys() & uses.operations:
                raise BuildError(f"{launch.label}: {_REFUSED[operation]}")
            for position in uses.written:
                argument = pointers[position]
                if isinstance(argument, Pointer) and argument.base == "input":
                    raise BuildError(
                        f"{launch.label}: it stores to {argument.name}, which is an input of the op where "
                        f"{launch.line} launches it. An op writes to new tensors, and to inputs that are "
                        "Tensor(a!) in its schema"
                    )
            for position in uses.narrow:
                argument = pointers[position]
                if isinstance(argument, Pointer) and argument.base in ("input", "output"):
                    limits.append((argument.base, argument.index, _MOST_NARROW))
    made = tuple(
        Variant(variant.requirements, variant.parameters, index(compiled.kernel))
        for variant, compiled in found
    )
    return Launch(launch.grid, launch.arguments, made), limits
