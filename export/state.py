"""Restores a model and torch's settings after an export."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from twinop.record.tolerance import same_bits

_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)
_CONTAINERS = (dict, list, set, deque)
_STATELESS = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)
_INTERNALS = {"torch", "functools", "logging", "threading", "weakref"}
_STRIP = 1 << 20  # elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLIPPED = 0b110  # of the last bits of a number: it changes by two or six units of its last place

_copies: dict[int, tuple[int, torch.Tensor]] = {}
"""The version and a copy of each tensor that a `kept_state` around has copied, by the tensor's id."""


@dataclass
class Written:
    """What a block wrote into a model: old values of buffers by name, and the names of other attributes."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)


def walk(
    named: Iterable[tuple[str, Any]], has_parts: Callable[[Any], bool] = lambda each: True
) -> Iterator[tuple[str, Any]]:
    """Yields objects and what they refer to, each once, by the name of the attribute. The entries of a dict
    with a name that is empty, or ends in a dot, get their own; `has_parts`: whether an object's attributes
    are followed."""
    waiting, seen = [*named], dict[int, Any]()
    while waiting:
        name, each = waiting.pop()
        if id(each) in seen or isinstance(each, _STATELESS):
            continue
        seen[id(each)] = each
        yield name, each
        if isinstance(each, dict):
            own = not name or name.endswith(".")
            waiting += [(f"{name}{key}" if own else name, value) for key, value in each.items()]
        elif isinstance(each, (*_CONTAINERS, tuple, frozenset)):
            waiting += [(name, value) for value in each]
        if has_parts(each):
            slots = [slot for kind in type(each).__mro__ for slot in getattr(kind, "__slots__", ())]
            waiting += [(name, getattr(each, slot, None)) for slot in slots if isinstance(slot, str)]
            waiting += [(name, vars(each))] if hasattr(each, "__dict__") else []


def _state(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and containers in which a model can keep state, by the name of its attribute. The
    containers of all attributes of a module, and of its buffers, have a name that ends in a dot, or none."""
    # A ScriptModule keeps its state in C++.
    plain = [each for each in model.named_modules() if not isinstance(each[1], torch.jit.ScriptModule)]
    prefixes = [(f"{name}." if name else "", vars(module)) for name, module in plain]
    roots = [*prefixes, *((name, held["_buffers"]) for name, held in prefixes)]
    for name, each in walk(roots, lambda each: type(each).__module__.partition(".")[0] not in _INTERNALS):
        is_parameter = isinstance(each, torch.nn.Parameter)
        if isinstance(each, (torch.Tensor, *_CONTAINERS)) and not is_parameter:
            yield name, each


def _contents(container: Any) -> list[int]:
    entries = [*container, *container.values()] if isinstance(container, dict) else container
    return [*map(id, entries)]


@contextmanager
def kept_state(model: torch.nn.Module) -> Iterator[Written]:
    """Restores what its block writes: attributes, what they hold, and tensors other than the parameters;
    `Written` is filled afterwards."""
    written, buffers = Written(), {id(each): name for name, each in model.named_buffers()}
    held, tensors = list[tuple[str, Any, Any]](), list[tuple[str, torch.Tensor, int, torch.Tensor]]()
    around = dict(_copies)
    for name, each in _state(model):
        if isinstance(each, torch.Tensor):
            if each.is_meta or each.layout is not torch.strided:  # without numbers, or without views of parts
                continue
            version, old = around.get(id(each), (-1, each))
            if version != _version(each):
                version, old = _copies[id(each)] = _version(each), each.detach().clone()
            tensors.append((name, each, version, old))
        else:
            held.append((name, each, dict(each) if isinstance(each, dict) else list(each)))
    try:
        yield written
    finally:
        _copies.clear()
        _copies.update(around)
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
            each.clear()
            each.extend(before) if isinstance(each, list | deque) else each.update(before)
        for name, each, version, old in tensors:
            # Writes to .data have no version.
            if _version(each) > version or (id(each) in buffers and not _same(each, old)):
                with torch.no_grad():
                    each.copy_(old)
                if id(each) in buffers:
                    written.buffers[buffers[id(each)]] = old
                else:
                    written.attributes.add(name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _strips(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns views of a tensor of few elements each: what is computed of them at once takes no memory."""
    length = max(_STRIP * max(len(tensor), 1) // max(tensor.numel(), 1), 1) if tensor.dim() else 0
    return tensor.split(length) if length else [tensor]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and all(map(same_bits, _strips(a), _strips(b)))


@contextmanager
def changed_weights(model: torch.nn.Module) -> Iterator[None]:
    """Runs its block with other last bits of all floating-point weights and buffers, and restores them: they
    are flipped where they are, which a second time undoes. No weight is copied."""
    undo = list[tuple[torch.Tensor, torch.dtype, int]]()  # with the version before
    weights = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    with torch.no_grad():
        try:
            for each in weights:
                with suppress(RuntimeError):  # of tensors that cannot be written, such as expanded ones
                    for strip in _strips(each.view(_INTEGERS[each.itemsize])):
                        undo.append((strip, each.dtype, _version(strip)))
                        _flip(strip, each.dtype)
            yield
        finally:
            for strip, dtype, version in undo:
                if _version(strip) > version:  # Ctrl-C may come before the last one is flipped
                    _flip(strip, dtype)


def _flip(integers: torch.Tensor, dtype: torch.dtype) -> None:
    """Flips last bits of the normal numbers of a dtype, given as integers, which stay normal."""
    mantissa = round(1 / torch.finfo(dtype).eps) - 1
    exponents = (1 << 8 * dtype.itemsize - 1) - 1 & ~mantissa
    exponent = integers & exponents
    is_normal = (exponent != 0) & (exponent != exponents)
    integers.bitwise_xor_(is_normal.to(integers.dtype) * (_FLIPPED & mantissa))


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Runs its block with the model in eval mode and without torch's fused attention (`torch.backends.mha`).

    Afterwards, also after an error or Ctrl-C, every submodule is in its own mode again, with its attributes,
    hooks and the old values of its buffers. So are the random numbers and torch's settings. Neither exporter
    knows the operators of the fused attention, which also writes zeros to hidden positions.
    """
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
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
