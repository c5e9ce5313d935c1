"""Restores a model and torch's settings after an export."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def kept_buffers(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restores the buffers that its block writes. The dict has their old values by name afterwards."""
    written: dict[str, torch.Tensor] = {}
    buffers = [(name, each, each._version, each.clone()) for name, each in model.named_buffers()]
    try:
        yield written
    finally:
        for name, buffer, version, old in buffers:
            if buffer._version > version or not same_bits(buffer, old):  # writes to .data have no version
                written[name] = old
                with torch.no_grad():
                    buffer.copy_(old)


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
    # A ScriptModule keeps its state in C++.
    plain = [module for module, _ in modes if not isinstance(module, torch.jit.ScriptModule)]
    kept = [(module, dict(vars(module))) for module in plain]
    inside = [(each, each.copy()) for _, held in kept for each in held.values() if isinstance(each, dict)]
    parameters = [(each, each.requires_grad, each.grad) for each in model.parameters()]
    settings = [(restore, read()) for read, restore in _SETTINGS]
    devices = {each.device.index for each in (*model.parameters(), *model.buffers()) if each.is_cuda}
    try:
        with kept_buffers(model), torch.random.fork_rng(sorted(devices)):
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
    finally:
        for restore, value in settings:
            restore(value)
        for module, held in kept:
            vars(module).clear()
            vars(module).update(held)
        for contents, before in inside:
            contents.clear()
            contents.update(before)
        for module, training in modes:
            module.training = training
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
