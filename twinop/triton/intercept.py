"""Catches what a traced launcher calls: Triton's launches, and functions that need plain numbers."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ..aot_kernels.expression import ARCH
from .compile import check_triton
from .recorder import Recorder

_OF_SYMBOLS = {"sqrt": "Sqrt", "exp": "Exp", "log": "Log", "pow": "Power", "floor": "Floor", "ceil": "Ceil"}
"""Functions of `math` that take symbolic numbers while a launcher is traced."""


class WithoutDevice(TorchFunctionMode):
    """Indexes tensors without a device: torch's own methods ask for the GPU of a tensor."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            func = torch.ops.aten.contiguous
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        entries = index if isinstance(index, tuple) else (index,)
        if any(isinstance(entry, (torch.Tensor, list, bool, torch.SymBool)) for entry in entries):
            raise self._recorder.refusal("index")
        dimension = 0
        for place, entry in enumerate(entries):
            if entry is None:
                tensor = tensor.unsqueeze(dimension)
            elif entry is Ellipsis:
                dimension = tensor.dim() - sum(e is not None for e in entries[place + 1 :])
                continue
            elif isinstance(entry, slice):
                tensor = torch.ops.aten.slice(tensor, dimension, entry.start, entry.stop, entry.step or 1)
            else:
                tensor = torch.ops.aten.select(tensor, dimension, entry)
                continue
            dimension += 1
        return tensor


@contextmanager
def functions_of_symbols(recorder: Recorder) -> Iterator[None]:
    """Functions of `math` and `torch.cuda` that take symbolic numbers, or need no GPU."""
    symbolic = (torch.SymInt, torch.SymFloat)

    def on_symbols(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*values: Any) -> Any:
            if any(isinstance(value, symbolic) for value in values):
                if name == "Power":  # of ints, too, a float
                    values = tuple(recorder.symbols.operation("ToFloat", value) for value in values)
                return recorder.symbols.operation(name, *values)
            return function(*values)

        return called

    with ExitStack() as stack:
        for name, operation in _OF_SYMBOLS.items():
            stack.enter_context(mock.patch.object(math, name, on_symbols(getattr(math, name), operation)))
        for name in ("__enter__", "__exit__"):
            stack.enter_context(mock.patch.object(torch.cuda.device, name, lambda *_: None))
        device = _Device(recorder)
        for name in ("get_device_capability", "get_device_properties"):
            stack.enter_context(mock.patch.object(torch.cuda, name, getattr(device, name)))
        yield


class _Device:
    """Stands for the GPU, of which a plan may know the compute capability alone."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def get_device_capability(self, device: Any = None) -> tuple[Any, Any]:
        arch = self._recorder.symbols.number(ARCH)
        return arch // 10, arch % 10

    def get_device_properties(self, device: Any = None) -> "_Device":
        return self

    def __getattr__(self, name: str) -> Any:
        raise self._recorder.error(
            f"the launcher asks for {name} of the GPU, and a library serves several. Choose by sizes, or by "
            "torch.cuda.get_device_capability()"
        )


@contextmanager
def triton_launches(recorder: Recorder) -> Iterator[None]:
    """Records the launches of Triton's kernels instead of doing them.

    BuildError, at a launch: this version of Triton was not tested, or runs in interpreter mode.
    """
    if "triton" not in sys.modules:  # the launcher's kernels are others
        yield
        return
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        check_triton()
        _record(recorder, kernel, grid, args, kwargs)

    def refuse(kernel: Any, *args: Any, **kwargs: Any) -> None:
        raise recorder.error(
            f"{kernel.fn.__name__}: Triton is in interpreter mode, which compiles nothing. Unset "
            "TRITON_INTERPRET to build"
        )

    def run_tuned(autotuner: Any, *args: Any, **kwargs: Any) -> None:
        nargs = autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
        configurations, name = autotuner.configs, autotuner.base_fn.__name__
        if twice := sorted(kwargs.keys() & {each for one in configurations for each in one.all_kwargs()}):
            raise recorder.error(
                f"{name}: {', '.join(twice)}: in a configuration and in the call. Leave out one of them"
            )
        # A build measures nothing. Triton does not prune a single one.
        [first, *_] = autotuner.prune_configs(kwargs) if len(configurations) > 1 else configurations
        chosen = first.all_kwargs()
        if len(configurations) > 1:
            taken = ", ".join(f"{key}={value}" for key, value in chosen.items())
            recorder.notes.append(f"{name}: of {len(configurations)} configurations, untuned: {taken}")
        if first.pre_hook is not None:
            first.pre_hook({**nargs, **kwargs, **chosen})
        autotuner.fn.run(*args, **kwargs, **chosen)

    next_power_of_2 = triton.next_power_of_2.fn

    def power(n: Any) -> Any:
        is_symbolic = isinstance(n, torch.SymInt)
        return recorder.symbols.operation("NextPowerOf2", n) if is_symbolic else next_power_of_2(n)

    with (
        mock.patch.object(triton.next_power_of_2, "fn", power),  # who imported it by name calls this, too
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(InterpretedFunction, "run", refuse),
        mock.patch.object(Autotuner, "run", run_tuned),
    ):
        driver.set_active(_Device(recorder))
        try:
            yield
        finally:
            driver.set_active(None)  # the real one, made when it is used


def label_of(kernel: Any) -> str:
    """Returns the name of a `triton.JITFunction` and the line of its `def`: "mish_kernel, mish.py:7"."""
    before = next(i for i, line in enumerate(kernel.raw_src) if line.strip().startswith("def"))
    file = Path(kernel.fn.__code__.co_filename).name
    return f"{kernel.fn.__name__}, {file}:{kernel.starting_line_number + before}"


def _record(recorder: Recorder, kernel: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
    parameters = {parameter.name: parameter for parameter in kernel.params}
    label = label_of(kernel)
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    if kernel.pre_run_hooks:
        raise recorder.error(f"{label}: it has launch hooks, which a library cannot run. Remove them")
    try:
        bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in parameters})
    except TypeError as error:
        raise recorder.error(f"{label}: {error}") from None
    bound.apply_defaults()
    values = {  # a tl.constexpr has its value
        name: getattr(value, "value", None) if type(value).__name__ == "constexpr" else value
        for name, value in bound.arguments.items()
    }
    is_constant = {name: parameters[name].is_constexpr for name in values}
    constants = {name: recorder.constant(name, values[name]) for name in values if is_constant[name]}
    grid = grid({**values, **constants}) if callable(grid) else grid
    arguments = {name: value for name, value in values.items() if not is_constant[name]}
    recorder.launch(kernel, label, grid, arguments, constants, options)
