"""Helion's kernels in a launcher: Helion writes their Triton code, and the function that launches it.

A call of a `helion.kernel` becomes a call of that function. Helion writes it for tensors on the CPU, which
needs no GPU, and chooses it as in its own calls: by dtypes, ranks, and the sizes that it asked about.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import _guards
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import BuildError
from .compile import check_version

_in_launcher: ContextVar[bool] = ContextVar("twinop_helion", default=False)


@contextmanager
def helion_kernels() -> Iterator[None]:
    """Lets `helion.kernel` objects that are called within the block run the function that Helion writes.

    BuildError, at a call: an untested version of Helion, or a kernel without a configuration or with static
    shapes.
    """
    if "helion" in sys.modules:
        _watch(sys.modules["helion"].Kernel)
    token = _in_launcher.set(True)
    try:
        yield
    finally:
        _in_launcher.reset(token)


@functools.cache
def _watch(kernels: Any) -> None:
    original = kernels.__call__

    def __call__(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not _in_launcher.get():
            return original(kernel, *args, **kwargs)
        args = kernel.normalize_args(*args, **kwargs)
        return _function(kernel, args)(*args)

    kernels.__call__ = __call__


def _function(kernel: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """Returns what Helion writes for such arguments; ValueError: it is for other sizes than a plan's."""
    from helion.language.constexpr import ConstExpr

    check_version("Helion", importlib.metadata.version("helion"), (1, 5), (1, 5))
    if kernel.settings.static_shapes or not kernel.configs:
        raise BuildError(
            f"{Path(kernel.fn.__code__.co_filename).name}: {kernel.name}: expected @helion.kernel("
            "config=..., static_shapes=False): a build does not tune, and a library serves all shapes"
        )
    no_gpu = mock.patch.object(torch.cuda, "is_available", lambda: False)  # the code is for several
    with kernel._bind_lock, no_gpu, _disable_current_modes(), DisableTorchFunction(), _guards.tracing(None):
        samples = tuple(map(_sample, args))
        bound = kernel._bind(samples)  # `bind`, without what it does while torch compiles
        function = _written(kernel, bound)
    asked = [*kernel._specialize_extra.get(bound._base_spec_key, ())]
    asked += [itemgetter(i) for i, kind in enumerate(kernel._annotations) if kind is ConstExpr]
    if not all(_answer(question, args) == question(samples) for question in asked):
        raise ValueError(f"Helion wrote {kernel.name} for the sizes of the samples, and no sample has such")
    return function


@functools.cache
def _written(kernel: Any, bound: Any) -> Any:
    from torch._inductor.codecache import PyCodeCache  # which takes seconds to import

    module = PyCodeCache.load(bound.to_triton_code(kernel.configs[0]))
    sys.modules.pop(module.__name__, None)  # a library is not made of this file, but of the user's
    return getattr(module, kernel.name)


def _answer(question: Any, args: Sequence[Any]) -> Any:
    """Answers a question of Helion; one whether sizes or strides are equal, for symbols, too."""
    fact = getattr(question, "extractor", question)
    if not hasattr(fact, "sources"):
        return question(args)
    import sympy  # type: ignore[import-untyped]
    import triton

    tensors = dict(zip(fact.param_names, args, strict=False))
    names = [symbol for symbol, _ in fact.sources]
    values = [getattr(tensors[of.base.local_name], of.prop.method_name())(of.idx) for _, of in fact.sources]
    left, right = sympy.lambdify(names, (fact.lhs, fact.rhs))(*values)
    return bool((triton.next_power_of_2(left) if fact.block else left) == right) == fact.equal


def _sample(value: Any) -> Any:
    """Returns a tensor on the CPU for one with symbolic sizes, and the value behind a symbolic number."""
    if isinstance(value, torch.Tensor):
        return torch.empty([_sample(size) for size in value.shape], dtype=value.dtype)
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
