"""Tests l2_normalize in torch and in ONNX Runtime, with the library and without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from l2_normalize import l2_normalize, library_path

from twinop import deploy, export

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


class Net(torch.nn.Module):
    def forward(self, x):
        return l2_normalize(x)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 100, device=device, dtype=dtype)
    torch.testing.assert_close(l2_normalize(x), torch.nn.functional.normalize(x, dim=-1))


@on_each_device
def test_gradient(device: str) -> None:
    x = torch.randn(4, 20, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2_normalize, (x,))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export(exporter: str, tmp_path: Path) -> None:
    path, library, x = tmp_path / "net.onnx", library_path(), torch.randn(5, 8)
    report = export.export(
        Net(), (x,), path, exporter=exporter, dynamic={"x": {0: "n"}}, library=library, optimize=False
    )
    assert report.parity.equal and report.without_library is not None
    found = deploy.session(path, ["CPUExecutionProvider"], library).run({"x": x.numpy()})
    (y,) = found.values()
    np.testing.assert_array_equal(y, Net()(x).numpy())
