"""torch.nn modules over the ops, and their exchange for torch's own in an existing model."""

from collections.abc import Callable

import torch
from torch import nn

from twinop.torch_op.registry import functions


class CustomReLU(nn.Module):
    """ReLU through `custom_domain::relu`: y = max(x, 0), NaN stays NaN.

    Shape: any; output as the input. Dtypes: float32, float16, bfloat16, float64.

    Args:
        variant: the CUDA kernel: "auto" (fastest), or "scalar" and "vec4" to study; all give the same bits.
    """

    def __init__(self, variant: str = "auto") -> None:
        super().__init__()
        self.variant = variant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions["relu"](x, self.variant)

    def extra_repr(self) -> str:
        return "" if self.variant == "auto" else f"variant={self.variant!r}"


_REPLACEMENTS: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    nn.ReLU: lambda module: CustomReLU()
}
"""torch's module type (subclasses are left alone: they may compute something else) -> its twin."""


def replace_modules(model: nn.Module) -> nn.Module:
    """Swaps torch's modules for twinop's, in place, and returns the model (a new module if it is itself one).

    Replaced: `nn.ReLU`. A module that is used in several places stays one module. `nn.ReLU(inplace=True)`
    becomes out of place. Functional calls (`F.relu`) are not modules and stay as they are.
    """
    replaced: dict[nn.Module, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        make = _REPLACEMENTS.get(type(module))
        if make is not None and module not in replaced:
            replaced[module] = make(module).train(module.training)
        return replaced.get(module, module)

    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = twin(child)
    return twin(model)
