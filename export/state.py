"""Restores a model after its export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Runs its block with the model in eval mode and without torch's fused attention (`torch.backends.mha`).

    Afterwards every submodule is in its own mode again, and its buffers have their old values. Neither
    exporter knows the operators of the fused attention, which also writes zeros to hidden positions.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    values = {
        buffer: buffer.clone()
        for named in buffers.values()
        for buffer in named.values()
        if buffer is not None
    }
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in modes.items():
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers[module])
        with torch.no_grad():
            for buffer, value in values.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
