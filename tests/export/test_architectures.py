"""Tests that models of torch, transformers, timm and torchvision keep their results through an export."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from architectures import ARCHITECTURES, Architecture, missing
from architectures.common import Tensors
from export_models import each_exporter
from torch import nn
from torch.utils._pytree import tree_leaves

from twinop import torch_op
from twinop.errors import ExportError
from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")
TORCH_CANNOT = {
    ("multihead_attention", "torchscript"), ("swin", "dynamo"), ("t5", "dynamo"), ("t5_encoder", "dynamo"),
}  # fmt: skip
"""torch's own export refuses them."""


EXAMPLE = (2, 6)  # batch and length
FRESH = (5, 9)
ACCEPTED = 1e-4  # of an output's largest value


def results(model: nn.Module, tensors: Tensors, constants: Mapping[str, Any]) -> list[torch.Tensor]:
    """The model's tensors. Gradients are on: without them, torch's attention leaves zeros at padding."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.enable_grad():
        found = model(**copies, **constants)
    return [leaf.detach() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def compare(architecture: Architecture, path: Path, library: Path | None) -> None:
    """Asserts that the file gives the model's results on new inputs of another size."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    options.intra_op_num_threads = 1
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    torch.manual_seed(1)
    batch, length = (FRESH[axis] if axis in architecture.axes else EXAMPLE[axis] for axis in (0, 1))
    tensors = architecture.inputs(batch, length)
    expected = results(architecture.model(), tensors, architecture.constants)
    known = {entry.name for entry in session.get_inputs()}
    feeds = {name: tensor.numpy() for name, tensor in tensors.items() if name in known}
    found = [torch.from_numpy(array) for array in session.run(None, feeds)]
    assert len(found) == len(expected), f"{len(found)} outputs, torch has {len(expected)}"
    declared = [entry.shape for entry in session.get_outputs()]
    for index, (a, b, sizes) in enumerate(zip(found, expected, declared, strict=True)):
        assert a.shape == b.shape, f"output {index} has shape {tuple(a.shape)}, torch {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"output {index} is {a.dtype}, torch {b.dtype}"
        fits = [size == n or not isinstance(size, int) for size, n in zip(sizes, a.shape, strict=True)]
        assert all(fits), f"output {index} is declared as {sizes}, but has shape {tuple(a.shape)}"
        error = float((a - b).abs().max() / b.abs().max())
        assert error <= ACCEPTED, f"output {index} differs from torch by {error:.1e} of its largest value"


@pytest.mark.slow
@each_exporter
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export(name: str, exporter: str, tmp_path: Path, libraries: dict[str, Path]) -> None:
    architecture = ARCHITECTURES[name]
    if reason := missing(architecture.library):
        pytest.skip(reason)
    model = torch_op.replace_modules(architecture.model().train())
    tensors = architecture.inputs(*EXAMPLE)
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
        compare(architecture, path, libraries["custom_ops"])
        compare(architecture, path, None)
