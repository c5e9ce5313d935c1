"""Restores a model and torch's settings after an export."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Runs its block with the model in eval mode and without torch's fused attention (`torch.backends.mha`).

    Afterwards, also after an error or Ctrl-C, every submodule is in its own mode again, with its attributes,
    hooks and the old values of its buffers. So are the random numbers and torch's settings. Neither exporter
    knows the operators of the fused attention, which also writes zeros to hidden positions.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    # A ScriptModule keeps its state in C++.
    kept = [dict(vars(m)) for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    inside = [(value, value.copy()) for held in kept for value in held.values() if isinstance(value, dict)]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    parameters = [(each, each.requires_grad, each.grad) for each in model.parameters()]
    settings = [(restore, read()) for read, restore in _SETTINGS]
    devices = {each.device.index for each in (*model.parameters(), *model.buffers()) if each.is_cuda}
    try:
        with torch.random.fork_rng(sorted(devices)):
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
    finally:
        for restore, value in settings:
            restore(value)
        plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        for module, held in zip(plain, kept, strict=True):
            vars(module).clear()
            vars(module).update(held)
        for contents, before in inside:
            contents.clear()
            contents.update(before)
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
