"""Restores a model and torch's settings after an export."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from twinop.tolerance import same_bits

_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


_CONTAINERS = (dict, list, set, deque)
_STATELESS = (str, bytes, int, float, type(None), type, ModuleType, FunctionType, torch.nn.Parameter)
_INTERNALS = {"torch", "functools", "logging", "threading", "weakref"}


@dataclass
class Written:
    """What a block wrote into a model: old values of buffers by name, and the names of other attributes."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)


def _state(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and containers in which a model can keep state, by the name of its attribute.

    The containers of all attributes of a module, and of its buffers, have a name that ends in a dot, or none.
    """
    # A ScriptModule keeps its state in C++.
    plain = [each for each in model.named_modules() if not isinstance(each[1], torch.jit.ScriptModule)]
    prefixes = [(f"{name}." if name else "", vars(module)) for name, module in plain]
    waiting: list[tuple[str, Any]] = [*prefixes, *((name, held["_buffers"]) for name, held in prefixes)]
    seen = set[int]()
    while waiting:
        name, each = waiting.pop()
        if id(each) in seen or isinstance(each, _STATELESS):
            continue
        seen.add(id(each))
        if isinstance(each, (torch.Tensor, *_CONTAINERS)):
            yield name, each
        if isinstance(each, dict):
            is_module = not name or name.endswith(".")
            waiting += [(f"{name}{key}" if is_module else name, value) for key, value in each.items()]
        elif isinstance(each, (*_CONTAINERS, tuple)):
            waiting += [(name, value) for value in each]
        elif hasattr(each, "__dict__") and type(each).__module__.partition(".")[0] not in _INTERNALS:
            waiting.append((name, vars(each)))


def _contents(container: Any) -> list[int]:
    entries = [*container, *container.values()] if isinstance(container, dict) else container
    return [*map(id, entries)]


def _restore(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, list | deque) else container.update(before)


@contextmanager
def kept_state(model: torch.nn.Module) -> Iterator[Written]:
    """Restores what its block writes: attributes, what they hold, and tensors other than the parameters.

    `Written` is filled afterwards.
    """
    written, buffers = Written(), {id(each): name for name, each in model.named_buffers()}
    held, tensors = list[tuple[str, Any, Any]](), list[tuple[str, torch.Tensor, int, torch.Tensor]]()
    for name, each in _state(model):
        if isinstance(each, torch.Tensor):
            tensors.append((name, each, _version(each), each.detach().clone()))
        else:
            held.append((name, each, dict(each) if isinstance(each, dict) else list(each)))
    try:
        yield written
    finally:
        for name, each, before in held:
            if _contents(each) == _contents(before):
                continue
            if isinstance(each, dict) and (not name or name.endswith(".")):
                changed = [key for key in {*each, *before} if each.get(key) is not before.get(key)]
                for key in changed:
                    if (buffer := buffers.get(id(before.get(key)))) is not None:
                        written.buffers[buffer] = before[key]
                    elif not key.startswith("_"):
                        written.attributes.add(f"{name}{key}")
            else:
                written.attributes.add(name)
            _restore(each, before)
        for name, each, version, old in tensors:
            # Writes to .data have no version.
            if _version(each) > version or (id(each) in buffers and not same_bits(each, old)):
                with torch.no_grad():
                    each.copy_(old)
                if id(each) in buffers:
                    written.buffers[buffers[id(each)]] = old
                else:
                    written.attributes.add(name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def changed_weights(model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Runs its block with other floating-point weights and buffers, and restores them."""
    weights = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    old = [each.detach().clone() for each in weights]

    def write(values: Iterable[torch.Tensor]) -> None:
        for each, value in zip(weights, values, strict=True):
            with torch.no_grad(), suppress(RuntimeError):  # of expanded tensors, which cannot be written
                each.copy_(value)

    try:
        write(change(each) for each in old)
        yield
    finally:
        write(old)


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Runs its block with the model in eval mode and without torch's fused attention (`torch.backends.mha`).

    Afterwards, also after an error or Ctrl-C, every submodule is in its own mode again, with its attributes,
    hooks and the old values of its buffers. So are the random numbers and torch's settings. Neither exporter
    knows the operators of the fused attention, which also writes zeros to hidden positions.
    """
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(each, each.requires_grad, each.grad) for each in model.parameters()]
    settings = [(restore, read()) for read, restore in _SETTINGS]
    devices = {each.device.index for each in (*model.parameters(), *model.buffers()) if each.is_cuda}
    try:
        with kept_state(model), torch.random.fork_rng(sorted(devices)):
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
    finally:
        for restore, value in settings:
            restore(value)
        for module, training in modes:
            module.training = training
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
