"""Tests that models of torch, transformers, timm and torchvision keep their results through an export."""

from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, check, missing
from export_models import each_exporter
from torch import nn

from twinop import torch_op
from twinop.errors import ExportError
from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")
TORCH_CANNOT = {
    ("multihead_attention", "torchscript"), ("swin", "dynamo"), ("t5", "dynamo"), ("t5_encoder", "dynamo"),
}  # fmt: skip
"""torch's own export refuses them, or its file does not give the model's results."""


def state(model: nn.Module) -> set[tuple[Any, ...]]:
    """Returns each bit of the parameters and buffers, and each module's mode."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        *((name, id(t), t.requires_grad, t.dtype, t.detach().numpy().tobytes()) for name, t in tensors),
        *((name, module.training) for name, module in model.named_modules()),
    }


@pytest.mark.slow
@each_exporter
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export(name: str, exporter: str, tmp_path: Path, libraries: dict[str, Path]) -> None:
    architecture = ARCHITECTURES[name]
    if reason := missing(architecture.library):
        pytest.skip(reason)
    model = torch_op.replace_modules(architecture.model().train())
    next(iter(model.children())).eval()  # as a frozen part of a model in training
    before = state(model)
    tensors = architecture.inputs(*check.EXAMPLE)
    path = tmp_path / "ours" / "model.onnx"
    path.parent.mkdir()
    try:
        export(
            model, (), path, kwargs={**tensors, **architecture.constants}, exporter=exporter,
            dynamic=dict.fromkeys(tensors, architecture.axes),
         optimize=False)  # fmt: skip
    except ExportError:
        assert not list(path.parent.iterdir())
        refused = check.torchs_own(architecture, exporter, tmp_path / "torch.onnx")
        if not refused or (name, exporter) not in TORCH_CANNOT:
            raise
    else:
        check.compare(architecture, path, libraries["custom_ops"])
        check.compare(architecture, path, None)
    assert (changed := {name for name, *_ in state(model) ^ before}) == set(), f"changed: {changed}"
