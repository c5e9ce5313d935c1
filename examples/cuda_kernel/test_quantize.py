"""Tests quantize in torch and in ONNX Runtime, with the library and without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from quantize import library_path, quantize

from twinop import deploy, export

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


class Net(torch.nn.Module):
    def forward(self, x):
        return quantize(x, 7)


@on_each_device
@pytest.mark.parametrize("count", [1, 5, 100_000])
def test_values(device: str, count: int) -> None:
    x = torch.randn(count, device=device)
    q, scale = quantize(x)
    assert q.dtype == torch.int8 and scale.shape == (1,)
    assert scale.item() == (x.abs().max() / 127).item()
    assert q.equal((x / scale).round().to(torch.int8)) and q.abs().max() == 127


def test_zeros_have_scale_one() -> None:
    q, scale = quantize(torch.zeros(3))
    assert q.tolist() == [0, 0, 0] and scale.item() == 1


def test_levels_that_int8_does_not_have() -> None:
    with pytest.raises(RuntimeError, match=r"levels"):
        quantize(torch.zeros(3), 200)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export(exporter: str, tmp_path: Path) -> None:
    path, library, x = tmp_path / "net.onnx", library_path(), torch.randn(5, 8)
    report = export.export(
        Net(), (x,), path, exporter=exporter, dynamic={"x": {0: "n"}}, library=library, optimize=False
    )
    assert report.parity.equal and report.without_library is not None
    found = deploy.session(path, ["CPUExecutionProvider"], library).run({"x": x.numpy()})
    for value, expected in zip(found.values(), Net()(x), strict=True):
        np.testing.assert_array_equal(value, expected.numpy())
