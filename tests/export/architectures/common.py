"""What an architecture is, and the example inputs that several share."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 64
SITE = Path(sys.prefix) / "architectures"  # where timm and torchvision are
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensors]  # (batch, length) -> new tensors by forward's arguments
    axes: Mapping[int, str] = field(default_factory=lambda: {0: "batch"})  # what stays open, of every input
    constants: Mapping[str, Any] = field(default_factory=dict)  # forward's other arguments
    library: str = "torch"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return randomized(self.make()).eval()


def randomized(model: nn.Module) -> nn.Module:
    """New weights, large enough for every branch to show: many models begin with a branch at or near zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter[0].numel()))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 1.5)
    return model


def padding(batch: int, length: int) -> torch.Tensor:
    """True at up to three padded places on the right. No window of four is padding alone: what a row without
    anything to attend to becomes, torch and ONNX below opset 23 see differently."""
    return torch.arange(length) >= length - torch.arange(batch)[:, None] % 4


def tokens(batch: int, length: int) -> Tensors:
    ids, mask = torch.randint(3, VOCABULARY, (batch, length)), (~padding(batch, length)).long()
    return {"input_ids": ids, "attention_mask": mask}


def image(size: int, name: str = "x") -> Callable[[int, int], Tensors]:
    return lambda batch, length: {name: torch.randn(batch, 3, size, size)}


def missing(library: str) -> str:
    """Why the library cannot be used, or "".

    timm and torchvision have a folder of their own. PyPI's torchvision needs torch's CUDA build; beside the
    CPU build, transformers fails, as it imports torchvision wherever it is installed.
    """
    if library in ("timm", "torchvision") and str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    if importlib.util.find_spec(library) is None:
        return (
            f"no {library}; ./build.sh test --all installs it, as does "
            f"pip install --no-deps --target {SITE} -r requirements/architectures.txt"
        )
    if library in ("timm", "torchvision"):
        _declare_operators_of_torchvision()
    return ""


def _declare_operators_of_torchvision() -> None:
    """Makes torchvision importable beside torch's CPU build, where the extension of PyPI's torchvision does
    not load: the import describes two of its operators to torch, which no model here calls."""
    if "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou) -> Tensor")
        importlib.import_module("torchvision")
