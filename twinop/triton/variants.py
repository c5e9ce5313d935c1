"""Chooses the variants of a launch: for which arguments Triton's compiler makes a kernel of its own.

Triton compiles a kernel again for pointers and ints that are multiples of 16, for ints that are 1, and for
ints of 32 and of 64 bits: it loads 16 bytes at once only where it knows that it can. The layout of a
reduction follows from that, and so do its last bits. The variants of a launch, in the order in which the
library tries them, are:

1. Every pointer is a multiple of 16, every int fits in 32 bits, and of the ints as many as possible are
   multiples of 16: all, all but a few, none. Triton's own launcher takes the same kernels in these cases.
2. The general one: nothing is known of the pointers, and ints have 64 bits.

A variant is left out where the guards of the plan say that it would never be taken. Of a kernel with much
code, the first and the last are compiled (`launches.py`).

Ints that are the same expression count as one. Constants are treated as Triton treats them: a stride of 1
becomes a constant of the kernel. An int that happens to be 1 at run time does not.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..aot_kernels.expression import Expression
from ..aot_kernels.plan import POINTER, Pointer, Scalar, Variant
from ..errors import BuildError
from .compile import Source
from .recorder import TracedLaunch

MOST_DIVISIBLE = 3
"""How many variants differ in which ints are multiples of 16."""

_ANY, _MULTIPLE_OF_16, _LONG = 3, 32, 2**40 + 3
"""Ints for which Triton specialises as it does for all of their kind."""

_TRIES = (1, 2, 3, 8, 15, 16, 17, 24, 32, 48, 64, 100, 128)


def variants(launch: TracedLaunch, guards: Sequence[Expression] = ()) -> list[Variant[Source]]:
    """Returns the variants of a launch, the general one last; BuildError: Triton does not take it."""
    groups = _groups(launch)
    small = [each for guard in guards if (each := _below_16(guard)) is not None]
    patterns = _patterns(tuple(expression for expression in groups if expression not in small))
    found = [_variant(launch, groups, multiples) for multiples in patterns]
    general = _variant(launch, groups, aligned=False, other=_LONG)
    distinct = {
        variant.kernel.key: variant for variant in [*found, general]
    }  # the last of equal ones asks for less
    return list(distinct.values())


def _below_16(guard: Expression) -> Expression | None:
    """Returns what has a block below 16, if a guard says so: it is not a multiple of 16."""
    match guard:
        case Expression("==", (Expression("NextPowerOf2", (value,)), Expression("constant", (int(power),)))):
            return value if power < 16 else None
    return None


def narrow_variant(launch: TracedLaunch) -> Variant[Source]:
    """Returns a general variant with ints of 32 bits, for a kernel that does not compile with 64."""
    return replace(_variant(launch, _groups(launch), aligned=False), requirements=())


def _groups(launch: TracedLaunch) -> dict[Expression, list[int]]:
    """Returns the ints that are not constants: the arguments of each expression."""
    groups: dict[Expression, list[int]] = {}
    for index, argument in enumerate(launch.arguments):
        if isinstance(argument, Scalar) and argument.type == "int" and not _is_constant(argument.value):
            groups.setdefault(argument.value, []).append(index)
    return groups


def _variant(
    launch: TracedLaunch,
    groups: Mapping[Expression, list[int]],
    multiples: frozenset[Expression] = frozenset(),
    aligned: bool = True,
    other: int = _ANY,
) -> Variant[Source]:
    samples: dict[int, Any] = {}
    for expression, indices in groups.items():
        samples.update(dict.fromkeys(indices, _MULTIPLE_OF_16 if expression in multiples else other))
    source = specialise(
        launch,
        [
            samples[index] if index in samples else _sample(argument, aligned)
            for index, argument in enumerate(launch.arguments)
        ],
    )
    places = {name: place for place, name in enumerate(source.signature)}
    kinds = {index: source.signature[argument.name] for index, argument in enumerate(launch.arguments)}
    multiple = {
        i for i, argument in enumerate(launch.arguments) if (places[argument.name],) in source.attributes
    }
    requirements = [(i, "DivisibleBy16") for i in sorted(multiple) if kinds[i].startswith("*")]
    for indices in groups.values():
        if multiple.intersection(indices):
            requirements.append((indices[0], "DivisibleBy16"))
        if "i32" in [kinds[index] for index in indices]:
            requirements.append((indices[0], "FitsI32"))
    in_order = sorted(kinds, key=lambda index: places[launch.arguments[index].name])
    renamed = {"u1": "i1"}
    types = {i: POINTER if kind[0] == "*" else renamed.get(kind, kind) for i, kind in kinds.items()}
    parameters = tuple((index, types[index]) for index in in_order if types[index] != "constexpr")
    return Variant(tuple(requirements), parameters, source)


def specialise(launch: TracedLaunch, values: Sequence[Any]) -> Source:
    """Returns for what Triton's own launcher would compile the kernel, were it called with these values."""
    kernel = launch.kernel
    # The contraction of multiply and add is pinned, as its default changes in Triton 3.10.
    pinned = {"enable_fp_fusion": True, "debug": bool(kernel.debug)} | dict(launch.options)
    backend, bind = _binder(kernel)
    given = {argument.name: value for argument, value in zip(launch.arguments, values, strict=True)}
    try:
        bound, specialization, options = bind(**given, **launch.constants, **pinned)
        _, signature, constants, attributes = kernel._pack_args(
            backend, dict(options), bound, specialization, options
        )
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise BuildError(f"{launch.label}: Triton does not take these arguments: {error.args[0]}") from error
    attributes = {place: value for place, value in attributes.items() if value}
    return Source(kernel, signature, constants, attributes, options, launch.label)


@cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    """Returns Triton's backend, and its function that binds arguments and finds their specialisation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


@dataclass(frozen=True)
class Address:
    """Stands for a tensor of a dtype at an address."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        return self.address


def _sample(argument: Pointer | Scalar, aligned: bool) -> Any:
    if isinstance(argument, Pointer):
        return Address(16 if aligned else 1, argument.dtype)
    if argument.type == "int":
        return argument.value.evaluate()
    return {"i1": True}.get(argument.type, 0.5)


def _is_constant(expression: Expression) -> bool:
    return not any(each.operation in ("size", "attribute", "text_is", "arch") for each in expression.parts())


@cache
def _patterns(expressions: tuple[Expression, ...]) -> list[frozenset[Expression]]:
    """Returns which of the expressions can be multiples of 16 at once: most of them first, none at the end.

    Where there are more sets than `MOST_DIVISIBLE`, those are kept that leave out first sizes of tensors. A
    first size is not a stride, and seldom the length of a row.
    """
    possible = set(_sampled_patterns(expressions)) - {frozenset()}

    def rank(pattern: frozenset[Expression]) -> tuple[int, int, list[bool]]:
        first_sizes = sum(each.operation == "size" and each.operands[1] == 0 for each in pattern)
        return -len(pattern), first_sizes, [expression not in pattern for expression in expressions]

    return [*sorted(possible, key=rank)[: MOST_DIVISIBLE - 1], frozenset()]


def _sampled_patterns(expressions: Sequence[Expression]) -> Iterable[frozenset[Expression]]:
    """Evaluates the expressions for many sizes. A set that is missed costs speed where it occurs, no more."""
    parts = [part for expression in expressions for part in expression.parts()]
    used = [part.operands for part in parts if part.operation == "size"]
    tensors, rank = (1 + max((place[axis] for place in used), default=0) for axis in (0, 1))
    attributes = 1 + max((part.operands[0] for part in parts if part.operation == "attribute"), default=0)
    generator = random.Random(0)
    for _ in range(100 * len(expressions)):
        sizes = [generator.choices(_TRIES, k=rank) for _ in range(tensors)]
        values = generator.choices(_TRIES, k=attributes)
        with suppress(ArithmeticError):
            yield frozenset(e for e in expressions if e.evaluate(sizes, values) % 16 == 0)
