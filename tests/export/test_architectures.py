"""Tests that models of torch, transformers, timm and torchvision keep their results through an export."""

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, check, missing
from export_models import each_exporter

from twinop import torch_op
from twinop.errors import ExportError
from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")
TORCH_CANNOT = {
    ("multihead_attention", "torchscript"), ("swin", "dynamo"), ("t5", "dynamo"), ("t5_encoder", "dynamo"),
}  # fmt: skip
"""torch's own export refuses them."""


@pytest.mark.slow
@each_exporter
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export(name: str, exporter: str, tmp_path: Path, libraries: dict[str, Path]) -> None:
    architecture = ARCHITECTURES[name]
    if reason := missing(architecture.library):
        pytest.skip(reason)
    model = torch_op.replace_modules(architecture.model().train())
    tensors = architecture.inputs(*check.EXAMPLE)
    path = tmp_path / "ours" / "model.onnx"
    path.parent.mkdir()
    kwargs, dynamic = {**tensors, **architecture.constants}, dict.fromkeys(tensors, architecture.axes)
    try:
        export(model, (), path, kwargs=kwargs, exporter=exporter, dynamic=dynamic, optimize=False)
    except ExportError:
        assert not list(path.parent.iterdir())
        if (name, exporter) not in TORCH_CANNOT:
            raise
    else:
        check.compare(architecture, path, libraries["custom_ops"])
        check.compare(architecture, path, None)
